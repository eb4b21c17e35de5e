"""Which of two sample sets is faster, said only where the evidence and the size of the difference agree."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import stats

from attnbench.errors import InputError

__all__ = ["SIGNIFICANCE", "Comparison", "Verdict", "compare", "median_interval"]

Verdict = Literal["faster", "slower", "same", "ambiguous"]
SIGNIFICANCE = 0.01  # of the two-sided rank test; its interval covers 1 − this
_LARGEST_LOGARITHM = math.log(sys.float_info.max)
_Samples: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found.

    ``ratio`` is after over before, above 1 where after takes longer: the median of the ratios
    of every sample after to every sample before.  ``interval`` holds it with 99 % confidence,
    ``(0, inf)`` where the samples are too few or too much alike their neighbours to tell.
    ``p_value`` is the chance of ranks as far apart as these, or farther, from two equal sets.
    """

    verdict: Verdict
    ratio: float
    interval: tuple[float, float]
    p_value: float


def compare(before: Sequence[float], after: Sequence[float], *, factor: float = 0.03) -> Comparison:
    """Say whether ``after`` is faster or slower than ``before``, the same, or neither for certain.

    Both are samples of one cost in milliseconds, in the order they were taken: no
    distribution is assumed, and outliers, drift and unequal numbers are expected.  ``factor``
    is the size of change that must be found: at 0.03 a slow-down of 3 % is to be told from
    none.  The line between them lies half-way, at a ratio of sqrt(1 + ``factor``) or its
    inverse, because an estimate of a true 3 % falls below 3 % every second time.

    - ``slower``, ``faster``: the rank test finds a difference (p < 0.01) *and* the ratio lies
      beyond the line.  With enough samples a test alone finds differences that nobody feels,
      and a ratio alone finds noise.
    - ``same``: the whole interval lies within the lines, a significant difference or not.
    - ``ambiguous``: anything else.  A large ratio without evidence, evidence of a change that
      may lie on either side of the line, or too few samples to exclude one: six against six
      can give no other verdict.

    Neighbouring samples are alike (clocks and caches change more slowly than calls), and a
    rank test that takes them for independent finds differences between equal sets.  So the
    variance of its statistic is multiplied by the samples' autocorrelation time, which turns
    drift into a wide interval.  That sees only what happened while the samples were taken: a
    state that lasts longer than all of them is seen by repeating the measurement alone.

    The cost is O(n·m·log(n·m)) time and O(n·m) memory for n and m samples.

    Raises InputError where a set is empty or not a flat list of positive finite numbers, or
    ``factor`` is not one positive finite number.

    Sources: a test and a factor as in asv (``asv/_stats.py``, ``commands/compare.py``), the
    fourth verdict as in nvbench (``docs/nvbench_compare_robust.md``).  Ratio and interval are
    Hodges and Lehmann's, which belong to the Mann-Whitney test (Hollander, Wolfe and Chicken,
    Nonparametric Statistical Methods, 3rd ed., sections 4.2 and 4.3), on logarithms.  Where a
    GPU alternates between two clocks, the ratio of medians jumps from one to the other; the
    median of ratios does not.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise InputError(f"factor is {factor}, expected a positive finite number")
    old, new = _checked("before", before), _checked("after", after)
    line = math.log1p(factor) / 2
    product = old.size * new.size
    old_time, new_time = _autocorrelation_time(old), _autocorrelation_time(new)
    deviation = math.sqrt(product * (new.size * old_time + old.size * new_time + 1) / 12)
    # Few independent samples know their own spread badly, and many on the other side do not mend it.
    freedom = max(1.0, 2 * min(old.size / old_time, new.size / new_time) - 2)

    above = float(stats.mannwhitneyu(new, old, method="asymptotic").statistic)
    distance = max(0.0, abs(above - product / 2) - 0.5) / deviation
    p_value = min(1.0, 2 * float(stats.t.sf(distance, freedom)))

    shifts = np.sort(np.subtract.outer(np.log(new), np.log(old)), axis=None)
    shift = float(np.median(shifts))
    rank = math.floor(product / 2 - 0.5 - float(stats.t.isf(SIGNIFICANCE / 2, freedom)) * deviation)
    low, high = (-math.inf, math.inf) if rank < 0 else (float(shifts[rank]), float(shifts[-1 - rank]))

    verdict: Verdict = "ambiguous"
    if -line < low and high < line:
        verdict = "same"
    elif p_value < SIGNIFICANCE and abs(shift) > line:
        verdict = "slower" if shift > 0 else "faster"
    return Comparison(verdict, _ratio(shift), (_ratio(low), _ratio(high)), p_value)


def _ratio(logarithm: float) -> float:
    """Of samples whose ratio is beyond all floats the largest float; infinite where nothing bounds it."""
    return math.exp(min(logarithm, _LARGEST_LOGARITHM)) if logarithm < math.inf else math.inf


def _checked(name: str, samples: Sequence[float]) -> _Samples:
    array = np.asarray(samples, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise InputError(f"{name} has the shape {array.shape}, expected a flat list of at least one sample")
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise InputError(f"{name} holds samples that are not positive finite milliseconds")
    return array


def _autocorrelation_time(samples: _Samples) -> float:
    """How many samples in a row tell as much as one independent sample: 1 or more.

    1 + 2·Σρ(k) over the lags k of the samples' ranks, which no outlier dominates, up to the
    first pair of lags whose sum is not positive: beyond it there is but noise (Geyer, Practical
    Markov Chain Monte Carlo, Statistical Science 7, 1992, section 3.3).
    """
    ranks = stats.rankdata(samples)
    ranks -= ranks.mean()
    covariance = np.correlate(ranks, ranks, "full")[samples.size - 1 :]
    if covariance[0] == 0:
        return 1.0  # all samples are equal
    covariance = covariance[: samples.size // 2 * 2]
    pairs = covariance.reshape(-1, 2).sum(axis=1) / covariance[0]
    meaningful = np.cumprod(pairs > 0)
    return max(1.0, 2 * float(pairs @ meaningful) - 1)


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """(low, median, high): the interval holds the median of what the samples were drawn from with that confidence.

    ``(0, median, inf)`` where there are too few for any interval: five are, for 95 %.  No
    distribution is assumed: each sample lies below the median with a chance of one half
    (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, 3rd ed., section 3.6).
    Raises InputError where there is no sample, or one that is no positive finite number.
    """
    ordered = np.sort(_checked("samples", samples))
    middle = float(np.median(ordered))
    rank = int(stats.binom.ppf((1 - confidence) / 2, ordered.size, 0.5))
    if rank < 1 or stats.binom.cdf(rank - 1, ordered.size, 0.5) > (1 - confidence) / 2:
        return 0.0, middle, math.inf
    return float(ordered[rank - 1]), middle, float(ordered[ordered.size - rank])
