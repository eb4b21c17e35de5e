"""FlashInfer's FP8 prefill on a Hopper GPU: dense FP64, and refusals lifted.

The first call of a head dimension compiles for a minute or two, unless the library was compiled beforehand.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from on_gpu import (
    DEVICE,
    descales_are_used,
    is_wrong_at_a_scale_below_zero,
    many_elements_agree,
    quantising_forward_agrees,
)

from attnbench import AttentionSpec, Mask
from attnbench.backends import flashinfer

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
