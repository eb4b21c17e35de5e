"""Kernels for sequences of one length on a batch of unequal ones: each sequence in a call of its own.

The lengths are read on the host, so on a GPU every pass waits for the device: for references, emulation and CPUs.  No
value beyond a sequence's own reaches its call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Operands, Result, Saved, gradient_dtype
from attnbench.problem.fp8 import Quantised
from attnbench.problem.lengths import Sequence
from attnbench.problem.spec import AttentionSpec

__all__ = ["answer_each", "derive_each", "prepare_each"]


def prepare_each(kernel: ForwardKernel, inputs: Inputs, spec: AttentionSpec) -> Operands:
    """The operands of each sequence in ``native``, and q, k, v of all, as they were prepared, for a backward."""
    assert inputs.lengths is not None, "sequences of one length are prepared together"
    q, k, v = inputs.unquantised()
    parts = []
    for own in inputs.lengths.sequences(spec, q, k):
        parts.append((own, kernel.prepare(Inputs(own.q(q), own.kv(k), own.kv(v)), own.spec)))
    together = Operands(spec, q, k, v, parts, inputs.lengths)
    if parts and isinstance(parts[0][1].q, Quantised):
        together.q = _joined(q, [(own, own.queries, each.q) for own, each in parts])
        together.k = _joined(k, [(own, own.keys, each.k) for own, each in parts])
        together.v = _joined(v, [(own, own.keys, each.v) for own, each in parts])
    return together


def answer_each(kernel: ForwardKernel, operands: Operands) -> Result:
    """Out and LSE of each sequence in its place; 0 and minus infinity elsewhere, and no LSE of a kernel without one."""
    spec, data = operands.spec, operands.q.data
    out = torch.zeros(*data.shape[:3], spec.head_dim_v, dtype=gradient_dtype(spec), device=data.device)
    lse = None
    for own, part in operands.native:
        found = kernel.run(part)
        own.q(out).copy_(found.out)
        if found.lse is not None:
            if lse is None:
                lse = torch.full(data.shape[:3], -torch.inf, dtype=found.lse.dtype, device=data.device)
            own.q(lse).copy_(found.lse)
    if lse is None and kernel.rows[data.device.type].lse:
        lse = torch.full(data.shape[:3], -torch.inf, dtype=torch.float32, device=data.device)
    return Result(out, lse)


def derive_each(kernel: BackwardKernel, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of each sequence in its place, 0 elsewhere; for backwards without private state."""
    given, spec = saved.operands, saved.spec
    assert given.lengths is not None, "sequences of one length are derived together"
    dtype = gradient_dtype(spec)
    dq, dk, dv = (torch.zeros(x.data.shape, dtype=dtype, device=grad_out.device) for x in (given.q, given.k, given.v))
    for own in given.lengths.sequences(spec, given.q.data, given.k.data):
        rows, keys = (own.row, own.queries), (own.row, own.keys)
        operands = Operands(own.spec, _part(given.q, *rows), _part(given.k, *keys), _part(given.v, *keys))
        lse = None if saved.lse is None else own.q(saved.lse)
        found = kernel.run(Saved(operands, own.q(saved.out), lse), own.q(grad_out))
        for whole, each in ((own.q(dq), found[0]), (own.kv(dk), found[1]), (own.kv(dv), found[2])):
            whole.copy_(each)
    return dq, dk, dv


def _joined(like: Tensor, parts: list[tuple[Sequence, slice, Tensor | Quantised]]) -> Quantised:
    """The quantised sequences in one tensor, each token with its descale and mean; zeros elsewhere."""
    first = parts[0][2]
    assert isinstance(first, Quantised)
    data = torch.zeros(like.shape, dtype=first.data.dtype, device=like.device)
    descale = torch.ones(*like.shape[:3], 1, dtype=torch.float32, device=like.device)
    mean = None if first.mean is None else torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    for own, tokens, part in parts:
        assert isinstance(part, Quantised)
        data[own.row, :, tokens] = part.data[0]
        descale[own.row, :, tokens] = part.descale[0]
        if mean is not None and part.mean is not None:
            mean[own.row, :, tokens] = part.mean[0]
    return Quantised(data, descale, first.granularity, first.rotated, mean)


def _part(x: Tensor | Quantised, row: int, tokens: slice) -> Tensor | Quantised:
    """One sequence's tokens of x (B, H, S, D), with the descale and mean that it was quantised with."""

    def cut(whole: Tensor) -> Tensor:
        return whole[row : row + 1, :, tokens]

    if not isinstance(x, Quantised):
        return cut(x)
    descale = cut(x.descale)
    if x.granularity in ("tensor", "head"):
        descale = descale[:, :, :1]
    mean = None if x.mean is None else cut(x.mean)[:, :, :1]
    return Quantised(cut(x.data), descale, x.granularity, x.rotated, mean)
