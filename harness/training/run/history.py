"""The history of a run, kept in its checkpoint so that a resumed run records all of its steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from attnbench.files.json_text import validation_fault

from ..rows import MOST_PLANS, MOST_RESUMED, MOST_SIGNS, MOST_STEPS, Count, Series, Share, StepTimes, Text, WarningSign

__all__ = ["History"]

_SERIES = ("loss", "grad_norm", "step_ms")


class History(BaseModel):
    """One entry a step in ``loss``, ``grad_norm`` and ``step_ms``; the rest as in :class:`TrainingRun`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    loss: Series = []
    grad_norm: Series = []
    step_ms: StepTimes = []
    untimed: Annotated[list[Count], Field(max_length=MOST_STEPS)] = []
    signs: Annotated[list[WarningSign], Field(max_length=MOST_SIGNS)] = []
    plans: Annotated[list[Text], Field(max_length=MOST_PLANS)] = []
    attention: Share | None = None
    memory_bytes: Count | None = None
    resumed_at: Annotated[list[Count], Field(max_length=MOST_RESUMED)] = []

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return len(self.loss)

    def tensors(self) -> dict[str, Tensor]:
        """The series in fp64, which keeps every bit."""
        return {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in _SERIES}

    def facts(self) -> str:
        """All but the series, as JSON."""
        return self.model_dump_json(exclude=set(_SERIES))

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], facts: str) -> History:
        """The history with these ``tensors`` and ``facts``.  Raises ValueError on anything else."""
        values = json.loads(facts)
        if not isinstance(values, dict):
            raise ValueError("a history is an object")
        if missing := cls.model_fields.keys() - {*values, *tensors}:
            raise ValueError(f"a history needs {', '.join(sorted(missing))}")
        try:
            history = cls.model_validate({**values, **{name: each.tolist() for name, each in tensors.items()}})
        except ValidationError as error:
            raise ValueError(validation_fault(error, "the history")) from None
        if not len(history.loss) == len(history.grad_norm) == len(history.step_ms):
            raise ValueError(f"{', '.join(_SERIES)} have an entry for each step")
        return history
