"""One allocation for all that a call writes, because each takes as long on the host as a launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.layout import rounded_up

__all__ = ["Block", "Part", "Wanted"]

_APART = 256  # bytes: what one part begins at multiples of, as torch's own allocations do at 512


class Wanted(NamedTuple):
    """A contiguous tensor, of whose last axis only ``width`` elements are read; with ``zeros`` it is zero at first."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    zeros: bool = False
    width: int | None = None


class Part(NamedTuple):
    """A tensor's place in a block: ``begin`` is its first byte."""

    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, memory: Tensor) -> Tensor:
        """The tensor, a view of the block's memory."""
        return memory.view(self.dtype).as_strided(self.shape, self.strides, self.begin // self.dtype.itemsize)


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

    def memory(self, device: torch.device) -> Tensor:
        """New memory for them all."""
        made = torch.empty(self.size, dtype=torch.uint8, device=device)
        if self._zeroed:
            made[: self._zeroed].zero_()
        return made


def _part(begin: int, wanted: Wanted) -> Part:
    strides = [1] * len(wanted.shape)
    for axis in range(len(strides) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * wanted.shape[axis]
    shape = wanted.shape if wanted.width is None else (*wanted.shape[:-1], wanted.width)
    return Part(begin, shape, tuple(strides), wanted.dtype)
