"""One plan that was considered for a choice: its time, its error, its verdict, and why it lost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from ..kernels.plan import Plan

__all__ = ["ORDER", "Basis", "Candidate", "CandidateVerdict", "Margin", "Trade"]

Basis = Literal["measured", "predicted", "scaled", "rule", "frozen"]
CandidateVerdict = Literal["chosen", "eligible", "inaccurate", "unmeasured", "not asked for", "refused", "unavailable"]
ORDER: tuple[CandidateVerdict, ...] = (
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
    """One plan that was considered for a choice.

    ``reasons`` say why it was not chosen, one sentence each.  ``time_ms`` (median of the whole call) and ``error``
    (worst relative L2 over tensors and input families, seen in ``family``) are None if nothing was measured.
    ``basis``: ``measured`` at this spec; ``predicted`` by the cost model, with the error that a measurement
    would stay below with 95 % confidence; ``scaled``: the time of a table that was ``scaled_from`` another GPU,
    measured or predicted there, with the error of that GPU; ``rule``: the kernels' declared preference and error;
    ``frozen``: named by a file, without tables.

    ``spread_ms`` is the interquartile range of a measured time, ``time_error`` the standard error of the logarithm of a
    predicted or scaled one (0.05 is about 5 %).  ``needs`` is the smallest budget that admits the plan with FP8
    allowed; None if no budget does.  ``declared_beyond`` is the most keys that an FP8 plan was measured with where the
    spec has more: from there on the error grows as the kernels declare.
    """

    plan: Plan
    verdict: CandidateVerdict
    reasons: tuple[str, ...] = ()
    time_ms: float | None = None
    error: float | None = None
    family: str | None = None
    basis: Basis = "rule"
    spread_ms: float | None = None
    time_error: float | None = None
    needs: float | None = None
    scaled_from: str | None = None
    declared_beyond: int | None = None

    def scaled(self, source: str | None, error: float) -> Candidate:
        """The same for a measured time that was scaled from the GPU ``source``, with the standard ``error`` of the
        logarithm; itself without a source or a time.
        """
        if source is None or self.time_ms is None:
            return self
        return replace(self, basis="scaled", spread_ms=None, time_error=error, scaled_from=source)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "plan": str(self.plan),
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "time_ms": self.time_ms,
            "spread_ms": self.spread_ms,
            "time_error": self.time_error,
            "error": _finite(self.error),
            "family": self.family,
            "basis": self.basis,
            "scaled_from": self.scaled_from,
            "declared_beyond": self.declared_beyond,
            "needs": _finite(self.needs),
        }


@dataclass(frozen=True)
class Margin:
    """The lead over the runner-up: ``gap`` is the runner-up's time over the chosen plan's, minus one.

    ``noise`` is what the gap must exceed to be significant.  A plan that won a tie may have a negative gap.
    """

    runner_up: Plan
    gap: float
    noise: float

    @property
    def inside_noise(self) -> bool:
        """Whether the times of the two do not differ significantly."""
        return self.gap <= self.noise

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**vars(self), "runner_up": str(self.runner_up), "inside_noise": self.inside_noise}


@dataclass(frozen=True)
class Trade:
    """What another budget would choose: ``plan`` under ``max_error``; ``change`` is its time over the chosen one's,
    minus 1.
    """

    max_error: float
    plan: Plan
    change: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**vars(self), "plan": str(self.plan)}


def _finite(error: float | None) -> float | str | None:
    """The value for JSON: infinity, which JSON cannot hold as a number, becomes a word, as in a table."""
    return "inf" if error == float("inf") else error
