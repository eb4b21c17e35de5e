"""Batches of sequences of unequal length as a check reads them: rows, and which of a row's keys each query sees."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..problem.lengths import Lengths
from ..problem.lengths_kind import LengthsKind
from ..problem.spec import AttentionSpec
from ..problem.visible_keys import VisibleKeys

__all__ = ["Rows", "as_rows", "used"]


class Rows(NamedTuple):
    """q (B, H, Sq, D), k and v with zeros for padding; a packed batch is one row.  The spec has the tensors' sizes."""

    spec: AttentionSpec
    seen: VisibleKeys
    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, spec: AttentionSpec, lengths: Lengths, q: Tensor, k: Tensor, v: Tensor) -> Rows:
        """The rows of a call; reads nothing from the device."""
        seen = VisibleKeys.of(spec.mask, lengths, q.shape[2], k.shape[2], q.device)
        padding = (used(q, seen.used_q), used(k, seen.used_kv), used(v, seen.used_kv))
        return cls(as_rows(spec, q, k), seen, *padding)


def as_rows(spec: AttentionSpec, q: Tensor, k: Tensor) -> AttentionSpec:
    """A spec of unequal lengths with the sizes of its tensors, in which rows may be empty."""
    sizes = {"batch": q.shape[0], "seqlen_q": q.shape[2], "seqlen_kv": k.shape[2]}
    return spec.replace(**sizes, lengths=LengthsKind(batch="padded"))


def used(x: Tensor, which: Tensor | None) -> Tensor:
    """x (B, H, S, D) with zeros for padding, which may hold anything; x itself where ``which`` (B, S) is None."""
    return x.detach() if which is None else x.detach().masked_fill(~which[:, None, :, None], 0.0)
