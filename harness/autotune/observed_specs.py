"""The specs that a program uses while autotune is open, and how often each is called."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

import torch

from attnbench.choosing.choice import Choice
from attnbench.dispatch.context import Wish
from attnbench.kernels.contract import Inputs, Operands, Result
from attnbench.kernels.execution import Execution
from attnbench.problem.lengths import Lengths
from attnbench.problem.spec import AttentionSpec

from ..capture.file import input_bytes

__all__ = ["ObservedSpec", "ObservedSpecs", "Terms"]

_MOST = 4096  # specs to keep: a program with changing shapes has any number
_FLOPS_PER_BYTE = 200.0  # roughly what a GPU computes while it reads a byte: few queries on many keys are limited by it
Terms = tuple[bool, float | None]  # whether FP8 was opted into, and the budget if one was given


@dataclass(eq=False)
class ObservedSpec:
    """One spec on one device.

    ``calls`` counts the forward passes that left the choice to attnbench; ``choices`` maps the terms of the calls to
    what was chosen.  If there are none, ``named`` says which backend was named and where.  ``lengths`` are copies of
    those of the first call with sequences of unequal length: a spec knows their number, total and longest alone.
    """

    spec: AttentionSpec
    device: torch.device
    calls: int = 0
    choices: dict[Terms, Choice] = field(default_factory=dict)
    named: str = ""
    lengths: Lengths | None = None

    @property
    def fp8(self) -> bool:
        """Whether FP8 was opted into by any call."""
        return any(fp8 for fp8, _ in self.choices)

    @property
    def weight(self) -> float:
        """An estimate of its share of the program's time, in operations; at least one call is assumed."""
        return max(1, self.calls) * (self.spec.flops + _FLOPS_PER_BYTE * input_bytes(self.spec))


@dataclass(frozen=True)
class _Counted(Execution):
    """An execution that counts its forward passes."""

    asked: ObservedSpec = field(kw_only=True, compare=False, repr=False)

    def answer(self, inputs: Inputs) -> tuple[Operands, Result]:
        self.asked.calls += 1  # threads may lose a count, which only affects an order
        if inputs.lengths is not None and self.asked.lengths is None:
            self.asked.lengths = _copied(inputs.lengths)
        return super().answer(inputs)


def _copied(lengths: Lengths) -> Lengths | None:
    """A copy on the device, which waits for nothing; None while a CUDA graph is captured, which would contain it."""
    if any(x is not None and x.is_cuda for x in (lengths.q, lengths.kv)) and torch.cuda.is_current_stream_capturing():
        return None
    q = None if lengths.q is None else lengths.q.clone()
    same = lengths.kv is lengths.q
    return replace(lengths, q=q, kv=q if same else None if lengths.kv is None else lengths.kv.clone())


class ObservedSpecs:
    """A listener (``attnbench.dispatch.memory``) that keeps specs, and of tensors lengths alone."""

    def __init__(self) -> None:
        self._asked: dict[tuple[torch.device, AttentionSpec], ObservedSpec] = {}
        self._lock = threading.Lock()

    def chosen(self, device: torch.device, wish: Wish, choice: Choice, execution: Execution) -> Execution:
        """Record the choice for the wish; the returned execution counts its calls."""
        with self._lock:
            if len(self._asked) >= _MOST:
                return execution
            asked = self.of(choice.spec, device)
            if wish.backend != "auto":
                asked.named = f"{wish.backend} was asked for by {wish.asked_by}"
                return execution
            asked.choices.setdefault((wish.dtype == "fp8", wish.max_error), choice)
        return _Counted(execution.spec, execution.forward, execution.backward, execution.budget, asked=asked)

    def of(self, spec: AttentionSpec, device: torch.device) -> ObservedSpec:
        """The entry of the spec, which is measured without sinks and without returning the log-sum-exp."""
        spec = spec.replace(return_lse=False, sinks=False)
        return self._asked.setdefault((device, spec), ObservedSpec(spec, device))

    @property
    def heaviest_first(self) -> list[ObservedSpec]:
        """All specs, by their estimated share of the program's time."""
        with self._lock:
            return sorted(self._asked.values(), key=lambda asked: asked.weight, reverse=True)
