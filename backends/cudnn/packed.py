"""Packed batches as cuDNN's graphs take them: rows of one length whose tokens lie end to end, by ragged offsets.

A graph knows the number of sequences, the longest and the total only as the spec rounds them up, so that few graphs are
built for a training whose lengths differ at each step; sequences without a token fill up the batch.  As in
``test/python/sdpa/fp16.py`` of cuDNN's front end and ``fused_attn_f16_arbitrary_seqlen.cu`` of TransformerEngine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnbench.problem.lengths import Lengths
from attnbench.problem.spec import AttentionSpec

from .graphs import RAGGED, TensorLayout

__all__ = ["described", "lengths_of", "outputs_of"]

_QUERIES = ("q", "o", "dO", "dQ", "stats")


def lengths_of(lengths: Lengths, spec: AttentionSpec) -> dict[str, Tensor]:
    """The inputs of a packed graph that say where sequences lie, by port; reads nothing from the device."""
    found = {}
    for side, names in (("q", ("q", "o", "stats")), ("kv", ("k", "v"))):
        starts = lengths.starts[side == "kv"]
        unused = spec.batch + 1 - starts.shape[0]
        if unused:
            starts = torch.cat([starts, starts[-1:].expand(unused)])
        found[f"seq_{side}"] = starts.diff().view(-1, 1, 1, 1)
        wide = starts.to(torch.int64).view(-1, 1, 1, 1)
        found |= {f"offset_{name}": wide * _elements(name, spec) for name in names}
    return {name: found[name] for name in RAGGED}


def described(name: str, spec: AttentionSpec, dtype: torch.dtype) -> TensorLayout:
    """A port of a packed graph: (B, H, S, D) in which a token's heads lie side by side."""
    if name.startswith("seq_"):
        return TensorLayout.dense(spec.batch, 1, 1, 1, dtype=torch.int32)
    if name.startswith("offset_"):
        return TensorLayout.dense(spec.batch + 1, 1, 1, 1, dtype=torch.int64)
    length = spec.seqlen_q if name in _QUERIES else spec.seqlen_kv
    heads = spec.heads if name in _QUERIES else spec.kv_heads
    size = _elements(name, spec) // heads
    return TensorLayout.rows(spec.batch, heads, length, size, torch.float32 if name == "stats" else dtype)


def outputs_of(names: tuple[str, ...], spec: AttentionSpec, q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """Memory (T, H, D) for the outputs of a packed graph on q and k (T, H, D)."""
    found = {}
    for name in names:
        like, heads = (q, spec.heads) if name in _QUERIES else (k, spec.kv_heads)
        size, dtype = _elements(name, spec) // heads, torch.float32 if name == "stats" else q.dtype
        found[name] = torch.empty(like.shape[0], heads, size, dtype=dtype, device=q.device)
    return found


def _elements(name: str, spec: AttentionSpec) -> int:
    """Those of a token."""
    if name == "stats":
        return spec.heads
    size = spec.head_dim_v if name in ("v", "dV", "o", "dO") else spec.head_dim
    return size * (spec.heads if name in _QUERIES else spec.kv_heads)
