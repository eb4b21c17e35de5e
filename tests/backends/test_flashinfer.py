"""``flashinfer``: FP8 prefill through a function of 0.7's signature that sums in FP64 and checks what the C++ takes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import standins_fa as standins
import torch
from agreement import descales_are_used, quantised_attention_agrees
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import Problem, problems
from torch import Tensor

from attnbench.backends import flashinfer
from attnbench.errors import InputError
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import BackwardKernel, Inputs
from attnbench.problem.fp8 import Recipe, quantise
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
def test_it_computes_exact_attention_on_what_it_quantised(problem: Problem, causal: bool) -> None:
    mask = Mask(right=0, alignment=problem.spec.mask.alignment) if causal else Mask()
    spec = problem.spec.replace(direction="forward", softcap=0.0, mask=mask)
    assume(not KERNEL.refusals(spec, H200))
    quantised_attention_agrees(KERNEL, spec, problem)


@given(st.sampled_from(["tensor", "head"]), st.sampled_from([(80, 80), (64, 16), (8, 130)]), st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_descales_of_any_size_are_used(granularity: str, dims: tuple[int, int], seed: int) -> None:
    spec = SPEC.replace(head_dim=dims[0], head_dim_v=dims[1], dtype="e4m3", descale=granularity)
    assert KERNEL.refusals(spec, H200) == []
    descales_are_used(KERNEL, spec, seed)


def test_contiguous_tensors_are_not_copied_and_others_are() -> None:
    def folded(x: Tensor) -> bool:
        return flashinfer._folded(x).data_ptr() == x.data_ptr()

    x = torch.zeros(2, 3, 40, 64).to(torch.float8_e4m3fn)
    assert folded(x)
    assert folded(x[:, :, :7])  # keys cut off
    assert folded(x[:1].transpose(1, 2).contiguous().transpose(1, 2))
    assert not folded(x.transpose(1, 2).contiguous().transpose(1, 2))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"softcap": 5.0}, "no softcap"),
        ({"head_dim": 264, "head_dim_v": 264}, "outside 1 to 256"),
        ({"mask": Mask(left=5, right=0)}, "no window mask"),
        ({"seqlen_q": 99, "mask": Mask(right=0)}, "no top-left alignment for 99 queries"),
        ({"scale": -1.0}, "positive scale"),
        ({"batch": 2**14}, "takes at most 65535 heads"),
        ({"dtype": "e5m2", "descale": "head"}, "not e5m2"),
        ({"dtype": "e4m3", "descale": "token"}, "not per token"),
    ],
)
def test_refusals(changes: dict[str, object], sentence: str) -> None:
    assert KERNEL.refusals(SPEC, H200) == []
    assert KERNEL.refusals(SPEC.replace(mask=Mask(right=0)), H200) == []
    assert KERNEL.refusals(SPEC.replace(seqlen_q=99, mask=Mask(right=0, alignment="bottom-right")), H200) == []
    assert sentence in " ".join(KERNEL.refusals(SPEC.replace(**changes), H200))
    for device in (Device("cuda", "an A100", (8, 0)), Device("cuda", "a B200", (10, 0)), Device("cpu", "CPU")):
        assert KERNEL.refusals(SPEC, device)
    assert not any(isinstance(kernel, BackwardKernel) for kernel in flashinfer.BACKEND.kernels)


@pytest.mark.parametrize("recipe", [Recipe("head", "e5m2"), Recipe("token"), Recipe("head", rotation="hadamard")])
def test_tensors_that_are_not_plain_are_an_error(recipe: Recipe) -> None:
    x = quantise(torch.randn(1, 1, 8, 16), recipe, rotate=True)
    with pytest.raises(InputError, match=r"FlashInfer (takes|computes)"):
        KERNEL.prepare(Inputs(x, x, x), AttentionSpec.make(batch=1, heads=1, seqlen_q=8, head_dim=16))
