"""The plan chosen for a spec, with every candidate and why it lost: data that also prints well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .plan import Plan
from .spec import AttentionSpec

__all__ = ["Candidate", "Choice", "Verdict"]

Verdict = Literal["chosen", "eligible", "inaccurate", "unmeasured", "not asked for", "refused", "unavailable"]
_ORDER: tuple[Verdict, ...] = (
    "chosen",
    "eligible",
    "inaccurate",
    "unmeasured",
    "not asked for",
    "refused",
    "unavailable",
)


@dataclass(frozen=True)
class Candidate:
    """One plan that was considered.

    ``reasons`` say why it was not chosen, one sentence each.  ``time_ms`` (median of the
    whole call) and ``error`` (worst relative L2 over tensors and input families, and the
    ``family`` it was seen in) are None where nothing was measured; ``basis`` says what they
    rest on: ``measured`` at this very spec, ``nearest`` (at the spec named in ``measured_at``),
    or ``rule`` (the kernels' declared preference and error).
    """

    plan: Plan
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    time_ms: float | None = None
    error: float | None = None
    family: str | None = None
    basis: Literal["measured", "nearest", "rule"] = "rule"
    measured_at: AttentionSpec | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "plan": str(self.plan),
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "time_ms": self.time_ms,
            "error": self.error,
            "family": self.family,
            "basis": self.basis,
            "measured_at": None if self.measured_at is None else self.measured_at.to_dict(),
        }


@dataclass(frozen=True)
class Choice:
    """What ``attention`` runs for ``spec`` on ``device``, and what it was chosen from.

    ``asked`` is the backend that was asked for and ``asked_by`` who asked (``argument``,
    ``context``, ``ATTNBENCH_BACKEND`` or ``default``); ``budget`` is the largest error
    that was accepted; ``basis`` is what the decision rests on: ``measured``, ``nearest``,
    ``rule`` or ``explicit``.  ``hint`` is what the user could do for a better choice.
    """

    spec: AttentionSpec
    device: str
    plan: Plan
    budget: float
    basis: Literal["measured", "nearest", "rule", "explicit"]
    candidates: tuple[Candidate, ...]
    asked: str = "auto"
    asked_by: str = "default"
    hint: str | None = None

    @property
    def chosen(self) -> Candidate:
        """The candidate that won."""
        return next(each for each in self.candidates if each.plan == self.plan)

    @property
    def ranked(self) -> list[Candidate]:
        """The candidates, the chosen one first, then by verdict and time."""

        def rank(each: Candidate) -> tuple[int, float, str]:
            time = float("inf") if each.time_ms is None else each.time_ms
            return _ORDER.index(each.verdict), time, str(each.plan)

        return sorted(self.candidates, key=rank)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "spec": self.spec.to_dict(),
            "device": self.device,
            "plan": str(self.plan),
            "budget": self.budget,
            "basis": self.basis,
            "asked": self.asked,
            "asked_by": self.asked_by,
            "hint": self.hint,
            "candidates": [each.to_dict() for each in self.ranked],
        }

    def to_text(self) -> str:
        """The choice and a table of its candidates, for a terminal."""
        return self._render("simple")

    def to_markdown(self) -> str:
        """The same for a pull request."""
        return self._render("github")

    def __str__(self) -> str:
        return self.to_text()

    def _render(self, style: str) -> str:
        # attention() imports this module, and needs no tables for that.
        from tabulate import tabulate

        said = f"asked for by {self.asked_by}" if self.basis == "explicit" else f"by {self.basis}"
        head = [f"{self.spec} on {self.device}", f"plan {self.plan} ({said}), error budget {self.budget:g}"]
        rows = [
            [
                str(each.plan),
                each.verdict,
                "" if each.time_ms is None else f"{each.time_ms:.3f}",
                "" if each.error is None else f"{each.error:.2g} ({each.family})",
                each.basis if each.time_ms is not None else "",
                "; ".join(each.reasons),
            ]
            for each in self.ranked
        ]
        columns = ["plan", "verdict", "call ms", "error", "basis", "why not"]
        widths = [None, None, None, None, None, 70 if style == "simple" else None]
        table = tabulate(rows, columns, tablefmt=style, maxcolwidths=widths, disable_numparse=True)
        return "\n".join([*head, "", table, *(["", f"hint: {self.hint}"] if self.hint else [])])
