"""How far unchanged rows lie apart from one run to another, which no samples of one run show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy import optimize, stats

from ..statistics import Noise, spread

__all__ = ["Kind", "Observed", "most_run", "noise_of", "usual_run"]

Kind = Literal["device", "host", "cpu"]


class _Measured(NamedTuple):
    """What was measured of one kind: of runs, that which is supposed of few rows, the least and the most; of visits."""

    run: float
    least: float
    most: float
    visit: float


# Medians of unchanged rows in two runs on one GPU (three sweeps on an H100; `forward` and `inference` on an H200) lie
# 0.2 to 1.7 % apart in what the device decides, 8 to 40 % in what its host does; in 28 pairs of sweeps on a shared
# CPU of two cores 6 to 55 %.  Above the most, so many rows have changed.
_MEASURED: dict[Kind, _Measured] = {
    "device": _Measured(run=0.007, least=0.005, most=0.03, visit=0.003),
    "host": _Measured(run=0.2, least=0.1, most=0.4, visit=0.05),
    "cpu": _Measured(run=0.2, least=0.02, most=0.25, visit=0.03),
}
_SUPPOSED = 10  # rows' worth of what was measured, beside those that are compared
_QUARTILE = float(stats.norm.ppf(0.75)) ** 2  # half of squared normal numbers are smaller


def usual_run(kind: Kind) -> float:
    """How far one unchanged row's medians lie apart from run to run: a deviation of logarithms."""
    return _MEASURED[kind].run


def most_run(kind: Kind) -> float:
    """The most that it may be."""
    return _MEASURED[kind].most


class Observed(NamedTuple):
    """The medians of visits on both sides, milliseconds or ratios."""

    before: Sequence[float]
    after: Sequence[float]


def noise_of(kind: Kind, observed: Sequence[Observed]) -> Noise:
    """The noise of rows of one kind, from all of them, most of which have not changed.

    The spread of visits is the median of the rows' own.  That of runs is what makes half of the
    rows' log ratios lie within the quartiles of normal numbers about 0, where it and the
    spread of their visits are their deviation; ten numbers of the usual size are beside them.
    """
    measured = _MEASURED[kind]
    spreads = [each for sides in observed for side in sides if (each := spread(side)) is not None]
    visit = max(measured.visit, float(np.median(spreads))) if spreads else measured.visit
    shifts = [float(np.log(np.median(after) / np.median(before))) for before, after in observed]
    supposed = stats.norm.ppf((np.arange(_SUPPOSED) + 0.5) / _SUPPOSED) * measured.run
    squares = np.concatenate([shifts, supposed]) ** 2
    visits = [visit**2 / min(len(before), 3) + visit**2 / min(len(after), 3) for before, after in observed]
    variances = np.concatenate([visits, np.zeros(_SUPPOSED)])

    def beyond(run: float) -> float:
        return float(np.median(squares / (variances + run**2))) - _QUARTILE

    if beyond(measured.least) <= 0:
        return Noise(measured.least, visit)
    if beyond(measured.most) >= 0:
        return Noise(measured.most, visit)
    return Noise(float(optimize.brentq(beyond, measured.least, measured.most)), visit)
