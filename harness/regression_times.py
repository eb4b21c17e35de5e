"""Whether a plan takes longer than before, said of many rows at once without one of them by chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import stats

from .records import Measurement
from .statistics import Verdict, compare
from .timing import Cost

__all__ = ["APART", "CostChange", "changes_of", "ratios", "verdict_of"]

_CHANCE = 1e-3
_FEWEST = 10  # rows that p-values are corrected for where there are fewer
_SMALLEST = 1e-300  # a p-value that underflows has a logarithm all the same
# Two costs whose samples lie apart as far as this need no test, which with three samples a side nothing would pass.
APART = 1.3
_Side = Literal["slower", "faster"]


@dataclass(frozen=True)
class CostChange:
    """One cost of one plan before and after.

    ``ratio`` and ``interval`` are those of attnbench.harness.statistics.compare, above 1 where
    it takes longer now, ``verdict`` what it says of this cost alone.  ``samples`` and
    ``median`` are of BASE and NEW: milliseconds, or ratios to the baseline plan.  ``gap`` is how
    far apart the two lie as a whole: the shortest of the slower side over the longest of the
    faster one.  ``replayed`` says that one side alone was timed as a CUDA graph, so that nothing
    can be concluded, ``relative`` that the times are ratios.
    """

    cost: Cost
    verdict: Verdict
    ratio: float
    interval: tuple[float, float]
    p_value: float
    samples: tuple[int, int]
    median: tuple[float, float]
    gap: float
    replayed: bool = False
    relative: bool = False


def changes_of(
    before: Measurement,
    after: Measurement,
    costs: Sequence[Cost],
    factor: float,
    baseline: tuple[Measurement, Measurement] | None = None,
) -> dict[Cost, CostChange]:
    """Each cost that both rows have, in the order of ``costs``; relative to the baseline's rows where given."""
    found: dict[Cost, CostChange] = {}
    for cost in costs:
        if cost not in before.time_ms or cost not in after.time_ms:
            continue
        old: Sequence[float] = before.time_ms[cost]
        new: Sequence[float] = after.time_ms[cost]
        graph = (cost in before.replayed) != (cost in after.replayed)
        if baseline is not None:
            if any(cost not in row.time_ms for row in baseline):
                continue
            old, new = ratios(old, baseline[0].time_ms[cost]), ratios(new, baseline[1].time_ms[cost])
            graph |= (cost in baseline[0].replayed) != (cost in baseline[1].replayed)
        found[cost] = replace(_change(cost, old, new, factor), relative=baseline is not None)
        if graph:
            found[cost] = replace(found[cost], verdict="ambiguous", replayed=True)
    return found


def _change(cost: Cost, old: Sequence[float], new: Sequence[float], factor: float) -> CostChange:
    result = compare(old, new, factor=factor)
    return CostChange(
        cost,
        result.verdict,
        result.ratio,
        result.interval,
        result.p_value,
        (len(old), len(new)),
        (float(np.median(old)), float(np.median(new))),
        max(min(new) / max(old), min(old) / max(new)),
    )


def ratios(samples: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Each sample over the baseline's at the same share of the way, as many as the shorter of the two has.

    A sweep visits its plans in turns, so that samples at the same share of the way were taken
    at about the same time, and what changed meanwhile is in both.  Where one side has more
    samples, neighbours are represented by their median.
    """
    count = min(len(samples), len(baseline))
    top, bottom = (
        np.array([np.median(part) for part in np.array_split(np.asarray(each, dtype=np.float64), count)])
        for each in (samples, baseline)
    )
    return [float(ratio) for ratio in top / bottom]


def verdict_of(changes: Mapping[Cost, CostChange], factor: float, rows: int) -> Verdict:
    """What the costs of one row say together, ``rows`` being how many are compared in all.

    ``same`` where every cost is.  ``slower`` or ``faster`` where that is certain enough among
    so many rows, on either of two grounds:

    - the p-values of the costs that say so, each of which has samples of its own, combined by
      Fisher's method (Statistical Methods for Research Workers, section 21.1) and multiplied by
      the square of ``rows``, or of ten where they are fewer, stay below 0.1 %;
    - two costs at least lie apart as a whole by more than ``APART``, and by more than half of ``factor``.

    Else ``ambiguous``.  Where one cost became slower and another faster, slower it is.

    Multiplied by ``rows`` once (Bonferroni's correction), p-values would keep the chance that any
    row is called slower below 0.1 % if they were exact.  But neighbouring samples are alike for
    longer than their autocorrelation tells, and the smaller a p-value, the more it is too small:
    of a thousand whole sets of 974 committed rows, resampled in blocks of ten, 21 failed where
    it was multiplied once, none where twice.  Of sets of the five rows whose samples are the most
    alike their neighbours 0.9 % failed where it was multiplied by 25, and 0.4 % by a hundred,
    which costs a row like most others 0.5 % of its chance to be found 3 % slower.
    """
    for side in ("slower", "faster"):
        if _certain(changes, side, factor, rows):
            return side
    if changes and all(each.verdict == "same" for each in changes.values()):
        return "same"
    return "ambiguous"


def _certain(changes: Mapping[Cost, CostChange], side: _Side, factor: float, rows: int) -> bool:
    own = [each for each in changes.values() if not each.replayed and (each.ratio > 1) == (side == "slower")]
    apart = [each for each in own if each.gap > max(APART, math.sqrt(1 + factor))]
    if len(apart) > 1:
        return True
    telling = [max(each.p_value, _SMALLEST) for each in own if each.verdict == side]
    if not telling:
        return False
    together = float(stats.chi2.sf(-2 * sum(map(math.log, telling)), 2 * len(telling)))
    return together * max(rows, _FEWEST) ** 2 < _CHANCE
