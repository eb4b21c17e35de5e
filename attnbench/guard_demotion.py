"""Plans that a guard has found wanting: for the spec where it did, they count as inaccurate in this process."""

from __future__ import annotations

import threading

from .plan import Plan
from .spec import AttentionSpec

__all__ = ["demote", "demoted", "pardon"]

_reasons: dict[tuple[AttentionSpec, Plan], str] = {}
_lock = threading.Lock()


def demote(plan: Plan, spec: AttentionSpec, reason: str) -> bool:
    """Count the plan as inaccurate at the spec, for this reason; whether that is new."""
    with _lock:
        return _reasons.setdefault(_key(plan, spec), reason) is reason


def demoted(plan: Plan, spec: AttentionSpec) -> str | None:
    """Why the plan is not to be chosen for the spec, or None."""
    return _reasons.get(_key(plan, spec)) if _reasons else None


def pardon() -> None:
    """Forget every demotion; ``attnbench.api.forget_choices`` lets the next calls choose by that."""
    with _lock:
        _reasons.clear()


def _key(plan: Plan, spec: AttentionSpec) -> tuple[AttentionSpec, Plan]:
    return spec.replace(return_lse=False), plan  # returning the LSE changes no answer
