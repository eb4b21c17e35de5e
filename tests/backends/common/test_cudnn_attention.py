"""What both backends that call cuDNN's attention answer and refuse alike, each on a stand-in of its library."""

from __future__ import annotations

import pytest
import torch
from agreement import both_passes_agree
from dense import dense_attention, dense_gradients, relative_l2
from hypothesis import assume, given
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
from examples import every_pair

H200 = Device("cuda", "NVIDIA H200", (9, 0))
B200 = Device("cuda", "NVIDIA B200", (10, 0))
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
def test_sixteen_bits_refuse_or_agree_with_the_truth_in_both_passes(backend: Backend, problem: Problem) -> None:
    forward, backward = forward_of(backend, problem.spec.dtype), backward_of(backend, problem.spec.dtype)
    assume(forward.refusals(problem.spec, H200) == [])
    assume(both_passes_agree(forward, backward, problem, H200))


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
def test_fp8_stays_within_its_declared_error_from_the_first_step_on(
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


REFUSED = [
    ("bf16", {}, B200, "9.x only"),
    ("bf16", {"softcap": 2.0}, H200, "softcap"),
    ("fp8", {"head_dim": 272, "head_dim_v": 272}, H200, "head_dim 272 is outside 16 to"),
    ("bf16", {"seqlen_q": 97, "mask": Mask(left=90, right=20)}, H200, "as many keys as queries"),
    ("bf16", {"seqlen_q": 97, "mask": Mask(right=5, alignment="bottom-right")}, H200, "as many keys as queries"),
    ("bf16", {"seqlen_q": 97, "mask": END}, H200, "see no key"),
    ("fp8", {}, B200, "9.x only"),
    ("fp8", {"seqlen_q": 9, "mask": END}, H200, "no bottom-right alignment"),
    ("fp8", {"head_dim": 72, "head_dim_v": 72}, H200, "no multiple of 16"),
]
OF_ONE = [
    (te.BACKEND, "fp8", {"mask": Mask(left=5, right=0)}, H200, "no window mask"),
    (cudnn.BACKEND, "fp8", {"seqlen_q": 97, "mask": Mask(left=90, right=20)}, H200, "as many keys as queries"),
    (cudnn.BACKEND, "bf16", {"scale": -0.1}, H200, "a scale above 0"),
    (cudnn.BACKEND, "fp8", {"scale": 0.0}, H200, "a scale above 0"),
]


@pytest.mark.parametrize(
    ("backend", "precision", "changes", "device", "reason"),
    [*((backend, *row) for backend in (cudnn.BACKEND, te.BACKEND) for row in REFUSED), *OF_ONE],
)
def test_refusals_of_both_passes(
    backend: Backend, precision: str, changes: dict[str, object], device: Device, reason: str
) -> None:
    spec = SPEC.replace(**changes)
    for kernel in (forward_of(backend, precision), backward_of(backend, precision)):
        assert reason in "; ".join(kernel.refusals(spec, device))


@both
@pytest.mark.parametrize(
    ("changes", "reason"), [({"seqlen_q": 1}, "single query"), ({"head_dim_v": 80}, "not its own")]
)
def test_what_the_fp8_forward_alone_lacks(backend: Backend, changes: dict[str, object], reason: str) -> None:
    assert forward_of(backend, "fp8").refusals(SPEC, H200) == []
    assert reason in "; ".join(forward_of(backend, "fp8").refusals(SPEC.replace(**changes), H200))
    assert forward_of(backend, "bf16").refusals(SPEC.replace(**changes), H200) == []


def test_windows_without_a_left_side_have_more_queries_than_keys_with_the_front_end_alone() -> None:
    spec = SPEC.replace(seqlen_q=97, mask=Mask(right=5))
    for kernel_of in (forward_of, backward_of):
        assert kernel_of(cudnn.BACKEND, "bf16").refusals(spec, H200) == []
        assert "as many keys as queries" in "; ".join(kernel_of(te.BACKEND, "bf16").refusals(spec, H200))
