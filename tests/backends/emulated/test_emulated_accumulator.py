"""A narrow accumulator reaches every product of both passes."""

from __future__ import annotations

import torch
from dense import relative_l2
from emulating import both, tensors

from attnbench.backends.emulated_arithmetic import Accumulator
from attnbench.problem.fp8 import Recipe
from attnbench.problem.spec import AttentionSpec


def test_narrow_accumulator_reaches_both_products_of_the_forward():
    spec = AttentionSpec.make(batch=1, heads=2, kv_heads=1, seqlen_q=150, head_dim=48, dtype="fp32")
    q, k, v, grad_out = tensors(spec)
    exact, narrow, coarse = (both(Recipe(), spec, q, k, v, grad_out, Accumulator(bits)) for bits in (None, 17, 5))
    for x, y, z in zip(*((o, lse, *g) for _, o, lse, g in (exact, narrow, coarse)), strict=True):
        assert relative_l2(y, x) < 3e-3
        assert relative_l2(z, x) > 0.003
    still = torch.zeros_like(q)  # S = 0 leaves nothing to add up but P·V
    for recipe in (Recipe(), Recipe("token")):
        (_, out, lse, _), (_, other, same, _) = (
            both(recipe, spec, still, k, v, grad_out, Accumulator(bits)) for bits in (None, 5)
        )
        assert torch.equal(same, lse)
        assert relative_l2(other, out) > 0.003
