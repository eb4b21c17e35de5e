"""Plans that a guard has found wanting: for the spec where it did, they count as inaccurate in this process.

While choices are frozen nothing is demoted: they were frozen so that ranks agree, and the rank that found the plan
wanting would be the only one to leave it.
"""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

from ..errors import AttnbenchWarning
from ..kernels.plan import Plan
from ..problem.spec import AttentionSpec
from . import freeze_hook

__all__ = ["demote", "demoted", "pardon"]

_reasons: dict[tuple[AttentionSpec, Plan], str] = {}
_kept: set[tuple[Path, Plan]] = set()  # the file of frozen choices that a plan stays by, once it was said
_lock = threading.Lock()


def demote(plan: Plan, spec: AttentionSpec, reason: str) -> bool:
    """Count the plan as inaccurate at the spec, for this reason; whether that is new.

    While choices are frozen the plan stays, with one warning for each plan.
    """
    frozen = freeze_hook.frozen
    if frozen is not None:
        with _lock:
            new = (frozen.path, plan) not in _kept
            _kept.add((frozen.path, plan))
        if new:
            warnings.warn(
                f"{plan} stays the plan of {spec}, because choices are frozen in {frozen.path} and other ranks would "
                f"keep it; record anew without it. It would have been {reason}",
                AttnbenchWarning,
                stacklevel=2,
            )
        return False
    with _lock:
        return _reasons.setdefault(_key(plan, spec), reason) is reason


def demoted(plan: Plan, spec: AttentionSpec) -> str | None:
    """Why the plan is not to be chosen for the spec, or None."""
    return _reasons.get(_key(plan, spec)) if _reasons else None


def pardon() -> None:
    """Forget every demotion; ``attnbench.api.forget_choices`` lets the next calls choose by that."""
    with _lock:
        _reasons.clear()
        _kept.clear()


def _key(plan: Plan, spec: AttentionSpec) -> tuple[AttentionSpec, Plan]:
    return spec.replace(return_lse=False), plan  # returning the LSE changes no answer
