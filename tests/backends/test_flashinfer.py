"""``flashinfer``: FP8 prefill through a function of 0.7's signature that sums in FP64 and checks what the C++ takes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import standins_fa as standins
import torch
from agreement import assert_descales_are_used, assert_quantised_attention_agrees
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import Problem, problems

from attnbench.backends import flashinfer
from attnbench.kernels.capabilities import Device
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

H200 = Device("cuda", "NVIDIA H200", (9, 0))
KERNEL = flashinfer.FlashInferForward()
SPEC = AttentionSpec.make(batch=2, heads=4, kv_heads=2, seqlen_q=17, seqlen_kv=30, head_dim=64)


def single_prefill_with_kv_cache(
    q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, packed_custom_mask=None,
    causal=False, kv_layout="NHD", pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None,
    window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None, backend="auto", return_lse=False,
    kv_cache_sf=None, k_scale=None, v_scale=None,
):  # fmt: skip
    """single_prefill_fp8_sm90.cu behind flashinfer/prefill.py: causal is bottom-right, the LSE to the base 2."""
    neutral = (custom_mask, packed_custom_mask, logits_soft_cap, rope_scale, rope_theta, kv_cache_sf, k_scale, v_scale)
    assert neutral == (None,) * 8
    assert (kv_layout, pos_encoding_mode, use_fp16_qk_reduction, window_left) == ("NHD", "NONE", False, -1)
    assert (backend, return_lse, o_dtype) == ("fa3", True, torch.bfloat16)
    (sq, h, d), (skv, hk, dk) = q.shape, k.shape
    assert q.dtype == k.dtype == v.dtype == torch.float8_e4m3fn
    assert d == dk
    assert v.shape == k.shape
    assert d in (64, 128, 256)
    assert h % hk == 0
    assert h <= 65535
    assert sm_scale > 0
    for x in (q, k, v):
        assert x.stride(-1) == 1
        assert all(stride > 0 and stride % 16 == 0 for stride in x.stride()[:-1]), x.stride()
        assert x.data_ptr() % 16 == 0
    for scale, heads in ((scale_q, h), (scale_k, hk), (scale_v, hk)):
        assert scale.dtype == torch.float32
        assert scale.shape == (heads,)
        assert scale.is_contiguous()
    wide = [(x.double() * s.double()[:, None]).transpose(0, 1)[None] for x, s in
            zip((q, k, v), (scale_q, scale_k, scale_v), strict=True)]  # fmt: skip
    sees = standins.bottom_right(sq, skv, -1, 0 if causal else -1)
    out, lse = standins.dense(*wide, sees, sm_scale, 0.0)
    return out[0].transpose(0, 1).bfloat16().contiguous(), (lse[0].mT / math.log(2)).float().contiguous()


@pytest.fixture(autouse=True, scope="module")
def library() -> Iterator[None]:
    found = {"flashinfer": {}, "flashinfer__prefill": {"single_prefill_with_kv_cache": single_prefill_with_kv_cache}}
    with standins.modules(**found):
        flashinfer._prefill.cache_clear()
        flashinfer._prefill()
    yield
    flashinfer._prefill.cache_clear()


@given(problems(("bf16", "fp16")), st.booleans())
@settings(max_examples=80, deadline=None)
def test_the_kernel_agrees_with_exact_attention_on_its_quantised_operands(problem: Problem, causal: bool) -> None:
    mask = Mask(right=0, alignment=problem.spec.mask.alignment) if causal else Mask()
    spec = problem.spec.replace(direction="forward", softcap=0.0, mask=mask)
    assume(not KERNEL.refusals(spec, H200))
    assert_quantised_attention_agrees(KERNEL, spec, problem)


@given(st.sampled_from(["tensor", "head"]), st.sampled_from([(80, 80), (64, 16), (8, 130)]), st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_descales_of_any_size_are_used(granularity: str, dims: tuple[int, int], seed: int) -> None:
    spec = SPEC.replace(head_dim=dims[0], head_dim_v=dims[1], dtype="e4m3", descale=granularity)
    assert KERNEL.refusals(spec, H200) == []
    assert_descales_are_used(KERNEL, spec, seed)
