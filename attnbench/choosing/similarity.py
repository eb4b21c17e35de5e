"""Which measured specs are evidence for another spec: classes of specs, and distances within a class."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from ..problem.spec import AttentionSpec, Direction, Granularity

__all__ = ["SpecClass", "apart", "class_of", "distance", "sizes"]

_OTHER_MASK, _OTHER_KIND = 0.7, 0.05  # doublings of the head dimension that differ as much; a kind hardly matters


class SpecClass(NamedTuple):
    """What must be equal for one spec's time and error to be evidence for another's: all but the sizes."""

    head_dim: int
    head_dim_v: int
    mask: str
    grouped: bool
    dtype: str
    descale: Granularity | None
    direction: Direction
    softcap: float
    scale: float
    has_empty_rows: bool

    def __str__(self) -> str:
        sizes = (
            f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}-dv{self.head_dim_v}",
            self.dtype if self.descale is None else f"{self.dtype}-{self.descale}",
        )
        kinds = (
            "" if self.mask == "none" else self.mask,
            "grouped" if self.grouped else "",
            f"cap{self.softcap!r}" if self.softcap else "",
            f"scale{self.scale!r}" if self.scale != self.head_dim**-0.5 else "",
            "with empty rows" if self.has_empty_rows else "",
        )
        return " ".join(filter(None, (*sizes, *kinds, self.direction)))


@lru_cache(maxsize=4096)
def class_of(spec: AttentionSpec) -> SpecClass:
    """The class of a spec."""
    return SpecClass(
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        mask=spec.mask.kind,
        grouped=spec.group > 1,
        dtype=spec.dtype,
        descale=spec.descale,
        direction=spec.direction,
        softcap=spec.softcap,
        scale=spec.scale,
        has_empty_rows=spec.has_empty_rows,
    )


def apart(one: SpecClass, other: SpecClass) -> float:
    """How much two classes of one direction and type differ in what errors depend on: doublings of the head dimension.

    The recipe and the mask count; grouping, softcap and scale hardly do.
    """
    pairs = ((one.head_dim, other.head_dim), (one.head_dim_v, other.head_dim_v))
    dims = sum(abs(math.log2(a / b)) for a, b in pairs) / 2
    kinds = (one.grouped, one.softcap, one.scale, one.has_empty_rows), (
        other.grouped, other.softcap, other.scale, other.has_empty_rows,
    )  # fmt: skip
    differing = sum(a != b for a, b in zip(*kinds, strict=True))
    return dims + _OTHER_MASK * (one.mask != other.mask) + _OTHER_KIND * differing


def sizes(spec: AttentionSpec) -> tuple[int, int, int, int]:
    """The sizes that differ within a class: batch × heads, queries, keys and group."""
    return spec.batch * spec.heads, spec.seqlen_q, spec.seqlen_kv, spec.group


def distance(one: AttentionSpec, other: AttentionSpec) -> float:
    """Sum of the doublings between two specs in batch × heads, queries, keys and group."""
    return sum(abs(math.log2(a / b)) for a, b in zip(sizes(one), sizes(other), strict=True))
