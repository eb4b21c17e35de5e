"""Plans that a guard demoted: they count as inaccurate at a spec in this process.

While choices are frozen nothing is demoted, because only the rank that found the breach would change its plan.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from ..errors import AttnbenchWarning
from ..kernels.plan import Plan
from ..problem.spec import AttentionSpec
from ..state import Cache
from .freeze_hook import freezing

__all__ = ["demote", "demoted", "demotions"]

# Why a plan was demoted at a spec, or was not because choices are frozen in a file.
demotions: Cache[tuple[AttentionSpec | Path, Plan], str] = Cache(lasting=True)


def demote(plan: Plan, spec: AttentionSpec, reason: str) -> bool:
    """Count the plan as inaccurate at the spec; returns whether that is new.  Only warns while choices are frozen."""
    frozen = freezing.active
    key = (_answered(spec) if frozen is None else frozen.path), plan
    new = key not in demotions.entries
    demotions.of(key, lambda: reason)
    if frozen is None:
        return new
    if new:
        warnings.warn(
            f"{plan} stays the plan of {spec}, because choices are frozen in {frozen.path} and other ranks would "
            f"keep it; record anew without it. It would have been {reason}",
            AttnbenchWarning,
            stacklevel=2,
        )
    return False


def demoted(plan: Plan, spec: AttentionSpec) -> str | None:
    """Why the plan must not be chosen for the spec, or None."""
    return demotions.entries.get((_answered(spec), plan)) if demotions.entries else None


def _answered(spec: AttentionSpec) -> AttentionSpec:
    return spec.replace(return_lse=False)  # returning the LSE changes no answer
