"""Layouts that kernels read: rows on multiples of a vector, and head dimensions that a kernel was built for.

Head dimensions are padded with zeros, cut off again afterwards.  That changes no number if the scale is the spec's own
and not derived from the padded size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.problem.spec import AttentionSpec

__all__ = ["aligned", "near", "padded", "rounded_up", "tokens", "whole_gradients"]

_INT32 = 2**31 - 1


def rounded_up(size: int, step: int) -> int:
    """The smallest multiple of ``step`` that is no smaller than ``size``."""
    return -(-size // step) * step


def padded(x: Tensor, size: int) -> Tensor:
    """x (..., D) zero-padded to (..., size), without a copy if it fits.  Raises ValueError if x is larger."""
    missing = size - x.shape[-1]
    if missing < 0:
        raise ValueError(f"a head dimension of {x.shape[-1]} does not fit into {size}")
    if missing == 0:
        return x
    if x.element_size() == 1:  # no padding is defined on float8; zero is the byte 0 in every format
        return F.pad(x.view(torch.uint8), (0, missing)).view(x.dtype)
    return F.pad(x, (0, missing))


def aligned(x: Tensor, vector: int = 16) -> Tensor:
    """x (B, H, S, D) if rows can be read ``vector`` bytes at a time, else a copy laid out (B, S, H, D).

    Kernels load vectors without checking: rows must be contiguous, rows and storage start at multiples of ``vector``.
    """
    step = max(1, vector // x.element_size())
    batch, head, token, last = x.stride()
    if last == 1 and not (batch % step or head % step or token % step or x.data_ptr() % vector):
        return x  # as most are: what follows takes three times as long
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    contiguous = x.stride(-1) == 1 or x.shape[-1] == 1
    if contiguous and not any(stride % step for stride in strides) and x.data_ptr() % vector == 0:
        return x
    return _beside(x)


def near(x: Tensor, *, whole: bool = False) -> Tensor:
    """x (B, H, S, D), or a copy laid out (B, S, H, D) where it reaches over more than 2³¹ - 1 elements of its memory.

    For kernels that count the elements of a batch entry, or of the ``whole`` tensor, in 32 bits.  They refuse tensors
    of that size; a small view of a large memory, such as K within a projection to Q, K and V, would be read wrongly.
    """
    batch, heads, tokens, size = x.shape
    entry, head, token, last = x.stride()
    # Written out, for every call asks: a loop over the axes takes three times as long.
    reach = (heads - 1) * head + (tokens - 1) * token + (size - 1) * last
    if whole:
        reach += (batch - 1) * entry
    return x if reach <= _INT32 else _beside(x)


def _beside(x: Tensor) -> Tensor:
    """A copy laid out (B, S, H, D)."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def tokens(x: Tensor, vector: int = 16) -> Tensor:
    """x (1, H, T, D) of a packed batch as a dense (T, H, D) from an address of ``vector`` bytes on, a view if it is."""
    rows = x.detach()[0].transpose(0, 1)
    if rows.is_contiguous() and rows.data_ptr() % vector == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def whole_gradients(gradients: tuple[Tensor, Tensor, Tensor], spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV (B, H, S, D) of (B, S, H, ·): without padded head dimensions, with zeros for keys cut off.

    Those of a packed batch are (T, H, ·) and become (1, H, T, D).
    """
    if spec.lengths is not None:
        gradients = gradients[0][None], gradients[1][None], gradients[2][None]
    dq, dk, dv = gradients
    unseen = 0 if spec.lengths is not None else spec.seqlen_kv - dk.shape[1]
    if dq.shape[-1] > spec.head_dim or dv.shape[-1] > spec.head_dim_v:
        dq, dk, dv = dq[..., : spec.head_dim], dk[..., : spec.head_dim], dv[..., : spec.head_dim_v]
    if unseen:
        dk, dv = (F.pad(x, (0, 0, 0, 0, 0, unseen)) for x in (dk, dv))
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
