"""The shapes of a table: few layers of published models, such that another layer has one of them near it."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from attnbench.problem.spec import AttentionSpec

from .models import drawn_cases

__all__ = ["spread_specs"]

_DRAWN, _SEED = 1000, 0
# Doublings of the length that differ as much: the group and batch x heads only scale a time that the length shapes.
_HEAD_DIM, _LESS, _OTHER_MASK, _OTHER_DIRECTION = 2.0, 0.5, 3.0, 8.0


@cache
def spread_specs(count: int, device_type: str) -> tuple[AttentionSpec, ...]:
    """``count`` specs that represent the layers of published models on a type of device (cuda, cpu), best ones first.

    Of many random draws each next spec is the one that shortens the mean distance from a draw to the nearest chosen
    spec most (a greedy k-median), so the first ones are a good choice of fewer.
    """
    drawn = [case.spec for case in drawn_cases(_DRAWN, _SEED, device_type)]
    places = np.array([_place(spec) for spec in drawn])
    apart = np.abs(places[:, None] - places[None]).sum(axis=2)
    nearest, chosen = np.full(_DRAWN, apart.max()), list[int]()
    for _ in range(count):
        mean = np.minimum(apart, nearest).mean(axis=1)
        mean[chosen] = np.inf
        chosen.append(int(mean.argmin()))
        nearest = np.minimum(nearest, apart[chosen[-1]])
    return tuple(drawn[each] for each in chosen)


def _place(spec: AttentionSpec) -> tuple[float, ...]:
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
    )
