"""Operands that are created when read: training with them, and what is kept until the backward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from dense import dense_gradients, relative_l2
from torch import Tensor

from attnbench import AttentionSpec, attention
from attnbench.backends.triton.interpreter import interpreted

pytest.importorskip("triton")
if not interpreted():
    pytest.skip("kernels are compiled here, which the tests in tests/gpu run", allow_module_level=True)

from attnbench.backends.triton.forward import plan
from attnbench.backends.triton.quantise.launch import Quantisation


@pytest.mark.parametrize("forward", ["triton:fp8-onepass", "triton:fp8"])
def test_a_layer_keeps_alive_neither_its_inputs_nor_the_forwards_copies(
    forward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=140, head_dim=64, direction="training")
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, 140, 64, generator=generator).to(torch.bfloat16) for _ in range(4)]
    held: list[weakref.ref[Tensor]] = []
    before = plan.quantise_tensors

    def watched(*args: Any) -> list[Quantisation]:
        made = before(*args)
        assert made[0]._scratch is not made[0]._kept
        held.append(weakref.ref(made[0]._scratch.block))
        return made

    monkeypatch.setattr(plan, "quantise_tensors", watched)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    given = [x * 1 for x in leaves]  # of which the graph of the product keeps nothing
    held += map(weakref.ref, given)
    out = attention(*given, scale=spec.scale, backend=f"{forward}>triton:fp8")
    del given
    gc.collect()
    assert len(held) == 4
    assert [x for x in held if x() is not None] == []
    out.backward(inputs[3])
    exact = dense_gradients(*(x.double() for x in inputs[:3]), inputs[3].double(), spec)
    for leaf, wanted in zip(leaves, exact, strict=True):
        assert leaf.grad is not None
        assert relative_l2(leaf.grad, wanted) < 0.1


def test_shared_operands_are_saved_once_and_may_be_restored_to_new_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 1, 16, 16, generator=generator).to(torch.bfloat16).requires_grad_() for _ in range(3)]
    saved: list[Tensor] = []

    def gradients() -> tuple[Tensor, ...]:
        out = attention(*leaves, backend="triton:fp8>sdpa-flash:bf16")
        assert isinstance(out, Tensor)
        return torch.autograd.grad(out.sum(), leaves)

    wanted = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x.clone())[1], lambda x: x):
        found = gradients()
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert len({x.data_ptr() for x in saved}) == len(saved) == 3  # a block, the output and its log-sum-exp
