"""Exact attention in FP64 or FP32, chunked: the reference for every other kernel's error.

Any mask, grouping, softcap, head dimension, input type and device, both passes.  One (batch, key head) is converted at
a time and queries go through in slices, so that 128k keys fit in little memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnbench.kernels.capabilities import Capabilities
from attnbench.kernels.contract import (
    Backend,
    BackwardKernel,
    ForwardKernel,
    Inputs,
    Operands,
    Result,
    Saved,
    gradient_dtype,
)
from attnbench.problem.exact import product, score_gradients, scores
from attnbench.problem.lengths_kind import BATCHES
from attnbench.problem.spec import DTYPES, GRANULARITIES, AttentionSpec

from .common.each_sequence import answer_each, derive_each, prepare_each
from .common.full_fp32 import full_fp32
from .common.installed import torch_availability

__all__ = ["BACKEND"]

_WIDE = {"fp64": torch.float64, "fp32": torch.float32}
# Before the one rounding to the type of the tensors, up to 8192 keys: 4e-15 and 7e-7.
_DECLARED = {"fp64": 1e-14, "fp32": 1.2e-6}
_ROWS = {device: Capabilities(dtypes=DTYPES, descales=GRANULARITIES, lengths=BATCHES) for device in ("cpu", "cuda")}
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

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """Nothing: conversion happens slice by slice; for tensors quantised by the caller the result is the error
        floor.
        """
        if inputs.lengths is not None:
            return prepare_each(self, inputs, spec)
        return Operands(spec, inputs.q, inputs.k, inputs.v)

    def run(self, operands: Operands) -> Result:
        """out rounded once, from the wide type to the input's; lse stays in the wide type."""
        if operands.lengths is not None:
            return answer_each(self, operands)
        spec = operands.spec
        all_q, all_k, all_v = operands.tensors(self._wide)
        out = all_q.new_empty(spec.batch, spec.heads, spec.seqlen_q, spec.head_dim_v, dtype=gradient_dtype(spec))
        lse = out.new_empty(out.shape[:3], dtype=self._wide)
        with full_fp32(all_q):
            for b, heads, k, v in _groups(spec, all_k, all_v, self._wide):
                for rows, keys, hidden in _tiles(spec, out.device):
                    q = _folded(all_q[b, heads, rows], self._wide)
                    s = scores(q, k[:, keys], hidden, spec)
                    own_lse = s.logsumexp(-1)
                    lse[b, heads, rows] = own_lse.view(spec.group, -1)
                    own_out = _probabilities(s, own_lse).bmm(v[:, keys])
                    out[b, heads, rows] = own_out.view(spec.group, -1, spec.head_dim_v).to(out.dtype)
        return Result(out, lse)


class ReferenceBackward(BackwardKernel):
    """The gradients by the chain rule, from the LSE; rowsum(dO∘O) as rowsum(P∘dP), free of the output's rounding."""

    from_lse = True

    def __init__(self, precision: str) -> None:
        self.name = f"reference:{precision}"
        self.rows = _ROWS
        self.declared_error = _DECLARED[precision]
        self._wide = _WIDE[precision]

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv, each accumulated in the wide type and rounded once."""
        assert saved.lse is not None, "cannot_follow keeps forwards without an LSE away"
        if saved.operands.lengths is not None:
            return derive_each(self, saved, grad_out)
        spec = saved.spec
        all_q, all_k, all_v = saved.operands.tensors()
        dq, dk, dv = (torch.empty_like(x) for x in (all_q, all_k, all_v))
        with full_fp32(all_q):
            for b, heads, k, v in _groups(spec, all_k, all_v, self._wide):
                wide_dk, wide_dv = torch.zeros_like(k), torch.zeros_like(v)
                for rows, keys, hidden in _tiles(spec, grad_out.device):
                    q, do = (_folded(x[b, heads, rows], self._wide) for x in (all_q, grad_out))
                    own_k, own_v = k[:, keys], v[:, keys]
                    lse = saved.lse[b, heads, rows].to(self._wide).reshape(1, -1)
                    p = _probabilities(scores(q, own_k, hidden, spec), lse)
                    wide_dv[:, keys] += p.mT.bmm(do)
                    dp = product(do, own_v.mT, spec.scale)
                    ds, _ = score_gradients(q, own_k, p, dp, (p * dp).sum(-1, keepdim=True), spec)
                    dq[b, heads, rows] = ds.bmm(own_k).view(spec.group, -1, spec.head_dim).to(dq.dtype)
                    wide_dk[:, keys] += ds.mT.bmm(q)
                group = heads.start // spec.group
                dk[b, group], dv[b, group] = wide_dk[0].to(dk.dtype), wide_dv[0].to(dv.dtype)
        return dq, dk, dv


def _groups(
    spec: AttentionSpec, k: Tensor, v: Tensor, wide: torch.dtype
) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """Each (batch, key head): its index, the query heads that read it, and its K and V (1, Skv, D) made wide."""
    for b in range(spec.batch):
        for g in range(spec.kv_heads):
            heads = slice(g * spec.group, (g + 1) * spec.group)
            yield b, heads, k[b, g : g + 1].to(wide), v[b, g : g + 1].to(wide)


def _tiles(spec: AttentionSpec, device: torch.device) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Slices of queries with the keys that any of them sees, and which (group · rows, keys) of the tile are hidden."""
    step = max(1, _SCORES[device.type] // (spec.group * spec.seqlen_kv))
    for first in range(0, spec.seqlen_q, step):
        last = min(first + step, spec.seqlen_q) - 1
        start, stop = (
            spec.mask.span(row, spec.seqlen_q, spec.seqlen_kv)[side] for side, row in enumerate((first, last))
        )
        # Rows without any key still need one, hidden, for their sums to be defined.
        start, stop = (start, stop) if start < stop else (0, 1)
        rows = torch.arange(first, last + 1, device=device).repeat(spec.group)
        hidden = spec.mask.hidden(rows, torch.arange(start, stop, device=device), spec.seqlen_q, spec.seqlen_kv)
        yield slice(first, last + 1), slice(start, stop), hidden


def _folded(x: Tensor, wide: torch.dtype) -> Tensor:
    """(1, group · rows, D) of x (group, rows, D), made wide: heads that share their keys as queries of one."""
    return x.to(wide).reshape(1, -1, x.shape[-1])


def _probabilities(s: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 in rows that see no key."""
    return torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))


BACKEND = Backend(
    name="reference",
    summary="exact chunked attention in FP64 and FP32, the reference for all errors",
    availability=torch_availability,
    kernels=tuple(
        kernel for precision in _WIDE for kernel in (ReferenceForward(precision), ReferenceBackward(precision))
    ),
    yardstick=("cpu", "cuda"),
)
