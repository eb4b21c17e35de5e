"""Results and refusals that both backends on cuDNN's attention share, with stand-ins of their libraries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from agreement import assert_both_passes_agree
from dense import dense_attention, dense_gradients, relative_l2
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from packed import Documents, answers, documents
from problems import Problem, problems, tensors_of
from standins_cudnn import install_front_end
from standins_te import install_transformer_engine

from attnbench.backends.cudnn import backend as cudnn
from attnbench.backends.te import backend as te
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import Backend, BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.problem.fp8 import Recipe, quantise
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec
from examples import every_pair, examples

H200 = Device("cuda", "NVIDIA H200", (9, 0))
CAUSAL, END = Mask(right=0), Mask(right=0, alignment="bottom-right")
SPEC = AttentionSpec.make(batch=2, heads=4, kv_heads=2, seqlen_q=96, head_dim=64)
both = pytest.mark.parametrize("backend", [cudnn.BACKEND, te.BACKEND], ids=lambda backend: backend.name)


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    install_front_end(monkeypatch)
    install_transformer_engine(monkeypatch)


def forward_of(backend: Backend, precision: str) -> ForwardKernel:
    name = f"{backend.name}:{precision}"
    return next(k for k in backend.kernels if isinstance(k, ForwardKernel) and k.name == name)


def backward_of(backend: Backend, precision: str) -> BackwardKernel:
    name = f"{backend.name}:{precision}"
    return next(k for k in backend.kernels if isinstance(k, BackwardKernel) and k.name == name)


@both
@given(problem=problems(("bf16", "fp16")))
def test_sixteen_bit_kernels_refuse_or_agree_with_fp64_in_both_passes(backend: Backend, problem: Problem) -> None:
    forward, backward = forward_of(backend, problem.spec.dtype), backward_of(backend, problem.spec.dtype)
    assume(forward.refusals(problem.spec, H200) == [])
    assume(assert_both_passes_agree(forward, backward, problem, H200))


MASKS = st.sampled_from([Mask(), CAUSAL, END, Mask(9, 0), Mask(5, 3, "bottom-right")])
PADDINGS = st.sampled_from([None, None, "left", "right"])


@both
@given(documents(70, MASKS, heads=(4, 2), padding=PADDINGS))
@settings(max_examples=examples(20, 100))
def test_sequences_of_a_batch_have_the_results_that_they_have_alone(backend: Backend, batch: Documents) -> None:
    """Both serve sequences with as many keys as queries only; TransformerEngine, packed ones and their forward only."""
    batch = replace(batch, lengths=tuple((max(pair), max(pair)) for pair in batch.lengths), head_dim_v=40)
    forward, backward = forward_of(backend, "bf16"), backward_of(backend, "bf16")
    if backend is te.BACKEND:
        batch, backward = replace(batch, padding=None), None
    for found, alone in zip(answers(batch, forward, backward), batch.run_alone(forward, backward), strict=True):
        for x, y in zip(found, alone, strict=True):
            torch.testing.assert_close(x.float(), y.float(), rtol=1e-2, atol=1e-3)


SIZES = [
    {"head_dim": 128, "seqlen_q": 160},
    {"head_dim": 128, "seqlen_q": 160, "mask": CAUSAL},
    {"head_dim": 128, "seqlen_q": 160, "dtype": "fp16", "kv_heads": 1},
    {"head_dim": 128, "seqlen_q": 80, "seqlen_kv": 150, "mask": CAUSAL},
    {"head_dim": 128, "seqlen_q": 144, "seqlen_kv": 77, "mask": CAUSAL},
    {"head_dim": 64, "seqlen_q": 160, "mask": CAUSAL},
    {"head_dim": 80, "seqlen_q": 160, "scale": 0.2},
    {"head_dim": 96, "head_dim_v": 64, "seqlen_q": 160, "scale": 0.2},
]


@both
@pytest.mark.parametrize(("sizes", "spread"), every_pair(SIZES, [1.0, 1e-3]))
def test_fp8_is_within_its_declared_error_from_the_first_step(
    backend: Backend, sizes: dict[str, object], spread: float
) -> None:
    spec = AttentionSpec.make(**{"batch": 2, "heads": 4, "kv_heads": 2, "direction": "training", **sizes})
    forward, backward = forward_of(backend, "fp8"), backward_of(backend, "fp8")
    q, k, v, grad = tensors_of(Problem(spec, "bshd", True, 3))
    v, grad = v * spread, grad * (0.1 / spread)
    assert forward.refusals(spec, H200) == backward.refusals(spec, H200) == []
    out, _ = dense_attention(q, k, v, spec)
    truth = dense_gradients(q, k, v, grad, spec)
    for _ in range(3):
        operands = forward.prepare(Inputs(q, k, v), spec)
        result = forward.run(operands)
        assert result.out.dtype == q.dtype
        assert relative_l2(result.out, out) <= forward.declared_error
        _, lse = dense_attention(*operands.tensors(torch.float64), spec)
        torch.testing.assert_close(result.lse.double(), lse, atol=1e-3, rtol=1e-3)
        for each, wanted in zip(backward.run(Saved(operands, *result), grad), truth, strict=True):
            assert (each.shape, each.dtype) == (wanted.shape, q.dtype)
            assert relative_l2(each, wanted) <= backward.declared_error


@both
def test_tensors_quantised_beforehand_keep_their_descales(backend: Backend) -> None:
    forward = forward_of(backend, "fp8")
    q, k, v, _ = tensors_of(Problem(SPEC, "bhsd", False, 0))
    quantised = [quantise(x * factor, Recipe("tensor")) for x, factor in ((q, 0.3), (k, 7.0), (v, 50.0))]
    spec = SPEC.replace(dtype="e4m3", descale="tensor")
    assert forward.refusals(spec, H200) == []
    result = forward.run(forward.prepare(Inputs.of(quantised), spec))
    assert result.out.dtype == torch.bfloat16
    truth, _ = dense_attention(*(x.dequantised(torch.float64) for x in quantised), spec)
    assert relative_l2(result.out, truth) <= forward.declared_error
    assert "per head" in "; ".join(forward.refusals(spec.replace(descale="head"), H200))
