"""TMA descriptors of memory that differs from call to call, what Triton checks of them being checked once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

__all__ = ["Described", "Shape", "all_of", "flipped", "rows_of"]

Shape = tuple[int, int, int, int]
_ALIGNED = 16  # bytes: what TMA reads begins at multiples of it


class Described:
    """Makes descriptors of tensors of one dtype whose memory is read as one matrix or vector, by blocks of one shape.

    ``make(x, block)`` is Triton's slow way, which checks everything; only the address changes between tensors.
    """

    __slots__ = ("_block", "_known", "_make", "_shape", "_strides")

    def __init__(
        self,
        make: Callable[[Tensor, list[int]], Any],
        shape: Sequence[int],
        block: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> None:
        """``strides``, in elements, are those of a contiguous matrix where they are not given."""
        self._make, self._shape, self._block = make, tuple(shape), list(block)
        self._strides = tuple(strides) if strides is not None else (*shape[1:], 1)
        self._known: tuple[type, dict[str, Any]] | None = None

    def __call__(self, x: Tensor) -> Any:
        """A descriptor of x's memory, whatever its shape; a view would take longer.  Raises as Triton if x is not
        aligned to 16.
        """
        known = self._known
        if known is None or x.data_ptr() % _ALIGNED:
            return self._checked(x)
        kind, others = known
        made: Any = object.__new__(kind)  # a new one each time: another thread may be launching with the last
        made.__dict__.update(others, base=x)
        return made

    def _checked(self, x: Tensor) -> Any:
        made = self._make(x.as_strided(self._shape, self._strides), self._block)
        given = {each.name for each in fields(made) if each.init} if is_dataclass(made) else set()
        held = getattr(made, "__dict__", {})
        # One that holds more than it was given may hold what it made of the address: then none is like another.
        if "base" in given and held.keys() == given:
            self._known = type(made), {name: value for name, value in held.items() if name != "base"}
        return made


def all_of(described: Sequence[Described], tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The descriptor of each tensor."""
    return tuple([make(x) for make, x in zip(described, tensors, strict=True)])


def rows_of(shape: Shape) -> tuple[int, int]:
    """The matrix that a contiguous tensor (B, H, rows, columns) is."""
    batch, heads, rows, columns = shape
    return batch * heads * rows, columns


def flipped(shape: Shape) -> Shape:
    """That of the tensor with its last axes exchanged."""
    batch, heads, rows, columns = shape
    return batch, heads, columns, rows
