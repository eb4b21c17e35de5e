"""Each plan over all cases of one direction: wins, speed, errors, share of the peak, and costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnbench.kernels.plan import Plan

from ...measure.timing import COSTS
from ...results.records import Measurement
from .machines import WIDE, Case, worst_error

__all__ = ["Costs", "PlanSummary", "Point", "costs_of", "plan_summaries", "points_of"]


@dataclass(frozen=True)
class Point:
    """One plan on one case: its worst error, and its speed relative to the fastest plan without FP8."""

    case: Case
    plan: Plan
    error: float
    speed: float


@dataclass(frozen=True)
class Costs:
    """The shares of a call's time: the forward kernel, preparing, the backward kernel, the rest."""

    kernel: float
    prepare: float
    backward: float
    rest: float


@dataclass(frozen=True)
class PlanSummary:
    """A plan over the cases that it was measured on.

    ``wins`` counts the cases where it is chosen with FP8 plans within the default budget, ``wide_wins`` those where it
    is chosen without FP8 plans, ``inaccurate`` those where it is not accurate enough.  ``speed`` is the median of
    ``Point.speed``, ``errors`` the least and the largest of the worst errors, ``peak`` the median and the largest share
    of the device's peak.  None if unknown.
    """

    plan: Plan
    cases: int
    wins: int
    wide_wins: int
    inaccurate: int
    speed: float | None
    errors: tuple[float, float]
    peak: tuple[float, float] | None
    costs: Costs | None


def points_of(cases: Sequence[Case]) -> list[Point]:
    """A point for every measured row with a finite error, for the cases with a plan without FP8."""
    return [
        Point(case, row.plan, error, speed)
        for case in cases
        for row in case.measured
        if 0 < (error := worst_error(row)[0]) < float("inf") and (speed := case.speed(row.plan)) is not None
    ]


def plan_summaries(cases: Sequence[Case]) -> list[PlanSummary]:
    """One for each plan: the most wins first, then the fastest."""
    rows: dict[Plan, list[tuple[Case, Measurement]]] = {}
    for case in cases:
        for row in case.measured:
            rows.setdefault(row.plan, []).append((case, row))
    found = [_summary(plan, each) for plan, each in rows.items()]
    return sorted(found, key=lambda each: (-each.wins, -each.wide_wins, -(each.speed or 0.0), str(each.plan)))


def _summary(plan: Plan, rows: Sequence[tuple[Case, Measurement]]) -> PlanSummary:
    errors = [worst_error(row)[0] for _, row in rows]
    speeds = [speed for case, _ in rows if (speed := case.speed(plan)) is not None]
    peaks = [share for _, row in rows if (share := row.performance.peak_share) is not None]
    costs = [costs for _, row in rows if (costs := costs_of(row)) is not None]
    return PlanSummary(
        plan=plan,
        cases=len(rows),
        wins=sum(case.answer.plan == plan for case, _ in rows),
        wide_wins=sum(case.answers[WIDE].plan == plan for case, _ in rows),
        inaccurate=sum(not _accurate(case, row) for case, row in rows),
        speed=float(np.median(speeds)) if speeds else None,
        errors=(min(errors), max(errors)),
        peak=(float(np.median(peaks)), max(peaks)) if peaks else None,
        costs=_shares(costs) if costs else None,
    )


def _accurate(case: Case, row: Measurement) -> bool:
    candidate = case.answer.candidates.get(row.plan)
    return row.status == "ok" and candidate is not None and candidate.verdict == "eligible"


def costs_of(row: Measurement) -> Costs | None:
    """Shares from differences of the medians, none below zero; None if a cost was not measured."""
    taken = {cost: row.median_ms(cost) for cost in row.time_ms}
    if any(cost not in taken for cost in COSTS if cost != "backward" or row.spec.training):
        return None
    prepare = max(0.0, taken["prepared"] - taken["kernel"])
    backward = taken.get("backward", 0.0)
    rest = max(0.0, taken["call"] - taken["kernel"] - prepare - backward)
    whole = taken["kernel"] + prepare + backward + rest
    return Costs(taken["kernel"] / whole, prepare / whole, backward / whole, rest / whole)


def _shares(costs: Sequence[Costs]) -> Costs:
    """The mean of each part, so that they add up to one."""
    parts = np.array([(each.kernel, each.prepare, each.backward, each.rest) for each in costs]).mean(axis=0)
    return Costs(*map(float, parts))
