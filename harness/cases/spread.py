"""The shapes of a table: few layers of published models, such that another layer has one of them near it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from attnbench.choosing.similarity import of_one_length
from attnbench.problem.spec import AttentionSpec

from ..sequence_lengths import SequenceLengths
from .case import Case
from .models import drawn_cases

__all__ = ["spread_shapes"]

_DRAWN, _SEED = 1000, 0
# Doublings of the length that differ as much: the group and batch x heads only scale a time that the length shapes.
_HEAD_DIM, _LESS, _OTHER_MASK, _OTHER_DIRECTION, _OTHER_BATCH = 2.0, 0.5, 3.0, 8.0, 2.0
_PADDED = 4  # of so many packed layers one is padded: encoders pad, which the draw of fresh shapes leaves out
_MOST_TOKENS = 131072  # of padded rows, with their padding


@cache
def spread_shapes(count: int, device_type: str) -> tuple[tuple[AttentionSpec, SequenceLengths | None], ...]:
    """``count`` shapes that represent the layers of published models on a type of device (cuda, cpu), best ones first.

    Some have packed sequences, a few padded rows.  Of many random draws each next one is that which shortens the mean
    distance from a draw to the nearest chosen one most (a greedy k-median), so the first ones are a good choice of
    fewer.
    """
    drawn = _some_padded(drawn_cases(_DRAWN, _SEED, device_type, packed=True))
    places = np.array([_place(case.spec) for case in drawn])
    apart = np.abs(places[:, None] - places[None]).sum(axis=2)
    nearest, chosen = np.full(len(drawn), apart.max()), list[int]()
    for _ in range(count):
        mean = np.minimum(apart, nearest).mean(axis=1)
        mean[chosen] = np.inf
        chosen.append(int(mean.argmin()))
        nearest = np.minimum(nearest, apart[chosen[-1]])
    return tuple((drawn[each].spec, drawn[each].lengths) for each in chosen)


def _some_padded(cases: Sequence[Case]) -> list[Case]:
    """The cases, every fourth packed one with the same sequences in padded rows."""
    found, packed = list[Case](), 0
    for case in cases:
        packed += case.lengths is not None
        if (
            case.lengths is not None
            and packed % _PADDED == 0
            and len(case.lengths.q) * max(case.lengths.q) <= _MOST_TOKENS
        ):
            lengths = case.lengths.model_copy(update={"layout": "padded"})
            case = Case(case.name, case.spec.replace(lengths=None).replace(**lengths.sizes()), case.families, lengths)
        found.append(case)
    return found


def _place(spec: AttentionSpec) -> tuple[float, ...]:
    batch = _OTHER_BATCH * (spec.lengths is not None)
    spec = of_one_length(spec)
    window = 0 if spec.mask.left is None else math.log2(spec.seqlen_kv / (spec.mask.left + 1))
    return (
        math.log2(spec.seqlen_q),
        _LESS * math.log2(spec.batch * spec.heads),
        _LESS * math.log2(spec.group),
        _HEAD_DIM * math.log2(spec.head_dim),
        _HEAD_DIM * math.log2(spec.head_dim_v),
        _OTHER_MASK * (spec.mask.kind != "none"),
        _LESS * window,
        float(spec.softcap > 0),
        _OTHER_DIRECTION * spec.training,
        batch,
    )
