"""FP8 operands that lie in a block of memory; a view is made where a tensor is read, and most kernels read none."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from attnbench.problem.fp8 import Quantised
from attnbench.problem.spec import Granularity

from ..blocks import Memory, Part, Piece

__all__ = ["Stored", "pieces"]


class Stored(Quantised):
    """A ``Quantised`` whose ``data`` and ``descale`` are parts of ``block``, the one tensor that is kept of it."""

    kept: ClassVar[tuple[str, ...]] = ("block",)
    block: Tensor
    parts: tuple[Part, Part]

    @classmethod
    def of(cls, block: Tensor, parts: tuple[Part, Part], granularity: Granularity, rotated: bool) -> Stored:
        """The tensor whose data and descale lie in these parts."""
        made = cls.__new__(cls)
        made.__dict__.update(block=block, parts=parts, granularity=granularity, rotated=rotated, mean=None)
        return made

    @property
    def data(self) -> Tensor:
        """(B, H, S, D) in FP8."""
        return Memory(self.block).of(self.parts[0])

    @property
    def descale(self) -> Tensor:
        """One for all tokens of a head or a tensor, or (B, H, S, 1), in fp32."""
        return Memory(self.block).of(self.parts[1])


def pieces(x: Quantised) -> tuple[Tensor | Piece, Tensor | Piece]:
    """Data and descale for a launch."""
    if not isinstance(x, Stored):
        return x.data, x.descale
    memory, (data, descale) = Memory(x.block), x.parts
    return Piece(memory, data), Piece(memory, descale)
