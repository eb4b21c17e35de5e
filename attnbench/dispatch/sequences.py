"""Batches of sequences of unequal length: as kernels take their tensors, as specs count them, and nested ones."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import InputError
from ..problem.lengths import Lengths
from ..problem.lengths_kind import LengthsKind, packed_sizes

__all__ = ["Jagged", "packed_views", "sizes_of"]


def packed_views(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(1, H, T, D) views of packed (T, H, D).  Raises InputError for another rank, or no tokens."""
    for name, x in zip("qkv", (q, k, v), strict=True):
        if x.ndim != 3:
            raise InputError(f"{name} must have 3 dimensions (t, h, d), got shape {tuple(x.shape)}")
        if not x.shape[0]:
            raise InputError(f"{name} must hold at least one token, got shape {tuple(x.shape)}")
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def sizes_of(lengths: Lengths, batch: int, tokens_q: int, tokens_kv: int) -> dict[str, Any]:
    """The sizes of a spec: those of the tensors for padded rows, counts in buckets for a packed batch."""
    if lengths.batch != "packed":
        kind = LengthsKind(batch=lengths.batch, square=lengths.square)
        return {"batch": batch, "seqlen_q": tokens_q, "seqlen_kv": tokens_kv, "lengths": kind}
    assert lengths.q is not None, "a packed batch has cumulative lengths"
    sequences = lengths.q.shape[0] - 1
    return packed_sizes(sequences, lengths.longest_q, lengths.longest_kv, tokens_q, tokens_kv, lengths.square)


_starts: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()  # the offsets of nested tensors in int32


class Jagged:
    """q, k, v as torch's jagged nested tensors, (B, H, j, D) or (B, j, H, D) by ``layout``, without copies.

    ``arguments`` are the packed tensors and lengths as ``attention`` takes them.  Raises InputError for nested tensors
    of another kind, tensors of which only some are nested, and k and v of different lengths.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, layout: str) -> None:
        if layout not in ("bhsd", "bshd"):
            raise InputError(f'nested tensors have the layout "bhsd" or "bshd", not {layout!r}')
        self._swapped = layout == "bhsd"
        self._offsets, values, starts, longest = [], [], [], []
        for name, x in zip("qkv", (q, k, v), strict=True):
            if not x.is_nested or x.layout != torch.jagged or x.ndim != 4:
                raise InputError(
                    f"q, k and v must all be nested tensors of jagged layout and 4 dimensions, {name} is not"
                )
            own: Any = x.transpose(1, 2) if self._swapped else x
            if own._ragged_idx != 1 or own.lengths() is not None:
                raise InputError(f"{name} must be jagged along its tokens and without holes")
            self._offsets.append(own.offsets())
            values.append(own.values())
            starts.append(_int32(own.offsets()))
            longest.append(own._maybe_max_seqlen)
        if starts[2] is not starts[1]:
            raise InputError("k and v must have the same offsets; make v with k.offsets()")
        self.arguments: dict[str, Any] = {
            **dict(zip("qkv", values, strict=True)), "layout": "thd", "cu_seqlens_q": starts[0],
            "cu_seqlens_kv": starts[1], "max_seqlen_q": longest[0], "max_seqlen_kv": longest[1],
        }  # fmt: skip

    def nested(self, out: Tensor) -> Tensor:
        """Out (T, H, Dv) as a nested tensor like q."""
        found: Tensor = nested_tensor_from_jagged(out, self._offsets[0])
        return found.transpose(1, 2) if self._swapped else found

    def nested_lse(self, lse: Tensor) -> Tensor:
        """The log-sum-exp (H, T) as a nested tensor (B, H, j), or (B, j, H) for the layout ``bshd``."""
        found: Tensor = nested_tensor_from_jagged(lse.mT, self._offsets[0])
        return found.transpose(1, 2) if self._swapped else found


def _int32(offsets: Tensor) -> Tensor:
    """The offsets in int32, the same tensor at every call; offsets are never changed in place."""
    found = _starts.get(offsets)
    if found is None:
        found = _starts[offsets] = offsets.to(torch.int32)
    return found
