"""The slot for the open guard, which an execution tells of its passes.

Apart from the guard, so that a call without one reads one attribute and loads nothing.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..problem.spec import AttentionSpec
from ..state import Slot
from .contract import BackwardKernel, Inputs, Operands
from .plan import Plan

__all__ = ["Executed", "Gradients", "Sample", "Watcher", "watching"]

Gradients = tuple[Tensor, Tensor, Tensor]


class Executed(Protocol):
    """The part of an ``Execution`` that a watcher reads."""

    @property
    def spec(self) -> AttentionSpec:
        """What was asked."""

    @property
    def plan(self) -> Plan:
        """What runs."""

    @property
    def backward(self) -> BackwardKernel | None:
        """None where no gradients are wanted."""

    @property
    def budget(self) -> float | None:
        """The error that the plan was chosen under; None where nobody chose."""


class Sample(Protocol):
    """A forward of which the gradients are to be checked, with what the check needs of its inputs."""

    def derived(self, grad_out: Tensor, gradients: Gradients) -> None:
        """Its backward has run."""


class Watcher(Protocol):
    """What an open guard is told.  Each method may raise BreachError, and nothing else."""

    def answered(
        self,
        execution: Executed,
        operands: Operands,
        inputs: Inputs,
        out: Tensor,
    ) -> None:
        """A forward has run; a backward names its operands."""

    def prepared(self, operands: Operands, inputs: Inputs) -> None:
        """Operands were made of the inputs, for a backward that this thread may be about to run."""

    def sample(self, execution: Executed, inputs: Inputs) -> Sample | None:
        """A forward has run whose backward may come later, in another thread; None where it will not be checked."""

    def derived(self, execution: Executed, operands: Operands, grad_out: Tensor, gradients: Gradients) -> None:
        """A backward has run; it is known by its operands, if it follows a forward that answered in this thread."""


watching: Slot[Watcher] = Slot()
