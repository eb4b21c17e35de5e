"""What can be chosen: a forward kernel and, for training, the backward kernel that follows it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import UnknownBackendError
from ..text.printable import brief

__all__ = ["Plan", "backend_of", "precision_of"]

_KERNEL = re.compile(r"[a-z0-9][a-z0-9_.-]*:[a-z0-9][a-z0-9_.-]*")


@dataclass(frozen=True, order=True)
class Plan:
    """Kernel names, written ``fa3:fp8`` (forward only) or ``fa3:fp8>fa4:bf16`` (with a backward)."""

    forward: str
    backward: str | None = None

    def __post_init__(self) -> None:
        for kernel in self.kernels:
            if not _KERNEL.fullmatch(kernel):
                raise UnknownBackendError(f"{brief(kernel)} is no kernel name; a kernel is written backend:precision")

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that ``str`` wrote.  Raises UnknownBackendError where the text is none."""
        forward, arrow, backward = text.partition(">")
        return cls(forward.strip(), backward.strip() if arrow else None)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels of the plan, forward first."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    @property
    def fp8(self) -> bool:
        """Whether any pass computes in 8 bits, which a caller has to opt into."""
        return any(precision_of(kernel).startswith(("fp8", "int8")) for kernel in self.kernels)

    def __str__(self) -> str:
        return ">".join(self.kernels)


def backend_of(kernel: str) -> str:
    """The family before the colon: ``fa3`` of ``fa3:fp8``."""
    return kernel.partition(":")[0]


def precision_of(kernel: str) -> str:
    """The part after the colon: ``fp8`` of ``fa3:fp8``; options may follow, as in ``fp8-token``."""
    return kernel.partition(":")[2]
