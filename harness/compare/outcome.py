"""What the gate says of its rows, in the words and with the exit codes of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from ..records import Measurement
from ..regression import Outcome, Regression, compare_results
from ..regression_terms import Gated, Key, Terms
from ..regression_times import CostChange
from ..statistics import Verdict
from .evidence import Estimate, slower, visible
from .series import GateRow, Series

__all__ = ["minutes_needed", "outcomes"]

_INTERVAL = 0.975  # either end of an interval of 95 %


def outcomes(
    base: Mapping[Key, Measurement], new: Mapping[Key, Measurement], rows: Sequence[GateRow], terms: Terms
) -> Regression:
    """Errors, failures and what is missing from the rows of both sides, times from what the gate measured."""
    changes = {row.question.key: _changes(row) for row in rows if row.lost is None and row.series}
    regression = compare_results(base, new, terms, changes)
    lost = {row.question.key: row.lost for row in rows if row.lost is not None}
    return replace(regression, outcomes=[_with_loss(each, lost) for each in regression.outcomes])


def _changes(row: GateRow) -> dict[Gated, CostChange]:
    return {cost: _change(cost, series) for cost, series in row.series.items()}


def _change(cost: Gated, series: Series) -> CostChange:
    estimate = series.estimate or Estimate(0.0, math.inf, 1)
    either = estimate.reach(_INTERVAL)
    bounded = math.isfinite(either)
    return CostChange(
        cost,
        _verdict(series, estimate),
        math.exp(estimate.shift),
        (math.exp(estimate.shift - either), math.exp(estimate.shift + either)) if bounded else (0.0, math.inf),
        visible(estimate) if bounded else math.inf,
        series.limit,
        (len(series.times["BASE"]), len(series.times["NEW"])),
        (_median(series.times["BASE"]), _median(series.times["NEW"])),
        host=cost == "host",
        relative=series.anchored,
    )


def _verdict(series: Series, estimate: Estimate) -> Verdict:
    if series.finding == "slower":
        return "slower"
    if series.finding == "open":
        return "uncertain"
    return "faster" if slower(estimate._replace(shift=-estimate.shift), series.limit) else "same"


def _median(times: Sequence[float]) -> float:
    return median(times) if times else math.inf


def _with_loss(outcome: Outcome, lost: Mapping[Key, tuple[str, str] | None]) -> Outcome:
    """A row that ran at the first look and was lost since has failed in NEW, and in BASE cannot be compared."""
    found = lost.get(outcome.key)
    if found is None or outcome.verdict in ("failed", "missing"):
        return outcome
    side, reason = found
    verdict = "failed" if side == "NEW" else "uncertain"
    return replace(outcome, verdict=verdict, reasons=(f"while it was visited in {side}: {reason}",), costs={})


def minutes_needed(rows: Sequence[GateRow]) -> float | None:
    """About how many more minutes would settle what is open; None where no time would, or nothing is open.

    Errors shrink with the root of the time: what could have been seen over what is to be seen, squared.
    """
    needed = 0.0
    for row in rows:
        factors = [_factor(series) for series in row.series.values() if series.finding == "open"]
        if row.lost is None and factors:
            needed += row.seconds * (max(factors) - 1)
    return needed / 60 if math.isfinite(needed) and needed else None


def _factor(series: Series) -> float:
    estimate = series.estimate
    if estimate is None or series.floor_is_too_high:
        return math.inf
    return max(2.0, (math.log1p(visible(estimate)) / math.log1p(series.limit)) ** 2)
