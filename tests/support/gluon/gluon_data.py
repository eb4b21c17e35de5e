"""The data types of Gluon's kernels on a CPU: blocks, pointers, descriptors and shared memory, as torch tensors.

Unwritten shared memory is NaN.  What a partition writes to it is visible to products and TMA only after its fence, to
the threads of other partitions also after it arrives at a barrier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# Of the thread that runs a partition: its program and place in the grid, its matrix products under way, what it wrote
# to shared memory since its last fence, its groups of additions to global memory that are under way, and where in
# shared memory it loaded what it had stored, or additions read: no barrier tells others when they may write there.
STATE = threading.local()
_ADDING = threading.Lock()


class Block:
    """A tensor in registers, or a scalar."""

    def __init__(self, data: Any) -> None:
        self.data = data if isinstance(data, Tensor) else torch.tensor(data)
        if self.data.dtype == torch.float64:
            self.data = self.data.float()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Block:
        return Block(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def reshape(self, *shape: Any) -> Block:
        return Block(self.data.reshape(*shape))

    def permute(self, *order: int) -> Block:
        return Block(self.data.permute(*order))

    def __getitem__(self, place: Any) -> Block:
        return Block(self.data[place])

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)


def data_of(x: Any) -> Tensor:
    """The tensor of a block or of a Python number."""
    return x.data if isinstance(x, Block) else torch.tensor(x)


def _elementwise(name: str, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
    setattr(Block, f"__{name}__", lambda x, y: Block(operation(x.data, data_of(y))))
    setattr(Block, f"__r{name}__", lambda x, y: Block(operation(data_of(y), x.data)))


def _compared(name: str, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
    setattr(Block, f"__{name}__", lambda x, y: Block(operation(x.data, data_of(y))))


for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "rshift"):
    _elementwise(_name, getattr(torch.Tensor, f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _compared(_name, getattr(torch, _name))
# As in C, and so in Triton: towards zero.
_elementwise("floordiv", lambda x, y: torch.div(x, y, rounding_mode="trunc"))
_elementwise("mod", torch.fmod)


class Pointer:
    """An offset in a tensor in global memory, or a block of offsets."""

    def __init__(self, memory: Tensor, place: Any = 0) -> None:
        self.memory, self.place = memory, place
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, Block(data_of(self.place) + data_of(more)))


class Descriptor:
    """A TMA descriptor: blocks of a contiguous tensor; reads outside give zeros and additions outside are ignored."""

    def __init__(self, memory: Tensor, block: Sequence[int]) -> None:
        self.memory, self.dtype, self.layout = memory, memory.dtype, None
        self.block_type = SimpleNamespace(shape=tuple(block), nbytes=memory.element_size() * torch.Size(block).numel())

    @property
    def handle(self) -> Descriptor:
        return self

    def read(self, place: Sequence[int]) -> Tensor:
        found = torch.zeros(self.block_type.shape, dtype=self.dtype)
        memory, block = self._inside(place)
        found[block] = self.memory[memory]
        return found

    def add(self, place: Sequence[int], block: Tensor) -> None:
        """Adds as the L2 does: the sum is rounded to the tensor's dtype."""
        assert (tuple(block.shape), block.dtype) == (self.block_type.shape, self.dtype)
        memory, inside = self._inside(place)
        with _ADDING:
            self.memory[memory] = (self.memory[memory].double() + block[inside].double()).to(self.dtype)

    def _inside(self, place: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Of the tensor and of the block at ``place``: what they share, which may be nothing."""
        ranges = [
            (max(0, start), max(0, start, min(length, start + size)), start)
            for start, size, length in zip(place, self.block_type.shape, self.memory.shape, strict=True)
        ]
        return tuple(slice(a, b) for a, b, _ in ranges), tuple(slice(a - start, b - start) for a, b, start in ranges)


@dataclass
class _Stored:
    """What was stored in shared memory and has no fence behind it; ``loaded``: by threads that see it without one."""

    memory: Tensor
    data: Tensor
    loaded: bool = False


class Shared:
    """Shared memory; elements that were not written are NaN."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.shape, self.dtype, self.layout = data, tuple(data.shape), data.dtype, None

    @classmethod
    def allocate(cls, dtype: torch.dtype, shape: Sequence[int]) -> Shared:
        size = torch.Size(shape).numel() * dtype.itemsize
        nothing = 0x7F if dtype.itemsize == 1 else 0xFF  # NaN in e4m3, and in every longer type
        return cls(torch.full((size,), nothing, dtype=torch.uint8).view(dtype).view(*shape))

    @property
    def handle(self) -> Shared:
        return self

    @property
    def addresses(self) -> tuple[int, int]:
        begin = self.data.data_ptr()
        return begin, begin + self.data.nbytes

    def index(self, place: Any) -> Shared:
        assert 0 <= int(place) < self.shape[0]
        return Shared(self.data[int(place)])

    def slice(self, start: int, length: int, dim: int) -> Shared:
        assert 0 <= start <= start + length <= self.shape[dim]
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order))

    def load(self, layout: Any) -> Block:
        own = STATE.stores.get(self._place)
        if own is not None:
            STATE.own.add(self.addresses)
        with STATE.program.changed:  # a fence moves what was released into memory
            stored = own or STATE.program.released.get(self._place)
            found = self.data if stored is None else stored.data
            if stored is not None:
                stored.loaded = True
            return Block(found.clone())

    def store(self, x: Block) -> None:
        assert self.shape == x.shape
        STATE.stores[self._place] = _Stored(self.data, x.data)

    @property
    def _place(self) -> tuple[int, tuple[int, ...]]:
        return self.data.data_ptr(), self.shape

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        size = torch.Size(shape).numel() * dtype.itemsize
        return Shared(self.data.view(torch.uint8).flatten()[:size].view(dtype).view(*shape))


def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Block:
    place = data_of(pointer.place)
    if mask is not None and not bool(data_of(mask)):  # of one number
        return Block(torch.tensor(other, dtype=pointer.memory.dtype))
    assert bool(((place >= 0) & (place < pointer.memory.numel())).all()), "a load outside of its tensor"
    return Block(pointer.memory[place])


def store(pointer: Pointer, x: Any, mask: Any = True) -> None:
    place, data, inside = torch.broadcast_tensors(data_of(pointer.place), data_of(x), data_of(mask))
    place = place[inside]
    assert bool(((place >= 0) & (place < pointer.memory.numel())).all()), "a store outside of its tensor"
    pointer.memory[place] = data[inside].to(pointer.memory.dtype)


def atomic_add(pointer: Pointer, x: int) -> Block:
    """The number's value before the addition."""
    with _ADDING:
        before = Block(load(pointer).data.clone())
        store(pointer, before + x)
        return before


def fence() -> None:
    with STATE.program.changed:
        for place, stored in STATE.stores.items():
            stored.memory.copy_(stored.data)
            STATE.program.released.pop(place, None)
    STATE.stores.clear()
