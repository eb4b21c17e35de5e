"""A narrow accumulator reaches every product of both passes."""

from __future__ import annotations

import torch
from dense import relative_l2
from emulating import both, tensors

from attnbench.backends.emulated import emulate
from attnbench.backends.emulated_arithmetic import Accumulator
from attnbench.kernels.contract import Inputs, Saved
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


def test_narrow_accumulator_reaches_every_product_of_the_backward():
    """A product of two e4m3 numbers has 7 mantissa bits, so 7 bits change nothing in a sum of a single product."""

    def changed(q, k, v):
        spec = AttentionSpec.make(batch=1, heads=1, seqlen_q=q.shape[2], seqlen_kv=k.shape[2], head_dim=q.shape[3])
        spec = spec.replace(head_dim_v=v.shape[3], dtype="fp32", direction="training")
        grad_out = tensors(spec, 9)[3]
        forward, exact = emulate()
        operands = forward.prepare(Inputs(q, k, v), spec)
        out, lse, _ = forward.run(operands)
        narrow = emulate(accumulator=Accumulator(7))[1]
        pairs = zip(*(kernel.run(Saved(operands, out, lse), grad_out) for kernel in (exact, narrow)), strict=True)
        return [not torch.allclose(x, y, rtol=1e-4) for x, y in pairs]

    make = torch.Generator().manual_seed(3)
    column, wide = torch.randn(1, 1, 100, 1, generator=make), torch.randn(1, 1, 100, 64, generator=make)
    assert changed(column, column + 1, column - 1) == [True, True, True]  # dQ, dK, dV: D = 1 leaves S and dP alone
    assert changed(torch.zeros(1, 1, 50, 2), torch.eye(2)[None, None], wide[:, :, :2])[0]  # dP: nothing else adds up
    assert changed(wide[:, :, :1], wide, column)[2]  # S: one query leaves nothing to add up in dV
