"""The order in which tensor cores hold the keys of P, in which V's keys are laid out for them."""

from __future__ import annotations

from torch import Tensor

__all__ = ["interleaved"]


def interleaved(x: Tensor, *, back: bool = False) -> Tensor:
    """x (..., keys) with each 16 keys in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, or back from it.

    A thread that holds four keys of a row of scores holds 2t, 2t + 1, 2t + 8 and 2t + 9 (PTX ISA, the fragment of D
    of wgmma.m64nNk32), and as an operand 4t to 4t + 3 (that of A).  With V's keys in this order P need not be
    exchanged between threads.
    """
    axes = (4, 2, 2) if back else (2, 4, 2)
    return x.reshape(*x.shape[:-1], -1, *axes).transpose(-3, -2).reshape(x.shape)
