"""FlashAttention's whole calls without gradients, against stand-ins: the same results as prepare and run."""

from __future__ import annotations

import pytest
import standins_fa
import torch
from problems import Problem, tensors_of

from attnbench.backends.flash_attention import fa3, fa4
from attnbench.kernels.contract import ForwardKernel, Inputs
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

SPEC = AttentionSpec.make(batch=2, heads=4, kv_heads=2, seqlen_q=33, seqlen_kv=41, head_dim=64)


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    standins_fa.install_flash_attention(monkeypatch)


@pytest.mark.parametrize("mask", [Mask(), Mask(right=0, alignment="bottom-right")], ids=str)
@pytest.mark.parametrize("kernel", [fa3.Fa3Forward("bf16"), fa4.Fa4Forward("bf16")], ids=lambda kernel: kernel.name)
def test_whole_calls_equal_prepare_then_run(kernel: ForwardKernel, mask: Mask) -> None:
    """There is no whole call for padded or cut tensors, with gradients, or in FP8."""
    spec = SPEC.replace(mask=mask)
    q, k, v, _ = tensors_of(Problem(spec, "bhsd", False, 0))
    whole = kernel.whole(spec, "cuda")
    assert whole is not None
    parts = kernel.run(kernel.prepare(Inputs(q, k, v), spec))
    assert all(torch.equal(x, y) for x, y in zip(whole(q, k, v), parts[:2], strict=True))
    cut: dict[str, object] = {"seqlen_q": 20, "mask": Mask(right=0)}
    for changes in ({"head_dim": 36, "head_dim_v": 36}, cut, {"direction": "training"}):
        assert kernel.whole(SPEC.replace(**changes), "cuda") is None
    assert fa3.Fa3Forward("fp8").whole(spec, "cuda") is None
