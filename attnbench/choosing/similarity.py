"""Which measured specs are evidence for another spec: classes of specs, and distances within a class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple, TypeVar

from ..kernels.plan import Plan
from ..problem.lengths_kind import Batch
from ..problem.spec import AttentionSpec, Direction, Granularity

__all__ = ["SpecClass", "class_of", "distance", "of_batch", "of_one_length", "series", "sizes"]

_T = TypeVar("_T")


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
    batch: Batch | None = None

    @property
    def kind(self) -> tuple[Direction, str, Granularity | None]:
        """What no evidence crosses: neither times nor errors of one kind say anything about another."""
        return self.direction, self.dtype, self.descale

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
            self.batch or "",
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
        batch=None if spec.lengths is None else spec.lengths.batch,
    )


def of_batch(entries: Mapping[tuple[object, ...], list[_T]], plan: Plan, spec: AttentionSpec) -> list[_T]:
    """What is evidence for a spec: of sequences of one length, and where it has others of such batches too.

    Those never speak for one length: most of their tokens see fewer keys than the longest, and how full padded rows
    were is not known.  ``entries`` are by plan, kind and batch (``series``).
    """
    own = entries.get(series(plan, spec), [])
    return own if spec.lengths is None else entries.get(series(plan, spec.replace(lengths=None)), []) + own


def series(plan: Plan, spec: AttentionSpec) -> tuple[object, ...]:
    """The key of a plan's entries that one fit may take together: plan, kind and batch."""
    return plan, *class_of(spec).kind, class_of(spec).batch


def sizes(spec: AttentionSpec) -> tuple[int, int, int, int]:
    """The sizes that differ within a class: batch × heads, queries, keys and group; those of ``of_one_length``."""
    if spec.lengths is not None:
        spec = of_one_length(spec)
    return spec.batch * spec.heads, spec.seqlen_q, spec.seqlen_kv, spec.group


def distance(one: AttentionSpec, other: AttentionSpec) -> float:
    """Sum of the doublings between two specs in batch × heads, queries, keys and group."""
    return sum(abs(math.log2(a / b)) for a, b in zip(sizes(one), sizes(other), strict=True))


@lru_cache(maxsize=4096)
def of_one_length(spec: AttentionSpec) -> AttentionSpec:
    """The spec of sequences of one length with about as many tokens and as much work: ``LengthsKind.typical`` ones.

    Of padded rows, whose lengths are not known, that is all of each.
    """
    lengths, longest = spec.lengths, spec.replace(lengths=None)
    if lengths is None or lengths.total_q is None:
        return longest
    queries, keys = (max(1, round(each)) for each in spec.typical_lengths)
    return longest.replace(batch=max(1, round(lengths.total_q / queries)), seqlen_q=queries, seqlen_kv=keys)
