"""How many seeds a verdict on learning takes, before anything is trained."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt
from scipy import stats

from attnbench.errors import InputError

from .learning import CONFIDENCE, LEAST_SEEDS, LEAST_STEPS, TOLERANCE, Learning

__all__ = ["MOST_SEEDS", "Chances", "chances", "decided", "seeds_lacking", "seeds_needed"]

MOST_SEEDS = 100  # of one command
_DRAWS = 5_000  # the standard error of a chance is then at most 0.7 %

Chances = dict[str, float]
"""The chance of each verdict on a gap: equivalent, degraded, inconclusive."""


def chances(seeds: int, deviation: float, gap: float = 0.0) -> Chances:
    """The chances of the verdicts if the pairs' gaps are normal with this mean and standard deviation.

    Both are relative losses.  The rules are those of ``judge_pairs`` from the steps on that they need, for runs that
    do not diverge; the baseline's band is taken to be wide enough.  By simulation, the same at every call.  Raises
    InputError for fewer seeds than a verdict takes, or a negative deviation.
    """
    if seeds < LEAST_SEEDS or not deviation >= 0:
        raise InputError(f"a verdict takes {LEAST_SEEDS} seeds and a deviation of 0 or more, not {seeds}, {deviation}")
    draws = gap + deviation * np.random.default_rng(0).standard_normal((_DRAWS, seeds))
    equivalent, degraded = decided(draws)
    found = {"equivalent": float(equivalent.mean()), "degraded": float(degraded.mean())}
    return found | {"inconclusive": 1 - found["equivalent"] - found["degraded"]}


def decided(gaps: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Whether gaps (..., seeds) make *equivalent* and *degraded*, by the rules of ``judge_pairs`` on a gap."""
    seeds, middle = gaps.shape[-1], gaps.mean(-1)
    half = stats.t.ppf(CONFIDENCE, seeds - 1) * gaps.std(-1, ddof=1) / np.sqrt(seeds)
    degraded = (middle > TOLERANCE) & (middle - half > 0)
    return (np.abs(middle) <= TOLERANCE) & (np.abs(middle) + half <= 2 * TOLERANCE), degraded


@cache
def seeds_needed(deviation: float, gap: float = 0.0, chance: float = 0.9) -> int | None:
    """The fewest seeds that give the right verdict with this chance; None if more than ``MOST_SEEDS``.

    Right is *equivalent* for a ``gap`` within the tolerance and *degraded* for one above it.
    """
    right = "degraded" if gap > TOLERANCE else "equivalent"
    low, high = LEAST_SEEDS, MOST_SEEDS
    if chances(high, deviation, gap)[right] < chance:
        return None
    while low < high:
        middle = (low + high) // 2
        if chances(middle, deviation, gap)[right] >= chance:
            high = middle
        else:
            low = middle + 1
    return high


def seeds_lacking(learning: Learning) -> int | None:
    """The seeds that would show with 90 % that nothing is lost, if nothing is and pairs scatter as these do.

    None if the verdict is none of too few seeds, or more than ``MOST_SEEDS`` are needed.
    """
    if learning.verdict != "inconclusive" or learning.steps < LEAST_STEPS or learning.pairs < LEAST_SEEDS:
        return None
    if learning.gap is None or learning.high is None:
        return None
    half = learning.high - learning.gap
    deviation = half * math.sqrt(learning.pairs) / float(stats.t.ppf(CONFIDENCE, learning.pairs - 1))
    needed = seeds_needed(deviation)
    return needed if needed is not None and needed > learning.pairs else None
