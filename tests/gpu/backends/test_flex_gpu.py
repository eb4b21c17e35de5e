"""Compiled FlexAttention on a GPU: 16 bits with its backward, and float8, against dense FP64."""

from __future__ import annotations

import re
from dataclasses import replace

import dense
import pytest
import torch
from sweep import Sweep, Truth
from torch.profiler import ProfilerActivity, profile

from attnbench import AttentionSpec, Mask
from attnbench.backends.flex import backend as flex
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.kernels.devices import describe
from attnbench.problem.fp8 import Recipe, quantise

FORWARDS = {k.name: k for k in flex.BACKEND.kernels if isinstance(k, ForwardKernel)}
BACKWARDS = {k.name: k for k in flex.BACKEND.kernels if isinstance(k, BackwardKernel)}
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


def test_16_bits_agree_with_dense_fp64(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweep(torch.device("cuda", 0))
    for index, spec in enumerate(SPECS):
        truth, name = Truth.of(spec, index, sweep.device), f"flex:{spec.dtype}"
        ran = sweep.forward(FORWARDS[name], truth)
        if ran is not None and spec.training:
            saved = Saved(ran[0], *ran[1])
            sweep.backward(BACKWARDS[name], truth, saved)
            if index == 1:  # the graph stays: a backward may be timed more than once
                sweep.backward(BACKWARDS[name], truth, saved)
    with capsys.disabled():
        print(f"\n{sweep.report()}")
    assert not any(sweep.faults.values())
    assert not any(sweep.refused.values())


def test_float8_agrees_with_dense_fp64(capsys: pytest.CaptureFixture[str]) -> None:
    """The log-sum-exp too is held to what eight bits leave of it."""
    sweep = Sweep(torch.device("cuda", 0))
    forward = FORWARDS["flex:fp8"]
    if forward.refusals(FP8_SPECS[0], describe(sweep.device)):
        pytest.skip("this GPU has no FP8 FlexAttention")
    for index, spec in enumerate(FP8_SPECS):
        sweep.forward(forward, Truth.of(spec, index, sweep.device))
    with capsys.disabled():
        print(f"\n{sweep.report()}")
    assert not any(sweep.faults.values())
    assert not any(sweep.refused.values())


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_tensors_quantised_beforehand(granularity: str, softcap: float) -> None:
    device = torch.device("cuda", 0)
    given = FP8_SPECS[1].replace(dtype="e4m3", descale=granularity, softcap=softcap)
    forward = FORWARDS["flex:fp8"]
    if forward.refusals(given, describe(device)):
        pytest.skip("this GPU has no FP8 FlexAttention")
    q, k, v, _ = Truth.of(FP8_SPECS[1], 1, device).inputs
    operands = forward.prepare(Inputs.of(quantise(x, Recipe(granularity)) for x in (q, k, v)), given)
    result = forward.run(operands)
    truth, _ = dense.dense_attention(*operands.tensors(torch.float64), given)
    assert result.out.dtype == torch.bfloat16
    assert dense.relative_l2(result.out, truth) <= forward.declared_error


def test_float8_serves_a_backward_of_another_backend() -> None:
    from attnbench.backends.sdpa.flash import BACKEND

    device = torch.device("cuda", 0)
    spec = spec_of(256, 256, 64, 1, Mask())
    forward = FORWARDS["flex:fp8"]
    if forward.refusals(spec, describe(device)):
        pytest.skip("this GPU has no FP8 FlexAttention")
    backward = next(k for k in BACKEND.kernels if isinstance(k, BackwardKernel) and k.name.endswith(":bf16"))
    truth = Truth.of(spec, 0, device)
    operands = forward.prepare(Inputs.of(truth.inputs[:3]), spec)
    found = backward.run(Saved(operands, *forward.run(operands)), truth.inputs[3])
    for each, wanted in zip(found, truth.gradients, strict=True):
        assert dense.relative_l2(each, wanted) <= 0.15


def test_the_refused_float8_backward_fails() -> None:
    device = torch.device("cuda", 0)
    spec = spec_of(256, 256, 64, 1, Mask())
    forward, backward = FORWARDS["flex:fp8"], BACKWARDS["flex:fp8"]
    if forward.refusals(spec, describe(device)):
        pytest.skip("this GPU has no FP8 FlexAttention")
    assert "no gradients" in backward.refusals(spec, describe(device))[0]
    q, k, v, grad = Truth.of(spec, 0, device).inputs
    native = forward.prepare(Inputs(q, k, v), spec).native
    leaves = [x.detach().requires_grad_() for x in (native.q, native.k, native.v)]
    lifted = replace(native, q=leaves[0], k=leaves[1], v=leaves[2])

    def gradients() -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            out, _ = flex._call(lifted, spec, torch.bfloat16)
        return torch.autograd.grad(out, leaves, grad)

    with pytest.raises(Exception, match=r"(?i)float8|fp8|not implemented|dtype|compile|subprocess"):
        gradients()


@pytest.mark.parametrize(("name", "head_dim"), [("flex:bf16", 8), ("flex:fp8", 16)])
def test_refused_head_dimensions_fail(name: str, head_dim: int) -> None:
    device = torch.device("cuda", 0)
    forward = FORWARDS[name]
    spec = spec_of(256, 256, head_dim, 1, Mask(), direction="forward")
    assert any("head_dim" in reason for reason in forward.refusals(spec, describe(device)))
    truth = Truth.of(spec, 0, device)
    try:
        out = forward.run(forward.prepare(Inputs.of(truth.inputs[:3]), spec)).out
    except Exception:  # whatever the compiler says, it did not run
        return
    assert dense.relative_l2(out, truth.out) > 2 * forward.declared_error, "it runs and is right: no refusal is needed"


@pytest.mark.parametrize("name", FORWARDS)
def test_the_profiler_shows_the_compiled_kernels(name: str) -> None:
    device = torch.device("cuda", 0)
    forward, backward = FORWARDS[name], None if name == "flex:fp8" else BACKWARDS[name]
    spec = SPECS[0] if name == "flex:bf16" else SPECS[-1] if name == "flex:fp16" else FP8_SPECS[0]
    if forward.refusals(spec, describe(device)):
        pytest.skip("this GPU has no FP8 FlexAttention")
    q, k, v, grad = Truth.of(spec, 0, device).inputs
    operands = forward.prepare(Inputs(q, k, v), spec)
    saved = Saved(operands, *forward.run(operands))
    calls = [(forward, lambda: forward.run(operands))]
    if backward is not None:
        backward.run(saved, grad)
        calls.append((backward, lambda: backward.run(saved, grad)))
    for kernel, call in calls:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        names = {event.key for event in seen.key_averages()}
        assert any(re.search(kernel.evidence["cuda"], each) for each in names), sorted(names)
