"""A case while its plans are measured: its inputs, drawn once, and the truths that answers are compared with."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnbench.kernels.contract import Operands
from attnbench.kernels.registry import Registry
from attnbench.problem.fp8 import Quantised

from ..cases.case import Case
from ..cases.inputs import Drawn, draw
from .truth import Floor, Truth

__all__ = ["OpenCase"]


class OpenCase:
    """The inputs of every family, their truths, and one set of buffers that every kernel reads its inputs from.

    The buffers stay at their addresses while their contents change, which exposes a kernel that caches by address.
    """

    def __init__(self, case: Case, registry: Registry, device: torch.device) -> None:
        self.case, self.registry, self.device = case, registry, device
        self._inputs: dict[str, Drawn] = {}
        self._truths: dict[str, Truth] = {}
        first = self.inputs(case.families[0])
        grad_out = None if first.grad_out is None else first.grad_out.clone()
        self._floors: dict[str, tuple[str, list[Tensor] | None, Floor | None]] = {}
        self.buffers = replace(first, q=first.q.clone(), k=first.k.clone(), v=first.v.clone(), grad_out=grad_out)

    def inputs(self, family: str) -> Drawn:
        """The inputs of a family, drawn when they are first needed."""
        if family not in self._inputs:
            self._inputs[family] = draw(self.case.spec, family, self.device, self.case.lengths)
        return self._inputs[family]

    def truth(self, family: str) -> Truth:
        """The truth of a family, computed when it is first needed."""
        if family not in self._truths:
            self._truths[family] = Truth.of(self.case.spec, self.inputs(family), self.registry, flops=self.case.flops)
        return self._truths[family]

    def exact_on(self, family: str, forward: str, operands: Operands) -> Floor | None:
        """Exact attention on a forward's operands, kept for the next plan that has this forward."""
        if family in self._floors:
            before, seen, floor = self._floors[family]
            if before == forward and seen is not None and _same(seen, operands):
                return floor
        floor = self.truth(family).exact_on(operands)
        self._floors[family] = forward, _kept(operands), floor
        return floor

    @property
    def tensors(self) -> list[Tensor]:
        """The buffers of q, k, v and, in training, grad_out."""
        return _tensors(self.buffers)

    def load(self, family: str) -> None:
        """Put the inputs of a family into the buffers."""
        for buffer, x in zip(self.tensors, _tensors(self.inputs(family)), strict=True):
            buffer.copy_(x)

    def load_first(self) -> None:
        """Restore the first family's inputs, which every request starts from, whatever the last one left."""
        self.load(self.case.families[0])

    def unchanged(self, family: str) -> bool:
        """Whether the buffers still hold the inputs of the family, bit for bit."""
        return all(
            torch.equal(buffer, x) for buffer, x in zip(self.tensors, _tensors(self.inputs(family)), strict=True)
        )


def _quantised(operands: Operands) -> list[Tensor] | None:
    """The data and scales of the operands; None if one of them is not quantised."""
    parts = [x for x in (operands.q, operands.k, operands.v) if isinstance(x, Quantised)]
    return [x for part in parts for x in (part.data.view(torch.uint8), part.descale)] if len(parts) == 3 else None


def _kept(operands: Operands) -> list[Tensor] | None:
    """A copy: a kernel may write its next operands to the same place."""
    numbers = _quantised(operands)
    return None if numbers is None else [x.clone() for x in numbers]


def _same(seen: list[Tensor], operands: Operands) -> bool:
    """Whether the operands are the same: a kernel's scales may depend on earlier inputs."""
    numbers = _quantised(operands)
    return numbers is not None and all(map(torch.equal, seen, numbers))


def _tensors(inputs: Drawn) -> list[Tensor]:
    return [x for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out) if x is not None]
