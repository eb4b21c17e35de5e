"""``sage``: parts of both libraries as stand-ins of their signatures that quantise by formula and sum in FP64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

import pytest
import standins_fa as standins
import torch
from dense import dense_attention, dense_gradients, relative_l2
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import Problem, problems, tensors_of
from torch import Tensor

from attnbench.backends import reference, sage
from attnbench.errors import InputError
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import BackwardKernel, Inputs
from attnbench.kernels.execution import Execution
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec
from examples import examples

H200 = Device("cuda", "NVIDIA H200", (9, 0))
INT8, FP8 = sage.SageInt8Forward(), sage.SageFp8Forward()
LOG2_E = 1.44269504
PLACES = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]


def _blocks(x: Tensor, size: int) -> list[Tensor]:
    return list(x.split(size, dim=2))


def _int8(x: Tensor, scale: Tensor) -> Tensor:
    scaled = x / scale
    return (scaled + 0.5 * torch.where(scaled >= 0, 1, -1)).nan_to_num().trunc().to(torch.int8)


def _checked(q: Tensor, k: Tensor, layout: str, dims: tuple[int, ...]) -> None:
    assert layout == "HND"
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert q.shape[-1] in dims
    assert q.shape[-1] == k.shape[-1]
    assert q.stride(-1) == k.stride(-1) == 1


def per_block(dims: tuple[int, ...]):
    def quantise(q, k, BLKQ=128, BLKK=64, sm_scale=None, tensor_layout="HND"):  # noqa: N803
        """per_block_int8 of 1.0.6: the scale of the softmax and log2(e) go into Q before it is quantised."""
        _checked(q, k, tensor_layout, dims)
        found = []
        for x, size, factor in ((q, BLKQ, sm_scale * LOG2_E), (k, BLKK, 1.0)):
            parts = [part.float() * factor for part in _blocks(x, size)]
            scales = [part.abs().amax(dim=(2, 3), keepdim=True) / 127 for part in parts]
            found.append(torch.cat([_int8(part, s) for part, s in zip(parts, scales, strict=True)], 2).contiguous())
            found.append(torch.cat(scales, 2).contiguous())
        return found[0], found[1], found[2], found[3]

    return quantise


def int8_forward(causal: bool, dims: tuple[int, ...]):
    def forward(q, k, v, q_scale, k_scale, tensor_layout="HND", output_dtype=torch.float16):
        """Keys beyond the last count as scores of 0 where there is no causal mask: what the kernel does."""
        (b, h, sq, d), (hk, skv) = q.shape, k.shape[1:3]
        assert tensor_layout == "HND"
        assert q.dtype == k.dtype == torch.int8
        assert v.dtype == torch.float16
        assert d in dims
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert q_scale.shape == (b, h, -(-sq // 128), 1)
        assert k_scale.is_contiguous()
        blocks = -(-skv // 64)
        assert k_scale.numel() >= b * hk * blocks + causal  # the pointer may go one beyond
        assert torch.isfinite(k_scale).all()
        scales = k_scale.flatten()[: b * hk * blocks].view(b, hk, blocks, 1)
        wide_q = q.double() * q_scale.double().repeat_interleave(128, 2)[:, :, :sq]
        wide_k = k.double() * scales.double().repeat_interleave(64, 2)[:, :, :skv]
        group = h // hk
        scores = wide_q @ wide_k.repeat_interleave(group, 1).mT * math.log(2)
        if causal:
            assert sq == skv
            scores = scores.masked_fill(torch.ones(sq, skv).triu(1).bool(), -math.inf)
        else:
            scores = torch.cat([scores, scores.new_zeros(b, h, sq, -skv % 64)], -1)
        p = scores.softmax(-1)[..., :skv]
        return (p @ v.double().repeat_interleave(group, 1)).to(output_dtype)

    return forward


def per_thread_int8(q, k, km=None, BLKQ=128, WARPQ=32, BLKK=64, WARPK=64, sm_scale=None, tensor_layout="HND"):  # noqa: N803
    """quant_per_thread.py of 2.2, row by row as its two kernels index them."""
    _checked(q, k, tensor_layout, (64, 128))
    assert (BLKQ, WARPQ, BLKK, WARPK) == (64, 16, 128, 128)
    assert km.shape == (*k.shape[:2], 1, k.shape[-1])
    found = []
    for x, block, warp, threads in ((q, BLKQ, WARPQ, 8), (k - km, BLKK, WARPK, 4)):
        count = -(-(length := x.shape[2]) // block) * (block // warp) * threads
        data, scales = torch.empty(x.shape, dtype=torch.int8), torch.full((*x.shape[:2], count), math.nan)
        for program in range(count):
            base, thread = program // threads * warp, program % threads
            if threads == 8:
                rows = [base + i * 8 + thread for i in range(warp // 8)]
            else:
                rows = [base + i * 8 + thread * 2 + pair for pair in (0, 1) for i in range(warp // 8)]
            rows = [row for row in rows if row < length]
            part = x[:, :, rows].float()
            scale = (part.abs().amax(dim=(2, 3)) if rows else torch.zeros(x.shape[:2])) / 127 + 1e-7
            scales[:, :, program] = scale
            data[:, :, rows] = _int8(part, scale[..., None, None])
        found += [data, scales]
    return tuple(found)


def per_channel_fp8(v, tensor_layout="HND", scale_max=448.0, smooth_v=True):
    assert tensor_layout == "HND"
    assert not smooth_v
    assert v.shape[2] % 128 == 0
    assert v.stride(-1) == 1
    turned = v.float().mT
    places = torch.arange(v.shape[2]).view(-1, 16)[:, PLACES].flatten()
    amax = turned.abs().amax(-1)
    stored = (turned[..., places] * (scale_max / amax)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return stored.contiguous(), amax / scale_max, None


def fp8_forward(q, k, v, out, q_scale, k_scale, v_scale, layout, causal, granularity, sm_scale, return_lse):
    """CHECK_* of qk_int_sv_f8_cuda_sm90.cu, and its answer: an LSE to the base 2, of K without its mean."""
    (b, h, sq, d), (hk, skv) = q.shape, k.shape[1:3]
    assert (layout, granularity, return_lse) == (1, 3, 1)
    assert d in (64, 128)
    assert (q.dtype, k.dtype, v.dtype) == (torch.int8, torch.int8, torch.float8_e4m3fn)
    assert out.shape == q.shape
    assert out.dtype in (torch.bfloat16, torch.float16)
    assert all(x.is_contiguous() and x.dtype == torch.float32 for x in (q_scale, k_scale, v_scale))
    assert q_scale.shape == (b, h, -(-sq // 64) * 32)
    assert k_scale.shape == (b, hk, -(-skv // 128) * 4)
    assert v.shape == (b, hk, d, -(-skv // 128) * 128)
    assert v_scale.shape == (b, hk, d)
    assert sm_scale > 0
    row, column = torch.arange(sq), torch.arange(skv)
    wide_q = q.double() * q_scale.double()[:, :, row // 64 * 32 + row % 64 // 16 * 8 + row % 8, None]
    wide_k = k.double() * k_scale.double()[:, :, column // 128 * 4 + column % 8 // 2, None]
    places = torch.arange(v.shape[-1]).view(-1, 16)[:, PLACES].flatten()
    wide_v = torch.empty(v.shape, dtype=torch.float64)
    wide_v[..., places] = v.double() * v_scale.double()[..., None]
    group = h // hk
    scores = wide_q @ wide_k.repeat_interleave(group, 1).mT * sm_scale
    if causal:
        assert sq == skv
        scores = scores.masked_fill(torch.ones(sq, skv).triu(1).bool(), -math.inf)
    out.copy_(scores.softmax(-1) @ wide_v[..., :skv].mT.repeat_interleave(group, 1))
    return (scores.logsumexp(-1) * LOG2_E).float()


TRITON = {
    "sageattention": {},
    "sageattention__quant_per_block": {"per_block_int8": per_block((64, 128))},
    "sageattention__quant_per_block_hd96": {"per_block_int8_hd96": per_block((96,))},
    "sageattention__attn_qk_int8_per_block": {"forward": int8_forward(False, (64, 128))},
    "sageattention__attn_qk_int8_per_block_causal": {"forward": int8_forward(True, (64, 128))},
    "sageattention__attn_qk_int8_per_block_h96": {"forward": int8_forward(False, (96,))},
    "sageattention__attn_qk_int8_per_block_h96_causal": {"forward": int8_forward(True, (96,))},
}
BUILT = {
    "sageattention": {},
    "sageattention__triton": {},
    "sageattention__triton__quant_per_thread": {"per_thread_int8": per_thread_int8},
    "sageattention__quant": {"per_channel_fp8": per_channel_fp8},
    "sageattention__sm90_compile": {"qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf": fp8_forward},
}


@contextmanager
def library(version: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, standins.modules(**(TRITON if version == "1.0.6" else BUILT)):
        patch.setattr(metadata, "version", lambda _: version)
        patch.setattr(torch.version, "cuda", "13.0")
        forget()
        yield
    forget()


def forget() -> None:
    for kept in (sage._version, sage._function, sage._hopper_kernel):
        kept.cache_clear()


def test_a_call_that_cannot_be_captured_in_a_graph_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=70, head_dim=64)
    with library("2.2.0"):
        operands = FP8.prepare(Inputs.of(Problem(spec, "bhsd", False, 0).tensors()[:3]), spec)
        monkeypatch.setattr(sage, "recording", lambda: True)
        with pytest.raises(InputError, match="a CUDA graph cannot record"):
            FP8.run(operands)


KERNELS = [(INT8, "1.0.6"), (FP8, "2.2.0")]


@st.composite
def served_problems(draw: st.DrawFn) -> Problem:
    """Problems of the kinds that both kernels serve more often than not: square and causal, or whole blocks of keys."""
    problem = draw(problems(("bf16", "fp16")))
    if draw(st.booleans()):
        spec = problem.spec.replace(seqlen_kv=problem.spec.seqlen_q, mask=Mask(right=0))
    else:
        spec = problem.spec.replace(mask=Mask(), seqlen_kv=draw(st.sampled_from([64, 128, 192])))
    size = draw(st.sampled_from([spec.head_dim, 64, 80, 128]))
    spec = spec.replace(softcap=0.0, direction="forward", head_dim=size, seqlen_q=spec.seqlen_q)
    return Problem(spec, problem.layout, problem.strided, problem.seed)


@pytest.mark.parametrize(("kernel", "version"), KERNELS, ids=["int8", "int8-fp8"])
@given(problem=served_problems())
@settings(max_examples=examples(20, 200), deadline=None)
def test_the_kernel_agrees_with_exact_attention_on_its_quantised_operands(
    kernel, version: str, problem: Problem
) -> None:
    spec = problem.spec
    with library(version):
        assume(not kernel.refusals(spec, H200))
        q, k, v, _ = tensors_of(problem)
        before = [x.clone() for x in (q, k, v)]
        operands = kernel.prepare(Inputs(q, k, v), spec)
        result = kernel.run(operands)
    seen = operands.tensors(torch.float64)
    assert [x.shape for x in seen] == [q.shape, k.shape, v.shape]
    out, lse = dense_attention(*seen, spec)
    assert (result.out.dtype, result.out.shape) == (q.dtype, out.shape)
    assert relative_l2(result.out, out) <= 0.004
    if kernel is INT8:
        assert result.lse is None
        assert not kernel.rows["cuda"].lse
    else:
        assert (result.lse.dtype, result.lse.shape) == (torch.float32, lse.shape)
        torch.testing.assert_close(result.lse.double(), lse, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(x, old) for x, old in zip((q, k, v), before, strict=True))


@pytest.mark.parametrize(("kernel", "version"), KERNELS, ids=["int8", "int8-fp8"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_the_quantisation_error_is_within_the_declared_error(kernel, version: str, head_dim: int) -> None:
    spec = AttentionSpec.make(batch=1, heads=2, kv_heads=1, seqlen_q=320, head_dim=head_dim, mask=Mask(right=0))
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v = (torch.randn(1, h, 320, head_dim, generator=generator).bfloat16() for h in (2, 1, 1))
    with library(version):
        out = kernel.run(kernel.prepare(Inputs(q, k, v), spec)).out
    error = relative_l2(out, dense_attention(q, k, v, spec)[0])
    assert 0.1 * kernel.declared_error < error < kernel.declared_error


def test_the_following_backward_uses_the_forwards_inputs() -> None:
    """With a K far from zero: exp(S - LSE) sums to one only for the Q and K that made the log-sum-exp."""
    spec = AttentionSpec.make(batch=2, heads=4, kv_heads=2, seqlen_q=150, head_dim=40, mask=Mask(right=0),
                              dtype="fp16", direction="training")  # fmt: skip
    q, v = (torch.randn(2, h, 150, 40).to(torch.float16).requires_grad_() for h in (4, 2))
    k = (torch.randn(2, 2, 150, 40) + 5 * torch.randn(2, 2, 1, 40)).to(torch.float16).requires_grad_()
    grad = torch.randn(2, 4, 150, 40).to(torch.float16)
    backward = next(kernel for kernel in reference.BACKEND.kernels if isinstance(kernel, BackwardKernel))
    with library("2.2.0"):
        seen = FP8.prepare(Inputs(q.detach(), k.detach(), v.detach()), spec).tensors(torch.float64)
        out, _ = Execution(spec, FP8, backward)(Inputs(q, k, v))
        found = torch.autograd.grad(out, (q, k, v), grad)
    for got, want in zip(found, dense_gradients(*seen, grad, spec), strict=True):
        assert relative_l2(got, want) < 0.02
    assert "needs the log-sum-exp" in (backward.cannot_follow(INT8, H200) or "")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"head_dim": 136, "head_dim_v": 136}, "outside 1 to 128"),
        ({"softcap": 5.0}, "no softcap"),
        ({"mask": Mask(left=5, right=0)}, "no window mask"),
        ({"seqlen_q": 128, "mask": Mask(right=0)}, "no top-left alignment"),
        ({"seqlen_q": 128, "mask": Mask(right=0, alignment="bottom-right")}, "no bottom-right alignment"),
        ({"dtype": "e4m3", "descale": "head"}, "takes bf16, fp16 tensors"),
        ({"batch": 2**16, "seqlen_q": 1, "seqlen_kv": 64}, "takes at most"),
        ({"batch": 2**15, "seqlen_q": 2**10, "seqlen_kv": 2**10}, "indexes at most"),
        ({"batch": 2**15, "seqlen_q": 2**10, "head_dim": 8, "head_dim_v": 8}, "indexes at most"),
    ],
)
def test_both_kernels_refuse_unsupported_specs(changes: dict[str, object], sentence: str) -> None:
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=256, head_dim=64)
    for kernel, version in KERNELS:
        with library(version):
            assert kernel.refusals(spec, H200) == []
            assert sentence in " ".join(kernel.refusals(spec.replace(**changes), H200))
            assert kernel.refusals(spec, Device("cuda", "a V100", (7, 0)))


def test_each_kernel_refuses_specs_of_its_own() -> None:
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=256, seqlen_kv=192, head_dim=64)
    with library("1.0.6"):
        assert INT8.refusals(spec, H200) == []
        assert "blocks of 64" in INT8.refusals(spec.replace(seqlen_kv=200), H200)[0]
        assert INT8.refusals(spec.replace(seqlen_q=200, seqlen_kv=200, mask=Mask(right=0)), H200) == []
        assert "returns no log-sum-exp" in INT8.refusals(spec.replace(return_lse=True), H200)
        assert FP8.refusals(spec, H200) == ["is a kernel of sageattention 2.2, and 1.0.6 is installed"]
    with library("2.2.0"):
        assert INT8.refusals(spec, H200) == ["is a kernel of sageattention 1.0.6, and 2.2.0 is installed"]
        assert FP8.refusals(spec.replace(seqlen_kv=200), H200) == []
        assert "positive scale" in FP8.refusals(spec.replace(scale=-1.0), H200)[0]
        assert "exists only below" in FP8.refusals(spec, Device("cuda", "a B200", (10, 0)))[0]
