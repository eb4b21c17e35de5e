"""The statistics of the gate: how much longer one row takes than before, and how certain that is.

The unit of replication is a round of visits, because samples of one visit share the clock, the cache and the core.  A
round gives one number, the logarithm of NEW's time over BASE's.  Rounds of one pair of processes share their memory's
layout, so processes are a second level of replication: each pair is a generation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

__all__ = ["FEWEST", "SEEN", "Estimate", "combined", "of_generation", "slower", "suspected", "unchanged", "visible"]

FEWEST = 4  # rounds of a generation: with fewer, trimming leaves no spread
SEEN = 0.95  # the probability of finding a slow-down of the size that is called visible
# Confidence levels, chosen on recorded rounds of an H100 and checked on those of an H200 (tests/harness/compare): to
# measure a row again in other processes, to call it slower after that, and to exclude a slow-down of the limit.
_SUSPECTED, _CERTAIN, _EXCLUDED = 0.95, 0.999, 0.99
_TRIMMED = 0.2  # of the rounds at either end, so that a delayed host or another clock has little effect


class Estimate(NamedTuple):
    """``shift``: the logarithm of the ratio; ``deviation``: its standard error, with ``freedom`` degrees of freedom."""

    shift: float
    deviation: float
    freedom: float

    def reach(self, chance: float) -> float:
        """The distance from the estimate that the truth exceeds, to one side, with a probability of 1 − ``chance``."""
        return float(stats.t.ppf(chance, self.freedom)) * self.deviation


def of_generation(rounds: Sequence[float]) -> Estimate | None:
    """The trimmed mean of a generation's rounds; None if there are too few.

    A fifth is trimmed at either end; the error comes from the winsorised spread (Yuen, The two-sample trimmed t for
    unequal population variances, Biometrika 61, 1974).
    """
    count = len(rounds)
    if count < FEWEST:
        return None
    ordered = np.sort(np.asarray(rounds, dtype=np.float64))
    cut = max(1, int(_TRIMMED * count))
    kept = ordered[cut : count - cut]
    winsorised = np.clip(ordered, kept[0], kept[-1])
    share = kept.size / count
    deviation = float(winsorised.std(ddof=1)) / (share * math.sqrt(count))
    return Estimate(float(kept.mean()), deviation, max(1, kept.size - 1))


def combined(generations: Sequence[Sequence[float]], floor: float) -> Estimate | None:
    """One estimate from all generations' rounds; None if none of them has enough.

    Generations are weighted as studies with different true effects (DerSimonian and Laird, Meta-analysis in clinical
    trials, Controlled Clinical Trials 7, 1986).  Their between-variance is at least that of ``floor``, the deviation
    between processes of the same code.
    """
    found = [each for rounds in generations if (each := of_generation(rounds)) is not None]
    if not found:
        return None
    shifts = np.array([each.shift for each in found])
    own = np.array([each.deviation**2 for each in found])
    between = max(floor**2, _between(shifts, own))
    weights = 1 / (own + between)
    shift = float((weights * shifts).sum() / weights.sum())
    return Estimate(shift, float(1 / math.sqrt(weights.sum())), sum(each.freedom for each in found))


def _between(shifts: npt.NDArray[np.float64], own: npt.NDArray[np.float64]) -> float:
    """The variance between generations beyond that of their own errors; it may be negative, and is 0 for one."""
    if shifts.size < 2:
        return 0.0
    weights = 1 / np.maximum(own, 1e-12)
    mean = (weights * shifts).sum() / weights.sum()
    excess = float((weights * (shifts - mean) ** 2).sum()) - (shifts.size - 1)
    return excess / float(weights.sum() - (weights**2).sum() / weights.sum())


def suspected(estimate: Estimate, limit: float) -> bool:
    """Whether a row may be slower by half of the limit (0.03: 3 %), so that other processes must confirm it."""
    return estimate.shift - estimate.reach(_SUSPECTED) > math.log1p(limit) / 2


def slower(estimate: Estimate, limit: float) -> bool:
    """Whether a row is certainly slower by half of the limit: a true 3 % is measured as less every other time."""
    return estimate.shift - estimate.reach(_CERTAIN) > math.log1p(limit) / 2


def unchanged(estimate: Estimate, limit: float, *, confirmed: bool) -> bool:
    """Whether a slow-down of the limit would have been found and can be excluded.

    ``confirmed``: the estimate comes from more than one pair of processes.  The memory layout of a single pair may hide
    a slow-down, so it must show at most a quarter of the limit: of rows on a shared CPU that took 5 % longer, half of
    the limit let 8 % pass, a quarter 2 %.
    """
    edge = math.log1p(limit)
    seen = visible(estimate) <= limit and estimate.shift + estimate.reach(_EXCLUDED) < edge
    return seen and estimate.shift <= edge / (2 if confirmed else 4)


def visible(estimate: Estimate) -> float:
    """The smallest slow-down that would have been found with a probability of ``SEEN``: 0.021 is 2.1 %."""
    return math.expm1(estimate.reach(_EXCLUDED) + estimate.reach(SEEN))
