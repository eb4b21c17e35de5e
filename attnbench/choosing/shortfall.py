"""The exceptions for a choice that finds no plan: what was asked, the best plan's error, what to do next."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import BudgetError, NoPlanError
from ..kernels.capabilities import Device
from ..kernels.contract import gradient_dtype, rounding_error
from ..problem.dtypes import FROM_TORCH
from ..problem.spec import AttentionSpec
from .budget import default_budget
from .candidate import Candidate
from .ranking import rounded_up

__all__ = ["no_plan", "over_budget"]


def no_plan(
    spec: AttentionSpec, device: Device, candidates: Sequence[Candidate], fp8: bool, max_error: float | None
) -> NoPlanError:
    """The error of ``auto`` where no candidate is eligible; its ``reasons`` hold all of them, in their order."""
    where = f"for {spec} on {device.name}"
    able = [each for each in candidates if each.verdict not in ("refused", "unavailable")]
    best = _nearest(able)
    if best is not None:
        budget = default_budget(spec, fp8) if max_error is None else max_error
        bound = f"the default error budget of {budget:g}" if max_error is None else f"max_error={budget:g}"
        message = f"no plan stays within {bound} {where}: the best, {_reach(best)}. {_advice(spec, budget, best)}"
    elif any(each.verdict == "not asked for" for each in able):
        message = f'no plan {where} computes in 16 bits or more: dtype="fp8" or a max_error admits those in FP8'
    elif able:
        message = f"no plan can be chosen {where}: run `attnbench sweep`, or name one with backend="
    else:
        message = f"no plan serves {spec} on {device.name}"
    reasons = {str(each.plan): each.reasons for each in candidates}
    return NoPlanError(message, reasons, shown=len(able) or None)


def over_budget(asked: str, field: Sequence[Candidate], able: Sequence[Candidate], max_error: float) -> BudgetError:
    """The exception if no named plan stays within a named ``max_error``; the plans ``able`` do."""
    held = "; ".join(f"{each.plan}: {reason}" for each in field for reason in each.reasons)
    within = ", ".join(sorted(str(each.plan) for each in able)) or "none on this machine"
    best = _nearest(field)
    least = "" if best is None or best.needs is None else f" It needs max_error={rounded_up(best.needs):g} or more."
    return BudgetError(f"{asked} cannot be held to max_error={max_error:g}: {held}.{least} Plans within it: {within}.")


def _nearest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Of the candidates that only exceed the budget, the one that needs the smallest budget."""
    inaccurate = [each for each in candidates if each.verdict == "inaccurate" and each.needs is not None]
    return min(inaccurate, key=lambda each: (each.needs or 0.0, str(each.plan)), default=None)


def _reach(best: Candidate) -> str:
    if best.error is None:
        return f"{best.plan}, reaches {rounded_up(best.needs or 0.0):g} (declared)"
    seen = "measured" if best.basis == "measured" else "measured at nearby shapes"
    if best.scaled_from is not None:
        seen = f"measured on {best.scaled_from}"
    return f"{best.plan}, reaches {best.error:.2g} ({seen} on {best.family} inputs)"


def _advice(spec: AttentionSpec, budget: float, best: Candidate) -> str:
    assert best.needs is not None, "only such are the nearest"
    larger = f"max_error={rounded_up(best.needs):g} or more"
    alone = rounding_error(spec)
    if not alone > budget:
        return f"Pass {larger}."
    wide = (each for each in ("fp32", "fp64") if rounding_error(spec.replace(dtype=each, descale=None)) <= budget)
    instead = "".join(f", or {each} tensors" for each in list(wide)[:1])
    return f"Rounding results to {FROM_TORCH[gradient_dtype(spec)]} alone costs {alone:.2g}: pass {larger}{instead}."
