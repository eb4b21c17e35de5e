"""Whether a plan that can serve is within the budget, and what is known about its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..kernels.plan import Plan, backend_of
from ..kernels.registry import Registry
from .candidate import Candidate
from .evidence import Evidence

__all__ = ["Judge"]

_FP8_CLOSED = 'computes in FP8, which dtype="fp8" or a max_error opens'


class Judge:
    """Turns plans into candidates: whether FP8 is allowed, whether the plan is accurate enough, how long it takes.

    ``fp8``: FP8 was opted into.  ``declared`` gives a plan's declared error, used where nothing was measured.
    ``dropped`` maps a backend to why its measurements are not used here.
    """

    def __init__(
        self,
        evidence: Evidence,
        budget: float,
        fp8: bool,
        known: Registry,
        declared: Callable[[Plan], float],
        dropped: Mapping[str, str] | None = None,
    ) -> None:
        self._evidence, self._budget, self._fp8, self._known = evidence, budget, fp8, known
        self._declared, self._dropped = declared, dropped or {}

    def __call__(self, plan: Plan, insisted: bool = False) -> Candidate:
        """A plan that can serve, as eligible or not; ``insisted``: the caller named it."""
        found = self._evidence.candidate(plan, self._budget, self._known.error_growth(plan)) or self._by_rule(plan)
        if plan.fp8 and not self._fp8 and not insisted:
            return replace(found, verdict="not asked for", reasons=(_FP8_CLOSED,))
        return found

    def preference(self, plan: Plan) -> float:
        """The plan's rank in the declared order of forwards; plans without a rank come last."""
        declared = self._known.forward(plan.forward).preference
        return float("inf") if declared is None else declared

    def _by_rule(self, plan: Plan) -> Candidate:
        if plan.fp8 or self._known.forward(plan.forward).preference is None:
            why = [text for kernel in plan.kernels if (text := self._dropped.get(backend_of(kernel)))]
            return Candidate(
                plan, "unmeasured", tuple(why) or ("its time and error were never measured on this device",)
            )
        declared = self._declared(plan)
        if not declared <= self._budget:
            reason = f"declares an error of {declared:.3g}, beyond the budget of {self._budget:g}"
            return Candidate(plan, "inaccurate", (reason,), needs=declared)
        return Candidate(plan, "eligible", needs=declared)
