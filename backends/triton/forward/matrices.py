"""Tensors (B, H, S, D) as the matrices of rows that TMA loads, and copies of those that are none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...common.layout import padded, rounded_up
from ..launching import KEPT
from .tiles import Tile, chunks_of, padded_size

__all__ = ["Matrix", "Outline", "aligned", "loadable", "matrix", "read_size"]

_VECTOR = 16  # bytes: TMA wants rows and matrices to start at multiples of it
Outline = tuple[Sequence[int], Sequence[int]]  # a tensor's shape and strides


class Matrix(NamedTuple):
    """An operand's memory as the kernel reads it: head h of batch b starts at (b·by_batch + h·by_head, h·aside)."""

    rows: int
    columns: int
    stride: int
    by_batch: int
    by_head: int
    aside: int


def read_size(tile: Tile, head_dim: int) -> int:
    """How many elements of a row of Q or K the kernel of a tile reads; one that casts Q clears the rest."""
    return chunks_of(head_dim).size if tile.hopper else padded_size(head_dim)


def aligned(x: Tensor) -> bool:
    """Whether TMA may read from the tensor's begin."""
    return not x.data_ptr() % _VECTOR


def loadable(x: Tensor, size: int) -> Tensor:
    """x (B, H, S, D), or a copy whose rows are a matrix."""
    if aligned(x) and matrix(x.shape, x.stride(), size, x.element_size()) is not None:
        return x
    whole = padded(x, rounded_up(x.shape[3], _VECTOR // x.element_size()))
    return whole.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=KEPT)
def matrix(shape: Sequence[int], strides: Sequence[int], size: int, itemsize: int) -> Matrix | None:
    """(B, H, S, D) as a matrix of rows: (B · H · S, D), or (B · S, H · D) if heads lie side by side; else None.

    Of a row ``size`` elements are read, of ``itemsize`` bytes each.
    """
    batch, heads, length, width = shape
    if strides[3] != 1:
        return None
    vector = _VECTOR // itemsize
    stride = strides[2] if length > 1 else rounded_up(width, vector)
    if stride % vector:
        return None
    if _steps(shape, strides, heads * length * stride, length * stride, stride) and stride >= width:
        return Matrix(batch * heads * length, width, stride, heads * length, length, 0)
    aside = strides[1] if heads > 1 else width
    # A tile is as wide as the padded size, so what is beside a narrower head would be read as its own.
    beside = width == size and aside >= width and not aside % vector and (heads - 1) * aside + width <= stride
    if beside and _steps(shape, strides, length * stride, aside, stride):
        return Matrix(batch * length, (heads - 1) * aside + width, stride, length, 0, aside)
    return None


def _steps(shape: Sequence[int], strides: Sequence[int], *expected: int) -> bool:
    """Whether the strides of batch, head and token are these, wherever there is more than one."""
    sizes = zip(shape, strides, expected, strict=False)
    return all(size == 1 or stride == step for size, stride, step in sizes)
