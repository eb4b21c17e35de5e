"""FP8 operands that lie in a block of memory; a view is made where a tensor is read, and most kernels read none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from attnbench.problem.fp8 import Quantised
from attnbench.problem.spec import Granularity

from ..blocks import Memory, Part, Piece

__all__ = ["Form", "Stored"]


@dataclass(frozen=True, eq=False)
class Form:
    """How operands lie and what they are: one object for all that are alike, in keys compared by identity."""

    data: Part
    descale: Part
    granularity: Granularity
    rotated: bool


class Stored(Quantised):
    """A plain e4m3 operand whose ``data`` and ``descale`` are parts of ``block``, the one tensor that is kept of it.

    ``triton`` makes them, Q and K rotated together or not at all, and nothing smoothed.
    """

    kept: ClassVar[tuple[str, ...]] = ("block",)
    block: Tensor
    form: Form

    @classmethod
    def of(cls, block: Tensor, form: Form) -> Stored:
        """The operand that lies so in this block."""
        made = cls.__new__(cls)
        made.__dict__.update(block=block, form=form)
        return made

    @property
    def data(self) -> Tensor:
        """(B, H, S, D) in FP8."""
        return Memory(self.block).of(self.form.data)

    @property
    def descale(self) -> Tensor:
        """One for all tokens of a head or a tensor, or (B, H, S, 1), in fp32."""
        return Memory(self.block).of(self.form.descale)

    @property
    def granularity(self) -> Granularity:
        """Which elements share a scale."""
        return self.form.granularity

    @property
    def rotated(self) -> bool:
        """Whether it was."""
        return self.form.rotated

    def pieces(self, memory: Memory | None) -> tuple[Piece, Piece]:
        """Data and descale for a launch; ``memory`` serves if it is that of this block."""
        if memory is None or memory.block is not self.block:
            memory = Memory(self.block)
        return Piece(memory, self.form.data), Piece(memory, self.form.descale)
