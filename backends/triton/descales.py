"""Descales as the kernels read them: in fp32, with strides of 0 where a scale serves a whole axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnbench.errors import InputError

__all__ = ["in_fp32", "steps"]


def in_fp32(descale: Tensor) -> Tensor:
    """In fp32, without a call of torch if it is that already."""
    return descale if descale.dtype == torch.float32 else descale.to(torch.float32)


def steps(shape: Sequence[int], strides: Sequence[int], batch: int, heads: int, length: int) -> tuple[int, int, int]:
    """Strides (batch, head, token) of descales, 0 where one serves a whole axis.

    Raises InputError unless they are (B, heads, S, 1), or 1 for any axis.
    """
    wanted = batch, heads, length, 1
    if len(shape) != 4 or any(size not in (1, most) for size, most in zip(shape, wanted, strict=True)):
        raise InputError(f"descales are {wanted}, or 1 for any axis, not {tuple(shape)}")
    by_batch, by_head, by_token = (0 if size == 1 else step for size, step in zip(shape[:3], strides[:3], strict=True))
    return by_batch, by_head, by_token
