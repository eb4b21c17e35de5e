"""The fastest plan that is accurate enough for a spec, and why the others lost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import get_args

import torch

from ..errors import RefusedError
from ..kernels.devices import describe
from ..kernels.plan import Plan, backend_of
from ..kernels.registry import Registry, registry
from ..problem.spec import AttentionSpec
from ..tables.table import Table
from ..tables.user_table import Known, known_tables
from ..text.digits import three_digits
from .budget import budget_of, default_budget
from .candidate import Candidate, CandidateVerdict
from .choice import Choice
from .demotion import demoted
from .evidence import Evidence
from .freeze_hook import freezing
from .judge import Judge
from .ranking import Ranking
from .shortfall import no_plan, over_budget
from .table_advice import advice

__all__ = ["choose", "named_plans"]


def choose(
    spec: AttentionSpec,
    device: torch.device,
    *,
    backend: str = "auto",
    asked_by: str = "argument",
    fp8: bool = False,
    max_error: float | None = None,
    table: Table | None = None,
    known: Registry | None = None,
) -> Choice:
    """Choose a plan for the spec on this device.

    ``backend`` is ``auto``, a backend, a forward kernel or a plan; ``fp8`` allows FP8 plans; ``max_error`` is the
    budget (relative L2), None for the default of the precision; ``table`` replaces the user's and the shipped tables.
    If choices are frozen, and neither ``table`` nor ``known`` is given, the file answers.

    Of the plans that can serve and stay within the budget (``evidence``), the one with the shortest call wins,
    preparing and launching included (``ranking``).  If nothing was measured in the class, the declared order decides
    among 16-bit plans.  A named plan takes precedence, and its error counts only against a named budget.

    Raises UnknownBackendError, RefusedError (a named plan cannot serve), BudgetError (a named plan exceeds a named
    budget), NoPlanError (nothing can serve, or within the budget).
    """
    frozen = freezing.active
    if frozen is not None and table is None and known is None:
        return frozen.choice(spec, device, backend, asked_by, fp8, max_error)
    known = known or registry()
    facts = describe(device)
    tables = known_tables(device) if table is None else Known.of(table)
    named = None if backend == "auto" else named_plans(backend, spec, known)
    budget = default_budget(spec, fp8) if max_error is None else max_error
    # Naming an FP8 kernel opts into FP8; naming a backend that also has 16-bit kernels does not.
    by_kernel = named is not None and ":" in backend
    open_plans = [*(named or ()), *(plan for plan in known.plans(spec) if plan not in (named or ()))]
    evidence = Evidence(spec, tables)
    declared = partial(known.declared_error, spec=spec, device=facts)
    judge = Judge(evidence, budget, fp8 or spec.descale is not None, known, declared, tables.dropped)

    def candidate(plan: Plan) -> Candidate:
        status, reasons = known.reasons(plan, spec, facts)
        if status != "ok":
            return Candidate(plan, "refused" if status == "refused" else "unavailable", tuple(reasons))
        found = judge(plan, insisted=by_kernel and plan in (named or ()))
        reason = demoted(plan, spec)
        if reason is None:
            return found
        if found.verdict == "not asked for":
            return replace(found, needs=None)
        return replace(found, verdict="inaccurate", reasons=(reason,), needs=None)

    candidates = [candidate(plan) for plan in open_plans]
    field = candidates if named is None else candidates[: len(named)]
    if named is not None:
        missing = known.availability(backend_of(backend)).reason if not field else None
        _check_named(backend, asked_by, field, candidates, max_error, missing or "it has no kernel for this direction")
        if max_error is None:
            field = [replace(each, verdict="eligible") if each.verdict in _TIMID else each for each in field]
    eligible = [each for each in field if each.verdict == "eligible"]
    if not eligible:
        nearest_first = sorted(field, key=lambda each: get_args(CandidateVerdict).index(each.verdict))
        raise no_plan(spec, facts, nearest_first, fp8, max_error)
    ranking = Ranking(spec, judge.preference, evidence.model)
    winner = ranking.winner(eligible)
    return Choice(
        spec=spec,
        device=str(device),
        plan=winner.plan,
        budget=budget_of(spec, backend, fp8, max_error),
        basis="explicit" if named is not None else winner.basis,
        candidates=tuple(_explained(each, winner, named) for each in [*field, *candidates[len(field) :]]),
        asked=backend,
        asked_by=asked_by,
        hint="; ".join(filter(None, (tables.note, advice(winner) if named is None else None))) or None,
        margin=ranking.margin(winner, eligible),
        trades=ranking.trades(winner, budget, candidates) if named is None else (),
    )


_WON_A_TIE = ", within the noise, where the more accurate plan wins, then the first in the declared order"
# Verdicts that do not stop a named plan: the caller insists on it.
_TIMID = ("inaccurate", "unmeasured")


def named_plans(backend: str, spec: AttentionSpec, known: Registry) -> list[Plan]:
    """The plans that a backend argument allows.  Raises UnknownBackendError with the nearest names."""
    known.check(backend)
    if ">" in backend:
        plan = Plan.parse(backend)
        return [plan] if spec.training else [Plan(plan.forward)]
    if ":" in backend:
        return known.plans_with(backend, spec)
    return [plan for plan in known.plans(spec) if backend_of(plan.forward) == backend]


def _check_named(
    backend: str,
    asked_by: str,
    field: list[Candidate],
    candidates: list[Candidate],
    max_error: float | None,
    nothing: str,
) -> None:
    """Raise if the named backend, kernel or plan cannot run: an explicit choice never falls back."""
    if any(each.verdict == "eligible" for each in field):
        return
    asked = f"{backend} (asked for by {asked_by})"
    if max_error is not None and any(each.verdict in _TIMID for each in field):
        within = [each for each in candidates if each.verdict == "eligible"]
        raise over_budget(asked, [each for each in field if each.verdict in _TIMID], within, max_error)
    if any(each.verdict in _TIMID for each in field):
        return
    several = len(field) > 1
    reasons = [f"{each.plan}: {reason}" if several else reason for each in field for reason in each.reasons]
    able = sorted({str(each.plan) for each in candidates if each.verdict in ("eligible", *_TIMID)})
    raise RefusedError(asked, list(dict.fromkeys(reasons)) or [nothing], able)


def _explained(candidate: Candidate, winner: Candidate, named: list[Plan] | None) -> Candidate:
    """The candidate with its final verdict and, if it was eligible, the reason why it did not win."""
    if candidate.plan == winner.plan:
        return replace(winner, verdict="chosen", reasons=())
    if candidate.verdict != "eligible":
        return candidate
    if named is not None and candidate.plan not in named:
        reason = "another was asked for"
    elif candidate.time_ms is None:
        reason = "not measured here" if winner.time_ms is not None else "comes later in the order for unmeasured shapes"
    elif not winner.time_ms:
        reason = "another was measured to take no time"
    else:
        ratio = candidate.time_ms / winner.time_ms
        reason = f"{three_digits(ratio)} times the time of {winner.plan}"
        if ratio < 1:  # of plans without measurements here the fastest runs
            reason += _WON_A_TIE
    return replace(candidate, reasons=(reason,))
