"""What packed and padded sequences cost beside the other layouts of the same sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attnbench.problem.spec import AttentionSpec

from ..formatting import number
from ..results.records import Measurement
from ..sequence_lengths import BatchLayout, SequenceLengths
from .sentences import fastest

__all__ = ["Key", "alternatives", "key_of", "sequences_key"]

Key = tuple[AttentionSpec, SequenceLengths | None]
_DESCRIPTIONS: dict[BatchLayout, str] = {
    "packed": "packed",
    "padded": "in padded rows with lengths",
    "left-padded": "in left-padded rows with lengths",
    "dense": "in rows whose padding is computed like tokens",
    "equal": "as many tokens in sequences of one length",
}


def key_of(row: Measurement) -> Key:
    """What the rows of one case have in common."""
    return row.spec, row.lengths


def alternatives(rows: Iterable[Measurement]) -> Mapping[Key, str]:
    """A sentence for each packed or padded case: its fastest plan's time and that of each other layout of the same
    sequences, by that one's fastest plan.

    Plans are those within their bounds; a case that has none is left out.
    """
    cases: dict[Key, list[Measurement]] = {}
    for row in rows:
        if row.lengths is not None:
            cases.setdefault(key_of(row), []).append(row)
    same: dict[tuple[object, ...], dict[BatchLayout, Measurement]] = {}
    for (spec, lengths), own in cases.items():
        assert lengths is not None, "kept above"
        if best := fastest(own):
            same.setdefault(sequences_key(spec, lengths), {})[lengths.layout] = best[0]
    sentences = {}
    for layouts in same.values():
        for layout, own_best in layouts.items():
            others = [
                _beside(own_best, layouts[other], other)
                for other in _DESCRIPTIONS
                if other in layouts and other != layout
            ]
            if others and layout not in ("dense", "equal"):
                sentences[key_of(own_best)] = f"Beside it, in times its call: {', '.join(others)}."
    return sentences


def _beside(best: Measurement, other: Measurement, layout: BatchLayout) -> str:
    times = number(other.median_ms() / best.median_ms())
    return f"{_DESCRIPTIONS[layout]} {times} ({number(other.median_ms())} ms, {other.plan})"


def sequences_key(spec: AttentionSpec, lengths: SequenceLengths) -> tuple[object, ...]:
    """What is the same in every layout of some sequences."""
    mask = spec.mask.left, spec.mask.right
    heads = spec.heads, spec.kv_heads, spec.head_dim, spec.head_dim_v
    return lengths.q, lengths.kv, heads, mask, spec.dtype, spec.softcap, spec.scale, spec.direction
