"""The fastest plan that is accurate enough for a spec, and why the others lost."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch

from .budget import default_budget
from .capabilities import Device
from .choice import Candidate, Choice
from .devices import describe
from .errors import BudgetError, NoPlanError, RefusedError
from .plan import Plan, backend_of
from .registry import Registry, registry
from .spec import AttentionSpec
from .table import Table
from .user_table import user_table

__all__ = ["choose", "named_plans"]

_SWEEP = "nothing like this was measured on this device; `attnbench sweep` lets auto choose by measurement"
_FP8_CLOSED = 'computes in FP8, which dtype="fp8" or a max_error opens'


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

    ``backend`` is ``auto``, a backend, a forward kernel or a whole plan; ``fp8`` opens the
    FP8 plans; ``max_error`` is the budget (relative L2), None for the default of the
    tensors' precision; ``table`` is the user's own unless given.

    Of the plans that can serve and stay within the budget, the one with the shortest
    measured call wins; where nothing was measured, the kernels' declared order decides
    among those that are not FP8.  A plan that was named goes before all that, and its
    measured error is held only against a budget that was named too.

    Raises UnknownBackendError, RefusedError (a named plan cannot serve), BudgetError (a
    named plan exceeds a named budget), NoPlanError (nothing can serve).
    """
    known = known or registry()
    facts = describe(device)
    note = None
    if table is None:
        table, note = user_table(device)
    named = None if backend == "auto" else named_plans(backend, spec, known)
    budget = default_budget(spec, fp8) if max_error is None else max_error
    # Who names an FP8 kernel has asked for it; who names a family that has others has not.
    by_kernel = named is not None and ":" in backend
    open_plans = [*(named or ()), *(plan for plan in known.plans(spec) if plan not in (named or ()))]
    judge = _Judge(spec, facts, fp8 or spec.descale is not None, budget, table, known)
    candidates = [judge(plan, insisted=by_kernel and plan in (named or ())) for plan in open_plans]
    field = candidates if named is None else candidates[: len(named)]
    if named is not None:
        missing = known.availability(backend_of(backend)).reason if not field else None
        _check_named(backend, asked_by, field, candidates, max_error, missing or "it has no kernel for this direction")
        if max_error is None:
            field = [replace(each, verdict="eligible") if each.verdict in _TIMID else each for each in field]
    eligible = [each for each in field if each.verdict == "eligible"]
    if not eligible:
        raise NoPlanError(
            f"no plan serves {spec} on {facts.name} within the error budget {budget:g}",
            {str(each.plan): each.reasons for each in field},
        )
    winner = min(eligible, key=lambda each: _rank(each, known))
    return Choice(
        spec=spec,
        device=str(device),
        plan=winner.plan,
        budget=budget,
        basis="explicit" if named is not None else winner.basis,
        candidates=tuple(_explained(each, winner, named) for each in [*field, *candidates[len(field) :]]),
        asked=backend,
        asked_by=asked_by,
        hint=note or (_SWEEP if winner.basis == "rule" and named is None else None),
    )


# What a named plan may be in spite of: the caller has taken the responsibility.
_TIMID = ("inaccurate", "unmeasured")


def named_plans(backend: str, spec: AttentionSpec, known: Registry) -> list[Plan]:
    """The plans that a backend argument admits: of a family, with a forward kernel, or the one plan.

    Raises UnknownBackendError with the nearest names.
    """
    known.check(backend)
    if ">" in backend:
        plan = Plan.parse(backend)
        return [plan] if spec.training else [Plan(plan.forward)]
    if ":" in backend:
        return known.plans_with(backend, spec)
    return [plan for plan in known.plans(spec) if backend_of(plan.forward) == backend]


class _Judge:
    """Turns a plan into a candidate: can it serve, was it asked for, is it accurate enough, how long does it take."""

    def __init__(
        self, spec: AttentionSpec, facts: Device, fp8: bool, budget: float, table: Table | None, known: Registry
    ) -> None:
        self.spec, self.facts, self.fp8, self.budget, self.known = spec, facts, fp8, budget, known
        self.asked = spec.replace(return_lse=False)  # returning the LSE changes neither time nor error
        self.nearest = None if table is None else _nearest(self.asked, table)
        self.entries = {} if table is None or self.nearest is None else table.at(self.nearest)

    def __call__(self, plan: Plan, insisted: bool) -> Candidate:
        status, reasons = self.known.reasons(plan, self.spec, self.facts)
        if status != "ok":
            return Candidate(plan, "refused" if status == "refused" else "unavailable", tuple(reasons))
        measured = self._measured(plan)
        if plan.fp8 and not self.fp8 and not insisted:
            return replace(measured, verdict="not asked for", reasons=(_FP8_CLOSED,))
        return measured

    def _measured(self, plan: Plan) -> Candidate:
        entry = self.entries.get(plan)
        if entry is None:
            return self._by_rule(plan)
        if not entry.usable:
            return Candidate(plan, "unmeasured", (f"{entry.status} when it was measured: {entry.reason}",))
        error, family = entry.worst
        basis: Literal["measured", "nearest"] = "measured" if entry.spec == self.asked else "nearest"
        found = Candidate(plan, "eligible", (), entry.time_ms, error, family, basis, entry.spec)
        if not error <= self.budget:
            reason = f"its error of {error:.2g} on {family} inputs exceeds the budget of {self.budget:g}"
            return replace(found, verdict="inaccurate", reasons=(reason,))
        if plan.fp8 and entry.spec.seqlen_kv < self.spec.seqlen_kv:
            reason = f"measured only up to {entry.spec.seqlen_kv} keys, and FP8 errors may grow with their number"
            return replace(found, verdict="unmeasured", reasons=(reason,))
        return found

    def _by_rule(self, plan: Plan) -> Candidate:
        forward = self.known.forward(plan.forward)
        declared = forward.declared_error
        if plan.backward is not None:
            declared = max(declared, self.known.backward(plan.backward).declared_error)
        if plan.fp8 or forward.preference is None:
            return Candidate(plan, "unmeasured", ("its time and error were never measured on this device",))
        if declared > self.budget:
            reason = f"declares an error of {declared:g}, beyond the budget of {self.budget:g}"
            return Candidate(plan, "inaccurate", (reason,))
        return Candidate(plan, "eligible")


def _nearest(spec: AttentionSpec, table: Table) -> AttentionSpec | None:
    """The measured spec of the same class that is nearest in size; the spec itself where it was measured."""
    specs = {each for each, _ in table.entries}
    if spec in specs:
        return spec
    alike = [each for each in specs if _class(each) == _class(spec)]
    return min(alike, key=lambda each: (_distance(each, spec), str(each)), default=None)


def _class(spec: AttentionSpec) -> tuple[object, ...]:
    """What must be equal for one spec's time and error to say something of another's."""
    kind = (spec.mask.kind, spec.group > 1, spec.dtype, spec.descale, spec.direction)
    return (spec.head_dim, spec.head_dim_v, *kind, spec.softcap, spec.scale, spec.has_empty_rows)


def _distance(one: AttentionSpec, other: AttentionSpec) -> float:
    """Sum of the doublings that lie between them in batch × heads, queries, keys and group."""
    pairs = [
        (one.batch * one.heads, other.batch * other.heads),
        (one.seqlen_q, other.seqlen_q),
        (one.seqlen_kv, other.seqlen_kv),
        (one.group, other.group),
    ]
    return sum(abs(math.log2(a / b)) for a, b in pairs)


def _check_named(
    backend: str,
    asked_by: str,
    field: list[Candidate],
    candidates: list[Candidate],
    max_error: float | None,
    nothing: str,
) -> None:
    """Raise where what was named cannot be honoured: rule 3 of the design."""
    if any(each.verdict == "eligible" for each in field):
        return
    asked = f"{backend} (asked for by {asked_by})"
    if max_error is not None and any(each.verdict in _TIMID for each in field):
        held = "; ".join(
            f"{each.plan}: {reason}" for each in field if each.verdict in _TIMID for reason in each.reasons
        )
        raise BudgetError(f"{asked} cannot be held to max_error={max_error:g}: {held}")
    if any(each.verdict in _TIMID for each in field):
        return
    several = len(field) > 1
    reasons = [f"{each.plan}: {reason}" if several else reason for each in field for reason in each.reasons]
    able = sorted({str(each.plan) for each in candidates if each.verdict in ("eligible", *_TIMID)})
    raise RefusedError(asked, list(dict.fromkeys(reasons)) or [nothing], able)


def _rank(candidate: Candidate, known: Registry) -> tuple[bool, float, str]:
    """Measured plans by time, then the rest by the kernels' declared order."""
    if candidate.time_ms is not None:
        return False, candidate.time_ms, str(candidate.plan)
    preference = known.forward(candidate.plan.forward).preference
    return True, math.inf if preference is None else preference, str(candidate.plan)


def _explained(candidate: Candidate, winner: Candidate, named: list[Plan] | None) -> Candidate:
    """The candidate with its final verdict, and for one that could have won, why it did not."""
    if candidate.plan == winner.plan:
        return replace(candidate, verdict="chosen", reasons=())
    if candidate.verdict != "eligible":
        return candidate
    if named is not None and candidate.plan not in named:
        reason = "another was asked for"
    elif candidate.time_ms is None:
        reason = "not measured here" if winner.time_ms is not None else "comes later in the order for unmeasured shapes"
    else:
        assert winner.time_ms is not None, "measured plans rank before unmeasured ones"
        reason = f"{candidate.time_ms / winner.time_ms:.2f} times the time of {winner.plan}"
    return replace(candidate, reasons=(reason,))
