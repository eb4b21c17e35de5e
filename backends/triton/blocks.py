"""One allocation for all that a call writes, because each takes as long on the host as a launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.layout import rounded_up

__all__ = ["Block", "Memory", "Part", "Piece", "Wanted", "tensor_of"]

_APART = 256  # bytes: what one part begins at multiples of, as torch's own allocations do at 512


class Wanted(NamedTuple):
    """A contiguous tensor, of whose last axis only ``width`` elements are read; with ``zeros`` it is zero at first."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    zeros: bool = False
    width: int | None = None


class Part(NamedTuple):
    """A tensor's place in a block: ``begin`` in bytes, ``place`` in elements."""

    begin: int
    place: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Memory:
    """What a block was given: the ``block`` in bytes, its ``address``, and views of it."""

    __slots__ = ("address", "block")

    def __init__(self, block: Tensor) -> None:
        self.block, self.address = block, block.data_ptr()

    def of(self, part: Part) -> Tensor:
        """The tensor at this place."""
        return self.block.view(part.dtype).as_strided(part.shape, part.strides, part.place)


class Piece:
    """A part of a block where a kernel wants a tensor: its tensor is made only where an address does not do."""

    __slots__ = ("_memory", "_part", "address")

    def __init__(self, memory: Memory, part: Part) -> None:
        self._memory, self._part, self.address = memory, part, memory.address + part.begin

    @property
    def shape(self) -> tuple[int, ...]:
        """As a tensor's."""
        return self._part.shape

    @property
    def dtype(self) -> torch.dtype:
        """As a tensor's."""
        return self._part.dtype

    def stride(self) -> tuple[int, ...]:
        """As a tensor's."""
        return self._part.strides

    def data_ptr(self) -> int:
        """As a tensor's."""
        return self.address

    @property
    def device(self) -> torch.device:
        """As a tensor's."""
        return self._memory.block.device

    def tensor(self) -> Tensor:
        """The tensor."""
        return self._memory.of(self._part)


def tensor_of(x: Tensor | Piece | None) -> Tensor | None:
    """The tensor itself."""
    return x.tensor() if isinstance(x, Piece) else x


class Block:
    """Where the tensors of a call lie: ``parts`` in the order in which they were wanted, None for None."""

    def __init__(self, wanted: Sequence[Wanted | None]) -> None:
        parts: list[Part | None] = [None] * len(wanted)
        self.size = self._zeroed = 0
        for zeros in (True, False):  # those together, for one launch
            for place, each in enumerate(wanted):
                if each is not None and each.zeros is zeros:
                    parts[place] = _part(self.size, each)
                    self.size += rounded_up(math.prod(each.shape) * each.dtype.itemsize, _APART)
            if zeros:
                self._zeroed = self.size
        self.parts = tuple(parts)

    def memory(self, device: torch.device) -> Memory:
        """New memory for them all."""
        made = torch.empty(self.size, dtype=torch.uint8, device=device)
        if self._zeroed:
            made[: self._zeroed].zero_()
        return Memory(made)


def _part(begin: int, wanted: Wanted) -> Part:
    strides = [1] * len(wanted.shape)
    for axis in range(len(strides) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * wanted.shape[axis]
    shape = wanted.shape if wanted.width is None else (*wanted.shape[:-1], wanted.width)
    return Part(begin, begin // wanted.dtype.itemsize, shape, tuple(strides), wanted.dtype)
