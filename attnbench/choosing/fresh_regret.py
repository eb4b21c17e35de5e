"""How good the choices of tables are on shapes that were measured for this alone: fresh regret."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..kernels.capabilities import Device
from ..kernels.plan import Plan, backend_of
from ..kernels.registry import Registry
from ..problem.spec import AttentionSpec
from ..tables.environment import Environment
from ..tables.table import Table
from ..tables.user_table import Known
from .candidate import Basis, Candidate
from .evidence import Evidence
from .regret import Asked, chosen_at, geometric_mean, scatter, served

__all__ = ["BOUNDS", "STEADY", "FreshScore", "FreshSummary", "contenders", "fresh_scores", "summary_of", "without"]

_QUESTIONS = (Asked(False), Asked(True))
# A plan may win if it is predicted to be slower by at most so many standard errors of the ratio, or this factor.  Of
# 1,860 plans measured in full on an H200 these kept 715, each case's fastest among them; a factor of 1.3 lost one.
_SURE, _FASTER = 3.0, 1.5
# The same of a plan whose kernels must be compiled before its first look, which takes most of a sweep.  Of 1,581 such
# plans measured on an H100 and an H200 these keep 1,044 and lose the fastest of none of 762 choices; 1.5 and 1.15 lost
# one.
_SURE_COMPILING, _FASTER_COMPILING = 2.0, 1.2

# On regret: the geometric mean without and with FP8, the 90th percentile, the worst; the share that a rule may decide.
BOUNDS = (0.02, 0.03, 0.08, 0.20, 0.02)
STEADY = BOUNDS[3]  # half the interquartile range over the median; more scatter hides the worst regret that may be


@dataclass(frozen=True)
class FreshScore:
    """The choice of the tables at a spec whose own entries they were not asked for.

    ``regret`` is the measured time of ``plan`` over that of ``best``, the fastest plan that is accurate
    enough, minus one.  ``error`` is the measured one of ``plan``, held against ``budget``; None of a plan that lost a
    race, of which only the time is known.  ``steady``: both times scattered by ``STEADY`` at most; otherwise a regret,
    and which plan was the best, is mostly noise.
    """

    spec: AttentionSpec
    asked: Asked
    plan: Plan
    basis: Basis
    best: Plan
    regret: float
    error: float | None
    budget: float
    steady: bool

    @property
    def violated(self) -> bool:
        """Whether the chosen plan is beyond the budget."""
        return self.error is not None and not self.error <= self.budget


def _choice(
    spec: AttentionSpec, plans: Iterable[Plan], tables: Known, known: Registry, device: Device, asked: Asked
) -> Candidate | None:
    """What the tables choose among the plans at a spec; None if nothing."""
    declared = partial(known.declared_error, spec=spec, device=device)
    chosen = chosen_at(spec, plans, Evidence(spec, tables), asked, known, declared)
    return None if chosen is None else chosen[0]


def contenders(
    spec: AttentionSpec, plans: Iterable[Plan], tables: Known, known: Registry, device: Device
) -> dict[Plan, bool]:
    """The plans that may be the fastest at a spec by the tables, and those chosen.

    A plan is left out if what the tables choose, without FP8 for a 16-bit plan, is predicted to be surely faster
    (``_SURE``, ``_FASTER``; less surely if the plan must be compiled first).  True for each plan that the tables
    choose, with or without FP8.
    """
    plans, model = list(plans), Evidence(spec, tables).model
    chosen = {asked.fp8: _choice(spec, plans, tables, known, device, asked) for asked in _QUESTIONS}
    required = {each.plan for each in chosen.values() if each is not None}

    def may_win(plan: Plan) -> bool:
        rival = chosen[plan.fp8]
        own = model.predict(plan, spec)
        if own is None or rival is None or not rival.time_ms:
            return True
        compiles = any(known.backend(backend_of(kernel)).compiles for kernel in plan.kernels)
        sure, faster = (_SURE_COMPILING, _FASTER_COMPILING) if compiles else (_SURE, _FASTER)
        gap = max(math.log(faster), sure * model.gap_error(plan, rival.plan, spec))
        return math.log(own.time_ms / rival.time_ms) <= gap

    return {plan: plan in required for plan in plans if plan in required or may_win(plan)}


def fresh_scores(
    truth: Table, tables: Known, known: Registry, questions: Sequence[Asked] = _QUESTIONS
) -> Iterator[FreshScore]:
    """Choose by ``tables`` at every spec of ``truth``, and compare with what was measured there.

    A spec at which no plan served within the budget has no score.
    """
    device, truth = _device(truth.environment), truth.on_host(tables.launch_ms)
    for spec in sorted({spec for spec, _ in truth.entries}, key=str):
        here = served(truth, spec, known)
        forgetting = without(tables, spec)
        raced = {plan: entry for plan, entry in truth.at(spec).items() if entry.status == "slower"} | here
        for asked in questions:
            budget = asked.budget(spec)
            times = {
                plan: entry.time_ms
                for plan, entry in here.items()
                if entry.time_ms and (asked.fp8 or not plan.fp8) and entry.worst[0] <= budget
            }
            winner = _choice(spec, raced, forgetting, known, device, asked)
            if winner is None or not times:
                continue
            best = min(times, key=lambda plan: (times[plan], str(plan)))
            entry = raced[winner.plan]
            regret = (entry.time_ms or 0.0) / times[best] - 1
            error = entry.worst[0] if entry.errors else None
            steady = max(scatter(entry), scatter(here[best])) <= STEADY
            yield FreshScore(spec, asked, winner.plan, winner.basis, best, regret, error, budget, steady)


@dataclass(frozen=True)
class FreshSummary:
    """The scores of one question: regret (geometric mean, 90th percentile, worst) of the ``choices`` whose times are
    steady; the others (``unsteady``), rules and violations are counted.
    """

    asked: Asked
    choices: int
    unsteady: int
    geometric_mean: float
    percentile_90: float
    worst: float
    rules: int
    violations: int

    @property
    def passes(self) -> bool:
        """Whether all stay within the bounds: 2 % (3 % with FP8), 8 %, 20 %, rules in 2 %, no violation."""
        return (
            self.geometric_mean <= BOUNDS[self.asked.fp8]
            and self.percentile_90 <= BOUNDS[2]
            and self.worst <= BOUNDS[3]
            and self.rules <= BOUNDS[4] * (self.choices + self.unsteady)
            and not self.violations
        )


def summary_of(scores: Iterable[FreshScore]) -> list[FreshSummary]:
    """One summary for each question that has a steady score."""
    grouped: dict[Asked, list[FreshScore]] = {}
    for score in scores:
        grouped.setdefault(score.asked, []).append(score)
    return [_summary(asked, each) for asked, each in grouped.items() if any(score.steady for score in each)]


def _summary(asked: Asked, scores: list[FreshScore]) -> FreshSummary:
    regrets = sorted(score.regret for score in scores if score.steady)
    return FreshSummary(
        asked=asked,
        choices=len(regrets),
        unsteady=len(scores) - len(regrets),
        geometric_mean=geometric_mean(1 + regret for regret in regrets) - 1,
        percentile_90=regrets[math.ceil(0.9 * len(regrets)) - 1],
        worst=regrets[-1],
        rules=sum(score.basis == "rule" for score in scores),
        violations=sum(score.violated for score in scores),
    )


def without(tables: Known, spec: AttentionSpec) -> Known:
    """The tables without what they know of this very spec."""
    kept = (
        replace(each, entries={key: entry for key, entry in each.entries.items() if key[0] != spec})
        if each.at(spec)
        else each
        for each in tables.tables
    )
    return Known(tuple(kept), tables.note, tables.dropped)


def _device(environment: Environment) -> Device:
    major, _, minor = (environment.capability or "0.0").partition(".")
    return Device(environment.device_type, environment.device_name, (int(major), int(minor)))
