"""Compare two sets of visits: how far apart they are, and how small a difference they could have shown."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import stats

from attnbench.errors import InputError

__all__ = ["MEDIAN_ERROR", "Comparison", "Noise", "TimeVerdict", "compare", "median_interval", "spread"]

TimeVerdict = Literal["faster", "slower", "same", "uncertain"]
POWER = 0.95  # the probability of finding a change of the size that is called visible
CHANCE = 0.01  # of any false alarm in a whole family
# Of Student's t: unchanged rows on recorded GPUs and CPUs differ by up to 5 of their deviations, once in a hundred.
FREEDOM = 8
_MOST_VISITS = 3  # effects of clocks and neighbours outlast a visit, so more visits are not independent
_WEIGHT = 4  # visits of the usual noise, added to a row's own few
_DOUBT = 1.5  # the next visits may have this many times the variance that few visits show
_TRIMMED_FROM = 5  # visits: with fewer, one at another clock may be a third of the information
MEDIAN_ERROR = math.sqrt(math.pi / 2)  # the standard error of a median over that of a mean, for normal numbers
_LARGEST_LOGARITHM = math.log(sys.float_info.max)
_Logs: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Noise:
    """How far two sets of visits differ without any change, as standard deviations of logarithms (0.01 is 1 %).

    ``visit`` is the usual deviation of a visit's median from the others of its run.  ``run`` is the deviation between
    runs beyond what their visits show: another temperature, other addresses, another neighbour.
    """

    run: float = 0.0
    visit: float = 0.01


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`.

    ``ratio`` is after over before, above 1 if after takes longer; ``interval`` contains it with 95 % confidence;
    ``visible`` is the smallest slow-down that would have been found with 95 %: 0.02 is 2 %.
    """

    verdict: TimeVerdict
    ratio: float
    interval: tuple[float, float]
    visible: float


def compare(
    before: Sequence[float],
    after: Sequence[float],
    *,
    factor: float = 0.03,
    noise: Noise = Noise(),
    family: int = 1,
) -> Comparison:
    """Decide whether ``after`` takes longer than ``before``, less, as long, or whether that is uncertain.

    Both are medians of visits in milliseconds: samples of one visit are taken within milliseconds and are alike, so
    visits are the unit of replication.  ``factor`` is the size of change that matters, ``family`` the number of
    comparisons made at once.

    - ``slower``, ``faster``: significant, with a probability of at most 1 % for any false one in the family; confirmed
      by the ranks of the visits, so that two clocks in both sets do not decide; and larger than half of ``factor``,
      because a true 3 % is estimated below 3 % every second time.
    - ``same``: a slow-down of ``factor`` would have been found with 95 %, and was not.
    - ``uncertain``: anything else.

    The ratio is that of the medians over visits.  Its deviation has a part from the visits (their spread, which few
    visits estimate badly, so it is drawn towards ``noise.visit``) and ``noise.run``.  Tails are those of Student's t
    with 8 degrees of freedom, because runs differ by several deviations more often than normal numbers.

    Raises InputError if a set is empty or not a flat list of positive finite numbers, or if ``factor`` is not a
    positive finite number.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise InputError(f"factor is {factor}, expected a positive finite number")
    old, new = (np.sort(np.log(_checked(name, each))) for name, each in (("before", before), ("after", after)))
    limit, line = math.log1p(factor), math.log1p(factor) / 2
    shift = _middle(new) - _middle(old)
    visits = _variance(old, noise.visit) + _variance(new, noise.visit)
    deviation, doubted = (math.sqrt(noise.run**2 + each) for each in (visits, _DOUBT * visits))
    beyond_doubt = _quantile(1 - CHANCE / family)
    needed = max(beyond_doubt * deviation, line)
    visible = max(beyond_doubt * doubted, line) + _quantile(POWER) * doubted
    verdict: TimeVerdict = "uncertain"
    if abs(shift) > needed:
        if _ranked_above(*((new, old) if shift > 0 else (old, new))):
            verdict = "slower" if shift > 0 else "faster"
        else:
            visible = math.inf  # the difference between two clocks would hide any change
    elif visible <= limit:
        verdict = "same"
    either = _quantile(0.975) * deviation
    seen = _ratio(visible) - 1 if math.isfinite(visible) else math.inf
    return Comparison(verdict, _ratio(shift), (_ratio(shift - either), _ratio(shift + either)), seen)


def spread(medians: Sequence[float]) -> float | None:
    """The deviation of visits' medians from their median, of logarithms; None for a single visit.

    Computed from the mean distance to the median, so that a second clock counts even if most visits had the first.
    With five visits or more the largest distance is replaced by the next, because that visit may have been delayed.
    """
    return _spread(np.sort(np.log(_checked("medians", medians))))


def _spread(logs: _Logs) -> float | None:
    if logs.size < 2:
        return None
    distances = np.sort(np.abs(logs - _middle(logs)))
    if logs.size >= _TRIMMED_FROM:
        distances[-1] = distances[-2]
    return MEDIAN_ERROR * float(distances.sum()) / math.sqrt(logs.size * (logs.size - 1))


def _variance(logs: _Logs, usual: float) -> float:
    """The variance of the median over visits."""
    own = (_spread(logs) or 0.0) ** 2 * (logs.size - 1)
    pooled = (_WEIGHT * usual**2 + own) / (_WEIGHT + logs.size - 1)
    return (MEDIAN_ERROR**2 if logs.size > 2 else 1.0) * pooled / min(logs.size, _MOST_VISITS)


def _middle(logs: _Logs) -> float:
    """The median of a sorted set."""
    return float(logs[(logs.size - 1) // 2] + logs[logs.size // 2]) / 2


def _ranked_above(longer: _Logs, shorter: _Logs) -> bool:
    """Whether the ranks differ at the 1 % level (Mann and Whitney), or as clearly as so few visits can."""
    if longer[0] > shorter[-1]:
        return True
    return float(stats.mannwhitneyu(longer, shorter, alternative="greater").pvalue) <= CHANCE


@cache
def _quantile(probability: float) -> float:
    return float(stats.t.ppf(probability, FREEDOM))


def _ratio(logarithm: float) -> float:
    """The exponential; the largest float instead of an overflow."""
    return math.exp(min(logarithm, _LARGEST_LOGARITHM))


def _checked(name: str, samples: Sequence[float]) -> _Logs:
    array = np.asarray(samples, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise InputError(f"{name} has the shape {array.shape}, expected a flat list of at least one sample")
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise InputError(f"{name} holds samples that are not positive finite milliseconds")
    return array


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """(low, median, high): the interval contains the distribution's median with that confidence.

    ``(0, median, inf)`` if there are too few samples for an interval: 95 % needs six.  No distribution is assumed: each
    sample lies below the median with a probability of one half (Hollander, Wolfe and Chicken, Nonparametric Statistical
    Methods, 3rd ed., section 3.6).  Raises InputError if there is no sample, or one that is not positive and finite.
    """
    ordered = np.sort(_checked("samples", samples))
    middle = float(np.median(ordered))
    rank = int(stats.binom.ppf((1 - confidence) / 2, ordered.size, 0.5))
    if rank < 1 or stats.binom.cdf(rank - 1, ordered.size, 0.5) > (1 - confidence) / 2:
        return 0.0, middle, math.inf
    return float(ordered[rank - 1]), middle, float(ordered[ordered.size - rank])
