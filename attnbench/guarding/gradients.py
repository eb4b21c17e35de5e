"""Exact gradients of some queries and keys of several head groups, and the pieces they are computed in.

Groups lie in the first axis.  On a GPU a check costs what launching its operators costs, so operators are few and
large: only tensors as large as the scores are computed in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from ..problem.exact import probabilities, product, score_gradients
from ..problem.spec import FP8_DTYPES, AttentionSpec

__all__ = ["Hide", "Piece", "key_gradients", "query_gradients", "reach", "stretches", "together", "wide_dtype"]

Hide = Callable[[Tensor, Tensor, Tensor], Tensor | None]
# Scores (or keys and values) alive at once, about three such tensors at a time: what is small is paid for in launches.
_SCORES = {"cpu": 2**21, "cuda": 2**25}


@dataclass(frozen=True)
class Piece:
    """Queries ``begin`` to ``end`` of a group, counted head after head, and the ``first`` to ``last`` key they see."""

    begin: int
    end: int
    first: int
    last: int


def wide_dtype(spec: AttentionSpec, device: torch.device) -> torch.dtype:
    """The dtype of a check's arithmetic.

    On a GPU, tensors of 16 and 8 bits are checked in FP32, which moves half of FP64's bytes and holds their products
    exactly, in TF32 too; only P is rounded, in TF32 by 3e-4.
    """
    narrow = spec.dtype in ("bf16", "fp16", *FP8_DTYPES)
    return torch.float32 if device.type == "cuda" and narrow else torch.float64


def together(spec: AttentionSpec, device: torch.device) -> int:
    """How many heads' keys and values fit into memory at once."""
    return max(1, _SCORES[device.type] // (spec.seqlen_kv * (spec.head_dim + spec.head_dim_v)))


def stretches(groups: int, spec: AttentionSpec, device: torch.device) -> list[list[Piece]]:
    """All queries of so many groups: stretches (q, dO and out in memory; whole heads or rows of one) of pieces
    (scores).
    """
    most, length = _SCORES[device.type] // groups, spec.seqlen_q
    rows = max(1, most // 2 // (spec.head_dim + 2 * spec.head_dim_v))
    size, whole = max(1, rows // length) * length, spec.group * length
    return [
        [Piece(*piece, *_reach(*piece, spec)) for piece in _ranges(*stretch, max(1, most // spec.seqlen_kv))]
        for begin in range(0, whole, size)
        for stretch in _ranges(begin, min(begin + size, whole), rows)
    ]


def reach(spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """From the first key of any of the spans to the last; one key, which is hidden, if they are empty."""
    first, last = min(start for start, _ in spans), max(stop for _, stop in spans)
    return (first, last) if first < last else (0, 1)


def query_gradients(
    q: Tensor, grad_out: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """dq (G, queries, D), and the length of each without cancellation (G, queries), in FP64."""
    p = probabilities(q, k, hidden, spec)
    dp = product(grad_out, v.mT, spec.scale)
    terms, lengths = _terms(q, k, p, dp, (p * dp).sum(-1, keepdim=True), spec)
    lengths.mul_(torch.linalg.vector_norm(k, dim=-1).unsqueeze(-2))
    return terms.bmm(k), torch.linalg.vector_norm(lengths, dim=-1, dtype=torch.float64)


def key_gradients(
    q: Tensor, grad_out: Callable[[int, int], Tensor], k: Tensor, v: Tensor, keys: Tensor, picked: Tensor,
    nearest: Sequence[Tensor], parts: Sequence[Sequence[Piece]], edges: tuple[Tensor, Tensor], hide: Hide,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dk (G, picked, D), dv (G, picked, Dv) and the length of each dk without cancellation (G, picked), in FP64.

    ``picked`` (G, picked) are indices into ``keys``; q (G, queries, D) holds the group's heads one after the other, in
    any type, and ``grad_out(begin, end)`` returns (G, ..., Dv).  ``nearest`` has, for each piece of ``parts``, the
    place of each picked key (G, 1, picked) within the piece; any place if it is not there.  ``edges`` are the first
    key of each query and one past the last, ((G,) queries, 1), and ``hide`` compares keys with them.
    """
    start, stop = edges
    at = picked.unsqueeze(-1)
    k_picked, v_picked = (x.gather(1, at.expand(-1, -1, x.shape[-1])) for x in (k, v))
    places, found = iter(nearest), []
    for pieces in parts:
        begin, end, counts = pieces[0].begin, pieces[-1].end, [piece.end - piece.begin for piece in pieces]
        first, last, wide_q = start[..., begin:end, :], stop[..., begin:end, :], q[:, begin:end].to(k.dtype)
        do = grad_out(begin, end).to(k.dtype)
        p, out = do.new_empty(*do.shape[:2], picked.shape[1]), do.new_empty(do.shape)
        split = (x.split_with_sizes(counts, -2) for x in (first, last, wide_q, p, out))
        for piece, place, own_first, own_last, own_q, own_p, own_out in zip(pieces, places, *split, strict=False):
            hidden = hide(keys[piece.first : piece.last], own_first, own_last)
            every = probabilities(own_q, k[:, piece.first : piece.last], hidden, spec)
            torch.gather(every, 2, place.expand(-1, piece.end - piece.begin, -1), out=own_p)
            own_out.baddbmm_(every, v[:, piece.first : piece.last], beta=0, alpha=spec.scale)
            del every, hidden  # or they would live on beside the next piece's
        hidden = hide(picked.unsqueeze(1), first, last)
        if hidden is not None:
            p.masked_fill_(hidden, 0.0)
        dp, delta = product(do, v_picked.mT, spec.scale), out.mul_(do).sum(-1, keepdim=True)
        terms, lengths = _terms(wide_q, k_picked, p, dp, delta, spec)
        lengths.mul_(torch.linalg.vector_norm(wide_q, dim=-1, keepdim=True))
        length = torch.linalg.vector_norm(lengths, dim=1, dtype=torch.float64)
        found.append((terms.mT.bmm(wide_q), p.mT.bmm(do), length))
    dk, dv, length = zip(*found, strict=True)
    return reduce(torch.add, dk), reduce(torch.add, dv), reduce(torch.hypot, length)


def _terms(q: Tensor, k: Tensor, p: Tensor, dp: Tensor, delta: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """dS (G, queries, keys), and its magnitude without cancellation, with any sign."""
    terms, weight = score_gradients(q, k, p, dp, delta, spec)
    return terms, torch.copysign(delta, dp).add_(dp).mul_(weight)


def _ranges(begin: int, end: int, step: int) -> list[tuple[int, int]]:
    return [(at, min(at + step, end)) for at in range(begin, end, step)]


def _reach(begin: int, end: int, spec: AttentionSpec) -> tuple[int, int]:
    """``reach`` of a piece: visible keys only move to the right with the row, unless a new head begins."""
    if spec.lengths is not None:  # where the visible ones lie is known on the device alone
        return 0, spec.seqlen_kv
    (first, row), (last, other) = divmod(begin, spec.seqlen_q), divmod(end - 1, spec.seqlen_q)
    rows = (row, other) if first == last else (0, spec.seqlen_q - 1)
    return reach([spec.mask.span(each, spec.seqlen_q, spec.seqlen_kv) for each in rows])
