"""The keys that each query sees where sequences have lengths of their own; nothing is read from the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .lengths import Lengths
from .mask import Mask

__all__ = ["VisibleKeys"]


class VisibleKeys(NamedTuple):
    """``first`` (B, Sq) and ``stop``: the first key that a query sees and one past the last, not above where it sees
    none.  ``used_q`` (B, Sq) and ``used_kv`` (B, Skv): what belongs to a sequence; None for all.
    """

    first: Tensor
    stop: Tensor
    used_q: Tensor | None
    used_kv: Tensor | None

    @classmethod
    def of(cls, mask: Mask, lengths: Lengths, queries: int, keys: int, device: torch.device) -> VisibleKeys:
        """Of q (B, H, Sq, D) and k (B, Hkv, Skv, D), by Sq and Skv; B is 1 for a packed batch.

        Tokens behind the last sequence of a packed batch see none.
        """
        token = torch.arange(queries, dtype=torch.int32, device=device)
        if lengths.batch == "packed":
            starts_q, starts_kv = lengths.starts
            own = torch.bucketize(token, starts_q[1:].contiguous(), right=True).clamp_max(starts_q.shape[0] - 2)
            begin_q, end_q, begin_kv, end_kv = (
                x[None] for x in (starts_q[own], starts_q[own + 1], starts_kv[own], starts_kv[own + 1])
            )
            used_kv = None
        else:
            begin_q, end_q = _rows(lengths, lengths.q, queries, token)
            begin_kv, end_kv = _rows(lengths, lengths.kv, keys, token)
            key = torch.arange(keys, dtype=torch.int32, device=device)
            used_kv = (key >= begin_kv) & (key < end_kv)
        place = begin_kv + token - begin_q
        if mask.alignment == "bottom-right":
            place = place + (end_kv - begin_kv) - (end_q - begin_q)
        used = (token >= begin_q) & (token < end_q)
        first = begin_kv if mask.left is None else torch.maximum(begin_kv, place - mask.left)
        stop = end_kv if mask.right is None else torch.minimum(end_kv, place + mask.right + 1)
        stop = torch.where(used, stop, 0)
        first = first.expand(stop.shape)
        return cls(first, stop, None if used_kv is None else used, used_kv)

    @staticmethod
    def outside(keys: Tensor, first: Tensor, stop: Tensor) -> Tensor:
        """Which ``keys`` (..., keys) lie outside ``first`` to ``stop`` (..., rows, 1): (..., rows, keys).

        Both sides count, whatever the mask; ``Mask.outside`` compares those alone that it limits.
        """
        return (keys < first).logical_or_(keys >= stop)


def _rows(lengths: Lengths, side: Tensor | None, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Where the used tokens of each row begin and end, (B, 1); (1, 1) where all are used."""
    counts = like.new_full((1, 1), size) if side is None else side[:, None]
    if lengths.batch == "left-padded":
        return size - counts, torch.full_like(counts, size)
    return torch.zeros_like(counts), counts
