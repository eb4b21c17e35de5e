"""A breach: a tensor of a plan at a spec that is further from exact attention than allowed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kernels.plan import Plan
from ..problem.spec import AttentionSpec

__all__ = ["Breach"]


@dataclass(frozen=True)
class Breach:
    """One breach, as a record.

    ``tensor`` is out, dq, dk or dv; ``error`` its relative L2 on the checked rows, as a root mean square over the
    checks since the evidence began (infinite if not finite), ``bound`` what is allowed.  ``evidence`` is the likelihood
    ratio of a plan beyond the bound to one within it (infinite if no statistics are needed).  ``call`` counts the
    passes of this plan and spec from 0, ``check`` the checked ones from 1.  ``path`` is the file with the tensors, None
    if none was written.
    """

    plan: Plan
    spec: AttentionSpec
    device: str
    tensor: str
    error: float
    bound: float
    evidence: float
    call: int
    check: int
    path: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; what is infinite is the string ``inf``."""
        return {
            **vars(self),
            "plan": str(self.plan),
            "spec": self.spec.to_dict(),
            "error": _plain(self.error),
            "evidence": _plain(self.evidence),
            "path": None if self.path is None else str(self.path),
        }

    @property
    def reason(self) -> str:
        """What is wrong, without the plan's name."""
        wrong = f"is off by {self.error:.2g}" if math.isfinite(self.error) else "is not finite"
        return f"its {self.tensor} {wrong} on live tensors, {self.bound:.2g} allowed"

    def __str__(self) -> str:
        kept = "" if self.path is None else f"; the tensors are in {self.path}"
        return f"{self.plan} on {self.spec} ({self.device}), call {self.call}: {self.reason}{kept}"


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"
