"""Compiled FlexAttention on a GPU: 16 bits with its backward, and float8, against dense FP64."""

from __future__ import annotations

from dataclasses import replace

import dense
import pytest
import torch
from agreement_sweep import Sweep, Truth

from attnbench import AttentionSpec, Mask
from attnbench.backends.flex import backend as flex
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.kernels.devices import describe
from attnbench.problem.fp8 import Recipe, quantise

FORWARDS = {k.name: k for k in flex.BACKEND.kernels if isinstance(k, ForwardKernel)}
BACKWARDS = {k.name: k for k in flex.BACKEND.kernels if isinstance(k, BackwardKernel)}
DEVICE = torch.device("cuda", 0)
END = "bottom-right"


def spec_of(seqlen_q: int, seqlen_kv: int, head_dim: int, group: int, mask: Mask, **more: object) -> AttentionSpec:
    sizes = {"batch": 2, "heads": 8, "kv_heads": 8 // group, "head_dim": head_dim, "direction": "training", **more}
    return AttentionSpec.make(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, mask=mask, **sizes)


# Each one is a compilation of seconds: every head dimension, mask, alignment and group once, not their product.
SPECS = [
    spec_of(256, 256, 64, 1, Mask()),
    spec_of(257, 333, 80, 4, Mask(right=0)),
    spec_of(333, 257, 96, 8, Mask(right=0, alignment=END)),  # rows without a key
    spec_of(257, 513, 128, 1, Mask(right=0, alignment=END)),
    spec_of(300, 300, 192, 4, Mask(left=37, right=11)),
    spec_of(300, 130, 256, 8, Mask(left=37, right=0)),  # rows without a key
    spec_of(257, 300, 128, 4, Mask(left=90, alignment=END), softcap=5.0),
    spec_of(200, 200, 128, 1, Mask(), head_dim_v=64, softcap=5.0, scale=0.2),
    spec_of(1, 333, 64, 8, Mask(right=0, alignment=END), direction="forward"),
    spec_of(257, 257, 128, 4, Mask(right=0), dtype="fp16"),
]
FP8_SPECS = [
    spec_of(256, 256, 64, 1, Mask(), direction="forward"),
    spec_of(257, 333, 80, 4, Mask(right=0), direction="forward"),
    spec_of(333, 257, 96, 8, Mask(right=0, alignment=END), direction="forward"),  # rows without a key
    spec_of(300, 513, 128, 1, Mask(left=200, right=11, alignment=END), direction="forward", softcap=5.0),
    spec_of(300, 300, 192, 4, Mask(), direction="forward", dtype="fp16"),
    spec_of(1000, 1000, 256, 8, Mask(right=0), direction="forward"),
    spec_of(300, 257, 40, 1, Mask(), direction="forward"),
    spec_of(257, 257, 33, 1, Mask(right=0), direction="forward"),
    spec_of(1, 333, 128, 4, Mask(right=0, alignment=END), direction="forward"),
]


@pytest.fixture
def fp8() -> ForwardKernel:
    """The float8 forward, where this GPU has it."""
    if FORWARDS["flex:fp8"].refusals(FP8_SPECS[0], describe(DEVICE)):
        pytest.skip("this GPU has no FP8 FlexAttention")
    return FORWARDS["flex:fp8"]


def test_sixteen_bit_kernels_agree_with_dense_fp64() -> None:
    sweep = Sweep(DEVICE)
    for index, spec in enumerate(SPECS):
        truth, name = Truth.of(spec, index, sweep.device), f"flex:{spec.dtype}"
        ran = sweep.forward(FORWARDS[name], truth)
        if ran is not None and spec.training:
            saved = Saved(ran[0], *ran[1])
            sweep.backward(BACKWARDS[name], truth, saved)
            if index == 1:  # the graph stays: a backward may be timed more than once
                sweep.backward(BACKWARDS[name], truth, saved)
    print(sweep.report())
    assert not any(sweep.faults.values())
    assert not any(sweep.refused.values())


def test_float8_agrees_with_dense_fp64(fp8: ForwardKernel) -> None:
    """The log-sum-exp too is held to what eight bits leave of it."""
    sweep = Sweep(DEVICE)
    for index, spec in enumerate(FP8_SPECS):
        sweep.forward(fp8, Truth.of(spec, index, sweep.device))
    print(sweep.report())
    assert not any(sweep.faults.values())
    assert not any(sweep.refused.values())


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_prequantised_tensors_agree_with_fp64(fp8: ForwardKernel, granularity: str, softcap: float) -> None:
    given = FP8_SPECS[1].replace(dtype="e4m3", descale=granularity, softcap=softcap)
    q, k, v, _ = Truth.of(FP8_SPECS[1], 1, DEVICE).inputs
    operands = fp8.prepare(Inputs.of(quantise(x, Recipe(granularity)) for x in (q, k, v)), given)
    result = fp8.run(operands)
    truth, _ = dense.dense_attention(*operands.tensors(torch.float64), given)
    assert result.out.dtype == torch.bfloat16
    assert dense.relative_l2(result.out, truth) <= fp8.declared_error


def test_a_float8_forward_works_with_another_backends_backward(fp8: ForwardKernel) -> None:
    from attnbench.backends.sdpa.flash import BACKEND

    spec = spec_of(256, 256, 64, 1, Mask())
    backward = next(k for k in BACKEND.kernels if isinstance(k, BackwardKernel) and k.name.endswith(":bf16"))
    truth = Truth.of(spec, 0, DEVICE)
    operands = fp8.prepare(Inputs.of(truth.inputs[:3]), spec)
    found = backward.run(Saved(operands, *fp8.run(operands)), truth.inputs[3])
    for each, wanted in zip(found, truth.gradients, strict=True):
        assert dense.relative_l2(each, wanted) <= 0.15


def test_the_refused_float8_backward_fails(fp8: ForwardKernel) -> None:
    spec = spec_of(256, 256, 64, 1, Mask())
    backward = BACKWARDS["flex:fp8"]
    assert "no gradients" in backward.refusals(spec, describe(DEVICE))[0]
    q, k, v, grad = Truth.of(spec, 0, DEVICE).inputs
    native = fp8.prepare(Inputs(q, k, v), spec).native
    leaves = [x.detach().requires_grad_() for x in (native.q, native.k, native.v)]
    lifted = replace(native, q=leaves[0], k=leaves[1], v=leaves[2])

    def gradients() -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            out, _ = flex._call(lifted, spec, torch.bfloat16)
        return torch.autograd.grad(out, leaves, grad)

    with pytest.raises(Exception, match=r"(?i)float8|fp8|not implemented|dtype|compile|subprocess|passmanager"):
        gradients()


@pytest.mark.parametrize(("name", "head_dim"), [("flex:bf16", 8), ("flex:fp8", 16)])
def test_refused_head_dimensions_fail(name: str, head_dim: int) -> None:
    forward = FORWARDS[name]
    spec = spec_of(256, 256, head_dim, 1, Mask(), direction="forward")
    assert any("head_dim" in reason for reason in forward.refusals(spec, describe(DEVICE)))
    truth = Truth.of(spec, 0, DEVICE)
    try:
        out = forward.run(forward.prepare(Inputs.of(truth.inputs[:3]), spec)).out
    except Exception:  # whatever the compiler says, it did not run
        return
    assert dense.relative_l2(out, truth.out) > 2 * forward.declared_error, "it runs and is right: no refusal is needed"
