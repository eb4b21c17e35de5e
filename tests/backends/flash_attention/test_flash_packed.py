"""FlashAttention on packed batches, against stand-ins: each sequence as if it were alone, and nothing of the others."""

from __future__ import annotations

import pytest
import standins_fa as standins
import torch
from standins_graph import INTERFACE
from torch import Tensor

from attnbench.backends.flash_attention import fa3, fa4
from attnbench.backends.flash_attention.fa3_operator import FORWARD, bound
from attnbench.backends.flash_attention.fa3_origins import Library
from attnbench.dispatch.sequences import sizes_of
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Kernel, Saved
from attnbench.problem.lengths import Lengths, packed
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

H200 = Device("cuda", "NVIDIA H200", (9, 0))
KERNELS: tuple[Kernel, ...] = (*fa3.BACKEND.kernels, *fa4.BACKEND.kernels)
FORWARDS = {kernel.name: kernel for kernel in KERNELS if isinstance(kernel, ForwardKernel)}
BACKWARDS = {kernel.name: kernel for kernel in KERNELS if isinstance(kernel, BackwardKernel)}
SQUARE = [(33, 33), (0, 0), (1, 1), (70, 70)]
OBLONG = [(33, 41), (0, 7), (5, 0), (20, 90)]
MASKS = [Mask(), Mask(right=0), Mask(left=9, right=0), Mask(left=9, right=0, alignment="bottom-right")]


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    standins.define()
    operator = bound(torch.ops.sgl_kernel.fwd.default, FORWARD)
    monkeypatch.setattr(fa3, "library", lambda: Library(operator, None))
    monkeypatch.setattr(fa4, "_library", lambda: fa4._Library(INTERFACE._flash_attn_fwd, INTERFACE._flash_attn_bwd))


def batch(pairs: list[tuple[int, int]], mask: Mask, **sizes: int) -> tuple[list[Tensor], Lengths, AttentionSpec]:
    """q, k, v and grad_out (1, H, T, D), their lengths and the spec."""
    random = torch.Generator().manual_seed(0)
    queries, keys = (sum(side) for side in zip(*pairs, strict=True))
    dims = {"head_dim": 64, "head_dim_v": 64, **sizes}

    def normal(tokens: int, heads: int, size: int) -> Tensor:
        x = torch.randn(tokens, heads, size, generator=random) * torch.logspace(-1, 1, heads)[:, None]
        return x.bfloat16().transpose(0, 1)[None]

    q, k = normal(queries, 4, dims["head_dim"]), normal(keys, 2, dims["head_dim"])
    v, grad = normal(keys, 2, dims["head_dim_v"]), normal(queries, 4, dims["head_dim_v"])
    starts = [
        torch.tensor([0, *side], dtype=torch.int32).cumsum(0, dtype=torch.int32) for side in zip(*pairs, strict=True)
    ]
    same = pairs == [(a, a) for a, _ in pairs]
    lengths = packed(q, k, starts[0], starts[0] if same else starts[1], None, None)
    spec = AttentionSpec.make(
        **sizes_of(lengths, 1, queries, keys), heads=4, kv_heads=2, **dims, mask=mask, direction="training"
    )
    return [q, k, v, grad], lengths, spec


def served(name: str, spec: AttentionSpec) -> bool:
    return FORWARDS[name].refusals(spec.replace(direction="forward"), H200) == []


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("pairs", [SQUARE, OBLONG], ids=["square", "oblong"])
@pytest.mark.parametrize("name", ["fa3:fp8", "fa3:bf16", "fa4:bf16"])
def test_packed_sequences_are_what_the_kernel_makes_of_each_alone(name, pairs, mask) -> None:
    (q, k, v, grad), lengths, spec = batch(pairs, mask)
    if not served(name, spec):
        assert pairs is OBLONG
        assert mask.kind != "none"
        assert spec.mask.alignment == "top-left"
        return
    forward, backward = FORWARDS[name], BACKWARDS["fa4:bf16"]
    operands = forward.prepare(Inputs(q, k, v, lengths), spec)
    out, lse, _ = result = forward.run(operands)
    assert (out.shape, lse.shape) == (grad.shape, grad.shape[:3])
    gradients = backward.run(Saved(operands.kept(), *result), grad)
    seen = []
    for own in lengths.sequences(spec, q, k):
        parts = own.q(q), own.kv(k), own.kv(v)
        alone = forward.prepare(Inputs(*parts), own.spec)
        exact = forward.run(alone)
        assert torch.equal(own.q(out), exact.out)
        assert torch.equal(own.q(lse), exact.lse)
        dq, dk, dv = backward.run(Saved(alone.kept(), *exact), own.q(grad))
        for found, wanted in ((own.q(gradients[0]), dq), (own.kv(gradients[1]), dk), (own.kv(gradients[2]), dv)):
            torch.testing.assert_close(found, wanted, rtol=0.01, atol=1e-5)
        seen.append(own.queries)
    rest = torch.ones(q.shape[2], dtype=torch.bool)
    for each in seen:
        rest[each] = False
    assert not out[:, :, rest].any()
    assert not gradients[0][:, :, rest].any()
    assert bool((lse[:, :, rest] == -torch.inf).all())
