"""What a run has been through so far: kept in its checkpoint, so that a resumed run tells all of its steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from ...json_lines import validation_fault
from ..rows import MOST_PLANS, MOST_RESUMED, MOST_SIGNS, MOST_STEPS, Count, Series, Share, Sign, StepTimes, Text

__all__ = ["History"]

_SERIES = ("loss", "grad_norm", "step_ms")


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
        return {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in _SERIES}

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
        if not isinstance(said, dict):
            raise ValueError("a history is an object")
        try:
            kept = _Kept.model_validate({**said, **{name: each.tolist() for name, each in tensors.items()}})
        except ValidationError as error:
            raise ValueError(validation_fault(error, "the history")) from None
        if not len(kept.loss) == len(kept.grad_norm) == len(kept.step_ms):
            raise ValueError(f"{', '.join(_SERIES)} have an entry for each step")
        return cls(**{name: getattr(kept, name) for name in _Kept.model_fields})


class _Kept(BaseModel):
    """A history as it lies in a checkpoint; what it may hold is what a row may."""

    model_config = ConfigDict(extra="forbid", strict=True)

    loss: Series
    grad_norm: Series
    step_ms: StepTimes
    untimed: Annotated[list[Count], Field(max_length=MOST_STEPS)]
    signs: Annotated[list[Sign], Field(max_length=MOST_SIGNS)]
    plans: Annotated[list[Text], Field(max_length=MOST_PLANS)]
    attention: Share | None
    memory_bytes: Count | None
    resumed_at: Annotated[list[Count], Field(max_length=MOST_RESUMED)]
