"""The slot for the active guard; separate from it, so that a call without one reads one attribute and loads nothing."""

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
        """The error that the plan was chosen under; None if nothing was chosen."""


class Sample(Protocol):
    """A forward whose gradients will be checked, with copies of the inputs that the check reads."""

    def derived(self, grad_out: Tensor, gradients: Gradients) -> None:
        """Its backward has run."""


class Watcher(Protocol):
    """What an open guard is notified of.  Methods raise only BreachError."""

    def answered(self, execution: Executed, operands: Operands, inputs: Inputs, out: Tensor) -> None:
        """A forward has run; its operands identify it for a backward."""

    def prepared(self, operands: Operands, inputs: Inputs) -> None:
        """Operands were made, for a backward that this thread may run next."""

    def sample(self, execution: Executed, inputs: Inputs) -> Sample | None:
        """A forward has run whose backward may run later in any thread; None if it will not be checked."""

    def derived(self, execution: Executed, operands: Operands, grad_out: Tensor, gradients: Gradients) -> None:
        """A backward has run, identified by its operands if its forward ran in this thread."""


watching: Slot[Watcher] = Slot()
