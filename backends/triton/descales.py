"""Descales as the kernels read them: in fp32, with strides of 0 where a scale serves a whole axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from attnbench.errors import InputError

from .blocks import Piece, tensor_of

__all__ = ["in_fp32", "of_every_token", "steps"]

_Memory = TypeVar("_Memory", Tensor, "Tensor | Piece")


def in_fp32(descale: _Memory) -> _Memory:
    """In fp32, without a call of torch if it is that already."""
    if descale.dtype == torch.float32 or not isinstance(descale, Tensor):
        return descale
    return descale.to(torch.float32)


def of_every_token(descale: Tensor | Piece, length: int) -> Tensor | Piece:
    """(B, H, length, 1), contiguous."""
    if tuple(descale.shape[2:]) == (length, 1) and isinstance(descale, Piece):
        return descale
    whole = tensor_of(descale)
    assert whole is not None, "there is one"
    return whole.expand(-1, -1, length, -1).contiguous()


def steps(shape: Sequence[int], strides: Sequence[int], batch: int, heads: int, length: int) -> tuple[int, int, int]:
    """Strides (batch, head, token) of descales, 0 where one serves a whole axis.

    Raises InputError unless they are (B, heads, S, 1), or 1 for any axis.
    """
    wanted = batch, heads, length, 1
    if len(shape) != 4 or any(size not in (1, most) for size, most in zip(shape, wanted, strict=True)):
        raise InputError(f"descales are {wanted}, or 1 for any axis, not {tuple(shape)}")
    by_batch, by_head, by_token = (0 if size == 1 else step for size, step in zip(shape[:3], strides[:3], strict=True))
    return by_batch, by_head, by_token
