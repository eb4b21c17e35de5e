"""For the tests of the emulated FP8 kernels: every recipe, seeded inputs, both passes, and dense FP64 attention."""

from __future__ import annotations

import torch
from torch import Tensor

from attnbench.backends.emulated import emulate
from attnbench.backends.emulated_arithmetic import Accumulator
from attnbench.kernels.contract import Inputs, Operands, Saved
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.fp8 import Recipe
from attnbench.problem.spec import AttentionSpec

RECIPES = [
    Recipe(granularity, format, rotation, smoothing)
    for granularity in ("tensor", "head", "block", "token")
    for format in ("e4m3", "e5m2")
    for rotation in ("none", "hadamard")
    for smoothing in (False, True)
]
Exact = tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...] | None]


def visible(spec: AttentionSpec) -> Tensor:
    """(Sq, Skv): which query sees which key."""
    o = spec.seqlen_kv - spec.seqlen_q if spec.mask.alignment == "bottom-right" else 0
    i, j = torch.arange(spec.seqlen_q)[:, None] + o, torch.arange(spec.seqlen_kv)[None]
    seen = torch.ones(spec.seqlen_q, spec.seqlen_kv, dtype=torch.bool)
    if spec.mask.left is not None:
        seen &= j >= i - spec.mask.left
    if spec.mask.right is not None:
        seen &= j <= i + spec.mask.right
    return seen


def dense(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, grad_out: Tensor | None = None) -> Exact:
    """FP64 (out, lse, P, gradients or None), the softmax of an empty row being zeros."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(spec.group, 1) for x in (k, v))
    s = q @ keys.mT * spec.scale
    if spec.softcap:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    seen = visible(spec)
    some = seen.any(-1, keepdim=True)
    p = torch.where(some, torch.softmax(s.masked_fill(~seen & some, -torch.inf), -1), 0.0)
    out = p @ values
    lse = torch.where(some[:, 0], torch.logsumexp(s.masked_fill(~seen, -torch.inf), -1), -torch.inf)
    grads = None if grad_out is None else torch.autograd.grad(out, (q, k, v), grad_out.double())
    return out.detach(), lse.detach(), p.detach(), grads


def tensors(spec: AttentionSpec, seed: int = 0, strided: bool = False) -> list[Tensor]:
    """q, k, v and the output's gradient, standard normal; strided as of (B, S, H, D)."""
    make = torch.Generator().manual_seed(seed)
    shapes = [
        (spec.batch, spec.heads, spec.seqlen_q, spec.head_dim),
        (spec.batch, spec.kv_heads, spec.seqlen_kv, spec.head_dim),
        (spec.batch, spec.kv_heads, spec.seqlen_kv, spec.head_dim_v),
        (spec.batch, spec.heads, spec.seqlen_q, spec.head_dim_v),
    ]
    made = []
    for b, h, s, d in shapes:
        x = (
            torch.randn(b, s, h, d, generator=make).transpose(1, 2)
            if strided
            else torch.randn(b, h, s, d, generator=make)
        )
        made.append(x.to(TO_TORCH[spec.dtype]))
    return made


def both(
    recipe: Recipe,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    accumulator: Accumulator | None = None,
) -> tuple[Operands, Tensor, Tensor, tuple[Tensor, ...]]:
    """The operands, out, lse and gradients of the kernels of a recipe."""
    forward, backward = emulate(recipe, accumulator)
    operands = forward.prepare(Inputs(q, k, v), spec)
    out, lse, state = forward.run(operands)
    return operands, out, lse, backward.run(Saved(operands, out, lse, state), grad_out)
