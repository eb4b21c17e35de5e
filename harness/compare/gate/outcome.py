"""The gate's results as a comparison, with its verdicts and exit codes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from ...results.records import Measurement
from ...statistics import TimeVerdict
from ..regression import Outcome, Regression, RowVerdict, compare_results
from ..terms import Gated, Key, Terms
from ..times import CostChange
from .evidence import Estimate, slower, visible
from .series import GateRow, Series

__all__ = ["minutes_needed", "outcomes"]

_INTERVAL = 0.975  # either end of an interval of 95 %
_WORSE: tuple[RowVerdict, ...] = ("failed", "inaccurate", "slower", "larger", "missing")  # than to be uncertain


def outcomes(
    base: Mapping[Key, Measurement], new: Mapping[Key, Measurement], rows: Sequence[GateRow], terms: Terms
) -> Regression:
    """Compare errors, failures and missing rows of both sides, with the times that the gate measured."""
    changes = {row.question.key: _changes(row) for row in rows if row.lost is None and row.series}
    regression = compare_results(base, new, terms, changes)
    known = {row.question.key: row for row in rows}
    return replace(regression, outcomes=[_without_times(each, known.get(each.key)) for each in regression.outcomes])


def _changes(row: GateRow) -> dict[Gated, CostChange]:
    return {
        cost: _change(cost, series, estimate)
        for cost, series in row.series.items()
        if (estimate := series.estimate) is not None
    }


def _change(cost: Gated, series: Series, estimate: Estimate) -> CostChange:
    either, new = estimate.reach(_INTERVAL), median(series.times["NEW"])
    # With an anchor, BASE's time is what it would be now.
    base = new / math.exp(estimate.shift) if series.anchored else median(series.times["BASE"])
    return CostChange(
        cost,
        _verdict(series, estimate),
        math.exp(estimate.shift),
        (math.exp(estimate.shift - either), math.exp(estimate.shift + either)),
        visible(estimate),
        series.limit,
        (sum(map(len, series.recorded or series.generations)), sum(map(len, series.generations))),
        (base, new),
        host=cost == "host",
    )


def _verdict(series: Series, estimate: Estimate) -> TimeVerdict:
    if series.finding == "slower":
        return "slower"
    if series.finding == "open":
        return "uncertain"
    return "faster" if slower(estimate._replace(shift=-estimate.shift), series.limit) else "same"


def _without_times(outcome: Outcome, row: GateRow | None) -> Outcome:
    """The outcome of a row without times: failed if it was lost in NEW, else uncertain."""
    if row is None or outcome.verdict in _WORSE:
        return outcome
    if row.lost is not None:
        side, reason = row.lost
        verdict: RowVerdict = "failed" if side == "NEW" else "uncertain"
        return replace(outcome, verdict=verdict, reasons=(f"while it was visited in {side}: {reason}",), costs={})
    if row.known:
        return outcome
    missed = [cost for cost, series in row.series.items() if series.estimate is None]
    unknown = any(series.unknown for series in row.series.values())
    reason = "BASE has no rounds" if unknown else "too few rounds were made"
    reasons = (*(outcome.reasons if outcome.costs else ()), f"{reason} of {', '.join(missed)}")
    return replace(outcome, verdict="uncertain", reasons=reasons)


def minutes_needed(rows: Sequence[GateRow]) -> float | None:
    """About how many more minutes would settle the open rows; None if no time would, or none is open.

    Errors shrink with the square root of the time.
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
