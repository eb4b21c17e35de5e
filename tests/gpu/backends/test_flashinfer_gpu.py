"""FlashInfer's FP8 prefill on a Hopper GPU: dense FP64, direct calls, evidence, lifted refusals.

The first call of a head dimension compiles for a minute or two, unless the library was compiled beforehand.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from gpu_times import in_turns
from on_gpu import (
    DEVICE,
    descales_are_used,
    is_wrong_at_a_scale_below_zero,
    many_elements_agree,
    quantising_forward_agrees,
)
from sweep import Truth
from torch.profiler import ProfilerActivity, profile

from attnbench import AttentionSpec, Mask
from attnbench.backends import flashinfer
from attnbench.kernels.contract import Inputs

pytestmark = pytest.mark.skipif(
    not flashinfer.BACKEND.availability().ok, reason=str(flashinfer.BACKEND.availability().reason)
)
KERNEL = flashinfer.FlashInferForward()
FLOOR = 0.05  # beside Q, K and V only P in e4m3 and the accumulator are left
END = "bottom-right"
HEADS = [(64, 64, 1), (80, 80, 4), (96, 96, 1), (128, 128, 8), (128, 64, 2), (192, 192, 2), (256, 256, 1), (5, 7, 1)]
LENGTHS = [(256, 256), (257, 257), (130, 333), (333, 130), (1, 200), (77, 1), (700, 2)]
MASKS = [Mask(), Mask(right=0), Mask(right=0, alignment=END)]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_it_refuses_or_agrees_with_dense_fp64(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Causal masks are what 0.6 got wrong, and (333, 130) leaves rows without a key."""
    made = [
        AttentionSpec.make(batch=2, heads=8, kv_heads=8 // group, seqlen_q=sq, seqlen_kv=skv, head_dim=d, head_dim_v=dv,
                           dtype=dtype, mask=mask, scale=d**-0.5 * (1.0 if i % 5 else 0.7))
        for i, ((sq, skv), mask, (d, dv, group)) in enumerate(itertools.product(LENGTHS, MASKS, HEADS))
    ]  # fmt: skip
    with capsys.disabled():
        quantising_forward_agrees(KERNEL, list(dict.fromkeys(made))[:: 1 if dtype == "bf16" else 4], FLOOR, print)


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_descales_of_random_size_are_used(kv_heads: int) -> None:
    descales_are_used(KERNEL, kv_heads, lengths=(300, 300), mask=Mask(right=0))


@pytest.mark.parametrize("length", [4096, 16384])
def test_our_layer_costs_little(length: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The library called directly with operands made beforehand; ours also turns the log-sum-exp into a natural one."""
    spec = AttentionSpec.make(batch=16384 // length, heads=16, seqlen_q=length, head_dim=128, mask=Mask(right=0))
    q, k, v = (torch.randn(spec.batch, 16, length, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    operands = KERNEL.prepare(Inputs(q, k, v), spec)
    made = operands.native
    ours, theirs = in_turns([
        lambda: KERNEL.run(operands),
        lambda: flashinfer._prefill()(made.q, made.k, made.v, *made.scales, o_dtype=torch.bfloat16, causal=True,
                                      sm_scale=spec.scale, backend="fa3", return_lse=True),
    ])  # fmt: skip
    with capsys.disabled():
        tflops = spec.flops / theirs / 1e9
        print(f"\n{length}: ours {ours:.4f} ms, direct {theirs:.4f} ms ({tflops:.0f} TFLOPS), {ours / theirs - 1:+.2%}")
    assert ours <= 1.03 * theirs


def test_the_profiler_shows_the_fp8_kernel_on_the_current_stream() -> None:
    spec = AttentionSpec.make(batch=2, heads=8, seqlen_q=512, head_dim=128)
    operands = KERNEL.prepare(Inputs.of(Truth.of(spec, 0, DEVICE).inputs[:3]), spec)
    want = KERNEL.run(operands).out
    with profile(activities=[ProfilerActivity.CUDA]) as seen, torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        got = KERNEL.run(operands).out
        torch.cuda.synchronize()
    assert torch.equal(got, want)
    names = [event.key for event in seen.key_averages()]
    assert any(re.search(KERNEL.evidence["cuda"], name) for name in names), names


def test_a_scale_that_is_not_positive_is_refused_because_the_answer_is_wrong() -> None:
    is_wrong_at_a_scale_below_zero(KERNEL)


def test_windows_and_two_head_dims_are_refused_because_the_library_asserts() -> None:
    x = torch.zeros(64, 2, 64, device=DEVICE).to(torch.float8_e4m3fn)
    with pytest.raises(AssertionError):
        flashinfer._prefill()(x, x, x, o_dtype=torch.bfloat16, window_left=5, backend="fa3")
    wide = torch.zeros(64, 2, 128, device=DEVICE).to(torch.float8_e4m3fn)
    with pytest.raises(AssertionError):
        flashinfer._prefill()(x, x, wide, o_dtype=torch.bfloat16, backend="fa3")


def test_more_than_2_to_the_31_elements() -> None:
    many_elements_agree([KERNEL])
