"""The slot for the open freeze; separate from it, so that a choice without one loads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..state import Slot

if TYPE_CHECKING:
    import torch

    from ..problem.spec import AttentionSpec
    from .choice import Choice

__all__ = ["Frozen", "freezing"]


class Frozen(Protocol):
    """What an open freeze is asked."""

    @property
    def path(self) -> Path:
        """The file that holds the choices."""

    def choice(
        self, spec: AttentionSpec, device: torch.device, backend: str, asked_by: str, fp8: bool, max_error: float | None
    ) -> Choice:
        """The choice that ``selector.choose`` is asked for."""


freezing: Slot[Frozen] = Slot()
