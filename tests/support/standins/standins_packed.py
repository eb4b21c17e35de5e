"""Packed sequences for stand-ins: computed one by one, with the checks of the starts from the library's C++."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

STARTS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def checked_starts(arguments: Mapping[str, Any], device: torch.device) -> list[tuple[slice, slice]]:
    """The queries and keys of each sequence."""
    ranges = []
    for side in "qk":
        starts, longest = arguments[f"cu_seqlens_{side}"], arguments[f"max_seqlen_{side}"]
        assert (starts.dtype, starts.ndim, starts.device) == (torch.int32, 1, device)
        assert starts.is_contiguous()
        assert type(longest) is int
        assert longest >= starts.diff().max()
        ranges.append([slice(*pair) for pair in zip(starts.tolist(), starts.tolist()[1:], strict=False)])
    return list(zip(*ranges, strict=True))


def each_sequence(
    alone: Callable[..., tuple[Tensor, Tensor]], tensors: tuple[Tensor, ...], arguments: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """out (Tq, H, Dv) and LSE (H, Tq) of packed q, k, v, from ``alone(number, q, k, v)`` on (1, S, H, D)."""
    q, k, v = tensors
    assert q.ndim == k.ndim == v.ndim == 3
    rows = []
    for number, (queries, keys) in enumerate(checked_starts(arguments, q.device)):
        if queries.start < queries.stop:
            rows.append((queries, *alone(number, q[None, queries], k[None, keys], v[None, keys])))
    # What belongs to no sequence holds what memory held.
    out = torch.full((*q.shape[:2], v.shape[2]), torch.nan, dtype=rows[0][1].dtype if rows else q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan)
    for queries, own, log in rows:
        out[queries], lse[:, queries] = own[0], log[0]
    return out, lse
