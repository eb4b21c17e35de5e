"""Which memory needs of a plan have grown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..formatting import size
from ..results.records import Measurement

__all__ = ["MemoryChange", "memory_growth", "memory_sentence"]

_NOTHING = 2**20  # bytes: allocators round, and a MiB more makes no difference


@dataclass(frozen=True)
class MemoryChange:
    """Bytes of device memory before and after: the ``peak`` of a call, or those ``held`` for a backward."""

    kind: Literal["peak", "held"]
    before: int
    after: int


def memory_growth(before: Measurement, after: Measurement, rise: float) -> Iterator[MemoryChange]:
    """What has grown by more than ``rise`` (0.1 is 10 %).

    The same code needs the same memory: of 756 rows in two committed sets none differs by more than 1.6 %.
    """
    for change in (
        _change("peak", before.performance.memory_bytes, after.performance.memory_bytes),
        _change("held", before.performance.retained_bytes, after.performance.retained_bytes),
    ):
        if change is not None and change.after - change.before > _NOTHING + rise * change.before:
            yield change


def _change(kind: Literal["peak", "held"], before: int | None, after: int | None) -> MemoryChange | None:
    return None if before is None or after is None else MemoryChange(kind, before, after)


def memory_sentence(change: MemoryChange) -> str:
    """The change as a sentence."""
    what = "its call takes" if change.kind == "peak" else "its result holds"
    return f"{what} {size(change.after)} of memory, it was {size(change.before)}"
