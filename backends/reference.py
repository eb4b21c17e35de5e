"""Exact attention in FP64 or FP32, chunked: the truth that every other kernel is held against.

Any mask, grouping, softcap, head dimension and input type, forward and backward, on any
device.  One (batch, key head) is converted at a time and queries go through in slices, so
that 128k keys fit in little memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnbench.kernels.capabilities import Capabilities
from attnbench.kernels.contract import (
    Availability,
    Backend,
    BackwardKernel,
    ForwardKernel,
    Operands,
    Result,
    Saved,
    gradient_dtype,
)
from attnbench.problem.fp8 import Quantised
from attnbench.problem.spec import DTYPES, GRANULARITIES, AttentionSpec

from .common.full_fp32 import full_fp32

__all__ = ["BACKEND"]

_WIDE = {"fp64": torch.float64, "fp32": torch.float32}
# Before the one rounding to the type of the tensors, up to 8192 keys: 4e-15 and 7e-7.
_DECLARED = {"fp64": 1e-14, "fp32": 1.2e-6}
_ROWS = {device: Capabilities(dtypes=DTYPES, descales=GRANULARITIES) for device in ("cpu", "cuda")}
# Scores alive at once.  About five such tensors live during a backward: 160 MiB of FP64 on
# a CPU; a GPU wants larger products.
_SCORES = {"cpu": 2**22, "cuda": 2**27}


class ReferenceForward(ForwardKernel):
    """softmax(scale · q kᵀ) v by its definition, whole rows of scores at a time."""

    def __init__(self, precision: str) -> None:
        self.name = f"reference:{precision}"
        self.rows = _ROWS
        self.declared_error = _DECLARED[precision]
        self.preference = 90
        self._wide = _WIDE[precision]

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Operands:
        """Nothing to prepare: conversion happens a slice at a time."""
        return Operands(spec, q, k, v)

    def prepare_quantised(self, q: Quantised, k: Quantised, v: Quantised, spec: AttentionSpec) -> Operands:
        """Kept as they are; the answer is the floor: exact attention on what the FP8 tensors stand for."""
        return Operands(spec, q, k, v)

    def run(self, operands: Operands) -> Result:
        """out rounded once, from the wide type to the input's; lse stays in the wide type."""
        spec = operands.spec
        all_q, all_k, all_v = operands.tensors(self._wide)
        out = all_q.new_empty(spec.batch, spec.heads, spec.seqlen_q, spec.head_dim_v, dtype=gradient_dtype(spec))
        lse = out.new_empty(out.shape[:3], dtype=self._wide)
        with full_fp32():
            for b, heads, k, v in _groups(spec, all_k, all_v, self._wide):
                for rows, keys, hidden in _tiles(spec, out.device):
                    q = all_q[b, heads, rows].to(self._wide)
                    scores, _ = _scores(q, k[keys], hidden, spec)
                    lse[b, heads, rows] = scores.logsumexp(-1)
                    out[b, heads, rows] = (_probabilities(scores, lse[b, heads, rows]) @ v[keys]).to(out.dtype)
        return Result(out, lse)


class ReferenceBackward(BackwardKernel):
    """The gradients by the chain rule, from the forward's LSE.

    rowsum(dO∘O) is taken as rowsum(P∘dP), its equal in exact arithmetic, so that the
    rounding of the forward's output does not reach the gradients.
    """

    def __init__(self, precision: str) -> None:
        self.name = f"reference:{precision}"
        self.rows = _ROWS
        self.declared_error = _DECLARED[precision]
        self._wide = _WIDE[precision]

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv, each accumulated in the wide type and rounded once."""
        assert saved.lse is not None, "cannot_follow keeps forwards without an LSE away"
        spec = saved.spec
        all_q, all_k, all_v = saved.operands.tensors()
        dq, dk, dv = (torch.empty_like(x) for x in (all_q, all_k, all_v))
        with full_fp32():
            for b, heads, k, v in _groups(spec, all_k, all_v, self._wide):
                wide_dk, wide_dv = torch.zeros_like(k), torch.zeros_like(v)
                for rows, keys, hidden in _tiles(spec, grad_out.device):
                    q, do = (x[b, heads, rows].to(self._wide) for x in (all_q, grad_out))
                    scores, slope = _scores(q, k[keys], hidden, spec)
                    p = _probabilities(scores, saved.lse[b, heads, rows].to(self._wide))
                    wide_dv[keys] += torch.einsum("hqk,hqd->kd", p, do)
                    dp = do @ v[keys].mT
                    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * spec.scale
                    if slope is not None:
                        ds = ds * slope
                    dq[b, heads, rows] = (ds @ k[keys]).to(dq.dtype)
                    wide_dk[keys] += torch.einsum("hqk,hqd->kd", ds, q)
                group = heads.start // spec.group
                dk[b, group], dv[b, group] = wide_dk.to(dk.dtype), wide_dv.to(dv.dtype)
        return dq, dk, dv


def _groups(
    spec: AttentionSpec, k: Tensor, v: Tensor, wide: torch.dtype
) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """Each (batch, key head): its index, the query heads that read it, and its K and V (Skv, D) made wide."""
    for b in range(spec.batch):
        for g in range(spec.kv_heads):
            heads = slice(g * spec.group, (g + 1) * spec.group)
            yield b, heads, k[b, g].to(wide), v[b, g].to(wide)


def _tiles(spec: AttentionSpec, device: torch.device) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Slices of queries with the keys that any of them sees, and which (query, key) of the tile are hidden."""
    step = max(1, _SCORES[device.type] // (spec.group * spec.seqlen_kv))
    for first in range(0, spec.seqlen_q, step):
        last = min(first + step, spec.seqlen_q) - 1
        start, stop = (
            spec.mask.span(row, spec.seqlen_q, spec.seqlen_kv)[side] for side, row in enumerate((first, last))
        )
        # Rows without any key still need one, hidden, for their sums to be defined.
        start, stop = (start, stop) if start < stop else (0, 1)
        yield slice(first, last + 1), slice(start, stop), _hidden(spec, first, last + 1, start, stop, device)


def _hidden(spec: AttentionSpec, first: int, last: int, start: int, stop: int, device: torch.device) -> Tensor | None:
    mask = spec.mask
    if mask.kind == "none":
        return None
    centre = torch.arange(first, last, device=device)[:, None] + mask.offset(spec.seqlen_q, spec.seqlen_kv)
    key = torch.arange(start, stop, device=device)[None, :]
    hidden = torch.zeros(last - first, stop - start, dtype=torch.bool, device=device)
    if mask.left is not None:
        hidden |= key < centre - mask.left
    if mask.right is not None:
        hidden |= key > centre + mask.right
    return hidden


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    """(group, rows, keys): scaled, capped, masked scores, and the cap's derivative where there is a cap."""
    scores, slope = (q @ k.mT) * spec.scale, None
    if spec.softcap:
        bent = torch.tanh(scores / spec.softcap)
        scores, slope = spec.softcap * bent, 1 - bent * bent
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    return scores, slope


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 in rows that see no key."""
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))


BACKEND = Backend(
    name="reference",
    summary="exact chunked attention in FP64 and FP32, the reference for all errors",
    availability=lambda: Availability(version=torch.__version__, origin="torch"),
    kernels=tuple(
        kernel for precision in _WIDE for kernel in (ReferenceForward(precision), ReferenceBackward(precision))
    ),
    yardstick=("cpu", "cuda"),
)
