"""How far apart the times of unchanged rows are from run to run, which the samples of one run cannot show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy import optimize, stats

from ..statistics import Noise, spread

__all__ = ["Kind", "Observed", "most_run", "noise_of", "usual_run"]

Kind = Literal["device", "host", "cpu"]


class _Measured(NamedTuple):
    """Measured deviations of one kind: between runs as assumed for few rows, the least and the most; between visits."""

    run: float
    least: float
    most: float
    visit: float


# Medians of unchanged rows in two runs on one GPU (three sweeps on an H100; `forward` and `inference` on an H200) are
# 0.2 to 1.7 % apart in device time, 8 to 40 % in host time; in 28 pairs of sweeps on a shared CPU with two cores
# 6 to 55 %.  A larger deviation means that many rows have changed.
_MEASURED: dict[Kind, _Measured] = {
    "device": _Measured(run=0.007, least=0.005, most=0.03, visit=0.003),
    "host": _Measured(run=0.2, least=0.1, most=0.4, visit=0.05),
    "cpu": _Measured(run=0.2, least=0.02, most=0.25, visit=0.03),
}
_SUPPOSED = 10  # assumed rows with the usual deviation, added to the compared rows
_QUARTILE = float(stats.norm.ppf(0.75)) ** 2  # the median of squared standard normal numbers


def usual_run(kind: Kind) -> float:
    """The deviation, in logarithms, of one unchanged row's medians from run to run."""
    return _MEASURED[kind].run


def most_run(kind: Kind) -> float:
    """The most that this deviation may be."""
    return _MEASURED[kind].most


class Observed(NamedTuple):
    """The medians of visits on both sides, milliseconds or ratios."""

    before: Sequence[float]
    after: Sequence[float]


def noise_of(kind: Kind, observed: Sequence[Observed]) -> Noise:
    """The noise of rows of one kind, from all of them; most must be unchanged.

    The spread of visits is the median of the rows' own.  The deviation of runs is chosen so that half of the rows' log
    ratios, divided by their total deviation, lie within the quartiles of the normal distribution; ten numbers of the
    usual size are added to the rows.
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
