"""Kernels that compute in the type of their tensors: one class a pass, one kernel a precision."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from attnbench.kernels.capabilities import Capabilities
from attnbench.kernels.contract import Kernel

from .declared_errors import DECLARED_ERROR

__all__ = ["TypedKernel"]


class TypedKernel(Kernel):
    """What both passes of a backend share: the kernel ``backend:precision`` with a row and an error by precision."""

    backend: str
    errors: Mapping[str, float] = DECLARED_ERROR  # by precision; a backward has DECLARED_GRADIENT_ERROR

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.name = f"{self.backend}:{precision}"
        self.rows = self.rows_of(precision)
        self.declared_error = self.errors[precision]

    @abstractmethod
    def rows_of(self, precision: str) -> Mapping[str, Capabilities]:
        """The row for each device type."""
