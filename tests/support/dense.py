"""Exact attention in FP64 by its definition: the reference of the tests, which shares no code with the package."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnbench import AttentionSpec


def visible(spec: AttentionSpec) -> Tensor:
    """(Sq, Skv): which query attends to which key, by the definition in Mask's docstring."""
    offset = spec.seqlen_kv - spec.seqlen_q if spec.mask.alignment == "bottom-right" else 0
    sees = torch.ones(spec.seqlen_q, spec.seqlen_kv, dtype=torch.bool)
    for i in range(spec.seqlen_q):
        for j in range(spec.seqlen_kv):
            if spec.mask.left is not None and j < i + offset - spec.mask.left:
                sees[i, j] = False
            if spec.mask.right is not None and j > i + offset + spec.mask.right:
                sees[i, j] = False
    return sees


def probabilities(q: Tensor, k: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """(P, lse) in FP64 of q (B, H, Sq, D), k (B, Hkv, Skv, D); a row without keys is zeros, its lse -inf."""
    scores = q.double() @ k.double().repeat_interleave(spec.group, dim=1).mT * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    sees = visible(spec).to(q.device)
    some = sees.any(dim=1)
    # A row without keys would give NaN in the softmax's gradient, so it is not masked here and set to zero below.
    scores = scores.masked_fill(~(sees | ~some[:, None]), -torch.inf)
    return torch.where(some[:, None], scores.softmax(-1), 0.0), torch.where(some, scores.logsumexp(-1), -torch.inf)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """(out, lse) in FP64 of q (B, H, Sq, D), k, v (B, Hkv, Skv, ·); differentiable."""
    p, lse = probabilities(q, k, spec)
    return p @ v.double().repeat_interleave(spec.group, dim=1), lse


def dense_gradients(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, spec: AttentionSpec) -> tuple[Tensor, ...]:
    """(dq, dk, dv) in FP64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, _ = dense_attention(*leaves, spec)
    return torch.autograd.grad(out, leaves, grad_out.double())


def gradient_sizes(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, spec: AttentionSpec) -> tuple[float, ...]:
    """Norms of dq, dk, dv with all terms positive: rounding errors are proportional to these.

    With one visible key P is 1 and dS vanishes exactly, so an error relative to dq alone would be infinite.
    """
    q, k, v, do = (x.detach().double() for x in (q, k, v, grad_out))
    wide_k, wide_v = (x.repeat_interleave(spec.group, dim=1) for x in (k, v))
    p, _ = probabilities(q, k, spec)
    out = p @ wide_v
    ds = p * ((do @ wide_v.mT).abs() + (do * out).abs().sum(-1, keepdim=True)) * spec.scale
    folded = (spec.batch, spec.kv_heads, spec.group, spec.seqlen_q, -1)
    dk = torch.einsum("bhgqk,bhgqd->bhkd", ds.view(*folded), q.abs().view(*folded))
    dv = torch.einsum("bhgqk,bhgqd->bhkd", p.view(*folded), do.abs().view(*folded))
    return (ds @ wide_k.abs()).norm().item(), dk.norm().item(), dv.norm().item()


def distance(found: Tensor, truth: Tensor, size: float = 0.0) -> float:
    """Relative L2 error, relative to a tenth of ``size`` where the truth nearly cancels.

    Kernels declare the error over many numbers; the error over a few numbers varies around it.
    """
    difference = (found.double() - truth).norm().item()
    scatter = 1 + 4 / max(truth.numel(), 1) ** 0.5
    return difference / max(truth.norm().item(), 0.1 * size, 1e-30) / scatter if math.isfinite(difference) else math.inf


def relative_l2(found: Tensor, truth: Tensor) -> float:
    """||found - truth|| / ||truth|| in FP64; infinite where something is not finite."""
    difference = (found.double() - truth.double()).norm()
    if not torch.isfinite(difference):
        return float("inf")
    return (difference / truth.double().norm().clamp_min(1e-300)).item()
