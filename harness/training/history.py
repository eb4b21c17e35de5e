"""What a run has been through so far: kept in its checkpoint, so that a resumed run tells all of its steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from pydantic import ValidationError
from torch import Tensor

from .rows import Share, Sign

__all__ = ["History"]


@dataclass
class History:
    """One entry a step in ``loss``, ``grad_norm`` and ``step_ms``; the rest as in :class:`TrainingRun`."""

    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    untimed: list[int] = field(default_factory=list)
    signs: list[Sign] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)
    attention: Share | None = None
    memory_bytes: int | None = None
    resumed_at: list[int] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How many were taken."""
        return len(self.loss)

    def cut(self, steps: int) -> None:
        """Forget every step from this one on."""
        del self.loss[steps:], self.grad_norm[steps:], self.step_ms[steps:]
        self.untimed = [step for step in self.untimed if step < steps]

    def tensors(self) -> dict[str, Tensor]:
        """The series in fp64, which keeps every bit."""
        series = {"loss": self.loss, "grad_norm": self.grad_norm, "step_ms": self.step_ms}
        return {name: torch.tensor(values, dtype=torch.float64) for name, values in series.items()}

    def facts(self) -> str:
        """All but the series, as JSON."""
        return json.dumps(
            {
                "untimed": self.untimed,
                "signs": [sign.model_dump(mode="json") for sign in self.signs],
                "plans": self.plans,
                "attention": None if self.attention is None else self.attention.model_dump(mode="json"),
                "memory_bytes": self.memory_bytes,
                "resumed_at": self.resumed_at,
            }
        )

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], facts: str) -> History:
        """What ``tensors`` and ``facts`` wrote.  Raises ValueError on anything else."""
        said = json.loads(facts)
        try:
            return cls(
                **{name: tensors[name].tolist() for name in ("loss", "grad_norm", "step_ms")},
                untimed=[int(step) for step in said["untimed"]],
                signs=[Sign.model_validate_json(json.dumps(sign)) for sign in said["signs"]],
                plans=[str(plan) for plan in said["plans"]],
                attention=None
                if said["attention"] is None
                else Share.model_validate_json(json.dumps(said["attention"])),
                memory_bytes=said["memory_bytes"],
                resumed_at=[int(step) for step in said["resumed_at"]],
            )
        except (KeyError, TypeError, ValidationError) as error:
            raise ValueError(f"not a history: {error}") from error
