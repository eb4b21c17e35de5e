"""The specs that a program uses while autotune is open: each spec once, and how often it is called."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from attnbench.choosing.choice import Choice
from attnbench.dispatch.context import Wish
from attnbench.kernels.contract import Inputs, Operands, Result
from attnbench.kernels.execution import Execution
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.spec import AttentionSpec

from ..capture.file import tensor_shapes

__all__ = ["AskedSpec", "AskedSpecs", "Terms", "input_bytes"]

_MOST = 4096  # the most specs to keep: a program with ever new shapes has no limit
_FLOPS_PER_BYTE = 200.0  # about what a GPU computes while it reads a byte: few queries on many keys cost their reading
Terms = tuple[bool, float | None]  # whether FP8 was opted into, and the budget where one was named


@dataclass(eq=False)
class AskedSpec:
    """One spec on one device.

    ``calls`` counts the forward passes that left the choice to attnbench, ``choices`` what was
    chosen for each of the terms they were asked under.  Without any, ``named`` tells who
    asked for what by its name.
    """

    spec: AttentionSpec
    device: torch.device
    calls: int = 0
    choices: dict[Terms, Choice] = field(default_factory=dict)
    named: str = ""

    @property
    def fp8(self) -> bool:
        """Whether FP8 was opted into by any call."""
        return any(fp8 for fp8, _ in self.choices)

    @property
    def weight(self) -> float:
        """How much of the program's time it may take, in operations; what was never called counts as called once."""
        return max(1, self.calls) * (self.spec.flops + _FLOPS_PER_BYTE * input_bytes(self.spec))


@dataclass(frozen=True)
class _Counted(Execution):
    """An execution that counts its forward passes."""

    asked: AskedSpec = field(kw_only=True, compare=False, repr=False)

    def answer(self, inputs: Inputs) -> tuple[Operands, Result]:
        self.asked.calls += 1  # several threads may lose a count; it is for an order
        return super().answer(inputs)


class AskedSpecs:
    """A listener (``attnbench.dispatch.memory``) that keeps the specs, and none of the tensors."""

    def __init__(self) -> None:
        self._asked: dict[tuple[torch.device, AttentionSpec], AskedSpec] = {}
        self._lock = threading.Lock()

    def chosen(self, device: torch.device, wish: Wish, choice: Choice, execution: Execution) -> Execution:
        """The wish was answered by the choice; what is returned counts its calls."""
        with self._lock:
            if len(self._asked) >= _MOST:
                return execution
            asked = self.of(choice.spec, device)
            if wish.backend != "auto":
                asked.named = f"{wish.backend} was asked for by {wish.asked_by}"
                return execution
            asked.choices.setdefault((wish.dtype == "fp8", wish.max_error), choice)
        return _Counted(execution.spec, execution.forward, execution.backward, execution.budget, asked=asked)

    def of(self, spec: AttentionSpec, device: torch.device) -> AskedSpec:
        """What is known of the spec there; returning the log-sum-exp changes neither time nor error."""
        spec = spec.replace(return_lse=False)
        return self._asked.setdefault((device, spec), AskedSpec(spec, device))

    @property
    def heaviest_first(self) -> list[AskedSpec]:
        """All of them, those first that may take most of the program's time."""
        with self._lock:
            return sorted(self._asked.values(), key=lambda asked: asked.weight, reverse=True)


def input_bytes(spec: AttentionSpec) -> int:
    """The bytes of q, k, v and, in training, of the output's gradient."""
    elements = sum(torch.Size(shape).numel() for shape in tensor_shapes(spec).values())
    return elements * TO_TORCH[spec.dtype].itemsize
