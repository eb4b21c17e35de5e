"""cuDNN's graphs behind the contract, against a stand-in of its front end: nodes, scales, bounds, cache, refusals."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from dense import dense_attention, dense_gradients, probabilities, relative_l2
from hypothesis import given
from hypothesis import strategies as st
from problems import Problem, tensors_of
from standins_cudnn import CUDNN, PyGraph, install_front_end
from standins_graph import LARGEST

from attnbench.backends.cudnn import backend as cudnn
from attnbench.backends.cudnn.scales import gradient_bounds
from attnbench.dispatch.sequences import sizes_of
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.problem.fp8 import Recipe, quantise
from attnbench.problem.lengths import packed
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

H200 = Device("cuda", "NVIDIA H200", (9, 0))
FORWARDS = {k.name: k for k in cudnn.BACKEND.kernels if isinstance(k, ForwardKernel)}
BACKWARDS = {k.name: k for k in cudnn.BACKEND.kernels if isinstance(k, BackwardKernel)}
FP8, FP8_BACKWARD = FORWARDS["cudnn:fp8"], BACKWARDS["cudnn:fp8"]
SPEC = AttentionSpec.make(batch=2, heads=4, kv_heads=2, seqlen_q=96, head_dim=64)
CAUSAL = Mask(right=0)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    install_front_end(monkeypatch)


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 4]), st.sampled_from([Mask(), CAUSAL]),
       st.sampled_from([0.01, 1.0, 30.0]), st.booleans())  # fmt: skip
def test_no_gradient_exceeds_its_bound(seed: int, group: int, mask: Mask, spread: float, outliers: bool) -> None:
    spec = AttentionSpec.make(batch=1, heads=4, kv_heads=4 // group, seqlen_q=40, seqlen_kv=56, head_dim=16, mask=mask,
                              dtype="fp32", scale=-0.4)  # fmt: skip
    q, k, v, grad = tensors_of(Problem(spec, "bhsd", False, seed))
    q = q * spread
    if outliers:
        v[0, 0, 0] *= 100
        grad[0, -1, -1] *= 100
    quantised = [quantise(x, Recipe("tensor")) for x in (q, k, v)]
    bounds = gradient_bounds(*quantised, grad, spec)
    seen = [x.dequantised(torch.float64) for x in quantised]
    (p, _), wide_v = probabilities(*seen[:2], spec), seen[2].repeat_interleave(group, 1)
    ds = p * (grad.double() @ wide_v.mT - (grad.double() * (p @ wide_v)).sum(-1, keepdim=True)) * spec.scale
    for bound, true in zip(bounds, (ds, *dense_gradients(*seen, grad, spec)), strict=True):
        assert bound.shape == (1, 1, 1, 1)
        assert true.abs().max() <= bound.item()


def test_bounds_leave_e5m2_its_digits() -> None:
    spec = AttentionSpec.make(batch=1, heads=4, kv_heads=2, seqlen_q=512, head_dim=128, direction="training")
    q, k, v, grad = tensors_of(Problem(spec, "bhsd", False, 0))
    bounds = gradient_bounds(*(quantise(x, Recipe("tensor")) for x in (q, k, v)), grad, spec)
    for bound, each in zip(bounds[1:], dense_gradients(q, k, v, grad, spec), strict=True):
        typical = each.pow(2).mean().sqrt().item() * LARGEST[torch.float8_e5m2] / bound.item()
        assert typical > 2**-10  # e5m2's smallest normal number is 2^-14


def test_a_graph_is_built_once_for_each_problem() -> None:
    forward = FORWARDS["cudnn:bf16"]
    before = PyGraph.built
    for seed in (0, 1):
        q, k, v, _ = tensors_of(Problem(SPEC, "bhsd", False, seed))
        forward.run(forward.prepare(Inputs(q, k, v), SPEC))
    assert PyGraph.built == before + 1
    spec = SPEC.replace(mask=CAUSAL)
    forward.run(forward.prepare(Inputs(q, k, v), spec))
    assert PyGraph.built == before + 2
    forward.run(forward.prepare(Inputs.of(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), spec))
    assert PyGraph.built == before + 3
    assert cudnn.graph_of.cache_info().maxsize is not None


def test_batches_of_other_lengths_share_a_graph() -> None:
    """The spec rounds their number, the longest and the total up; sequences without a token fill up the batch."""
    forward, before = cudnn.CudnnForward("bf16"), PyGraph.built
    for sizes in ((20, 30, 9), (31, 0, 5, 25), (17, 17, 26)):
        starts = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        x = [torch.randn(1, heads, sum(sizes), 64).bfloat16() for heads in (4, 2, 2)]
        lengths = packed(x[0], x[1], starts, starts, 31, 31)
        spec = SPEC.replace(**sizes_of(lengths, 1, sum(sizes), sum(sizes)))
        assert (spec.batch, forward.refusals(spec, H200)) == (4 if len(sizes) == 4 else 3, [])
        spec = spec.replace(batch=4)
        out = forward.run(forward.prepare(Inputs(*x, lengths), spec)).out
        for own in lengths.sequences(spec, x[0], x[1]):
            exact = dense_attention(own.q(x[0]), own.kv(x[1]), own.kv(x[2]), own.spec)[0]
            assert relative_l2(own.q(out), exact) < 0.01
    assert PyGraph.built == before + 1


def test_two_threads_share_a_graph_and_have_separate_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    execute = PyGraph.execute

    def watched(self: PyGraph, buffers: object, workspace: object, *, handle: object) -> None:
        assert handle.stream == 7
        seen.append(handle.number)
        execute(self, buffers, workspace, handle=handle)

    monkeypatch.setattr(PyGraph, "execute", watched)
    q, k, v, _ = tensors_of(Problem(SPEC, "bhsd", False, 0))
    forward = FORWARDS["cudnn:bf16"]
    operands = forward.prepare(Inputs(q, k, v), SPEC)
    outs: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: outs.append(forward.run(operands).out)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == 2
    assert torch.equal(*outs)
    assert outs[0].data_ptr() != outs[1].data_ptr()


def test_a_declined_heuristic_keeps_no_tensor_of_the_call_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """As front end 1.32 does it: the last exception stays in the frame that its traceback holds."""
    build = PyGraph.build

    def declining(self: PyGraph, heuristics: list[str]) -> None:
        failure = None
        try:
            raise CUDNN.cudnnGraphNotSupportedError("no plan by this heuristic")
        except CUDNN.cudnnGraphNotSupportedError as error:
            failure = error
        assert failure is not None
        build(self, heuristics)

    monkeypatch.setattr(PyGraph, "build", declining)
    spec = SPEC.replace(direction="training")

    def step() -> list[weakref.ref[torch.Tensor]]:
        q, k, v, grad = tensors_of(Problem(spec, "bhsd", False, 0))
        forward, backward = FORWARDS["cudnn:bf16"], BACKWARDS["cudnn:bf16"]
        operands = forward.prepare(Inputs(q, k, v), spec)
        result = forward.run(operands)
        backward.run(Saved(operands, *result), grad)
        return [weakref.ref(x) for x in (q, k, v, grad, result.out, result.lse)]

    gc.collect()
    gc.disable()
    try:
        assert [each() for each in step()] == [None] * 6
    finally:
        gc.enable()


def test_an_unexpected_engine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PyGraph, "selected_engine", "sdpa_fwd_prefill_sm90")
    q, k, v, _ = tensors_of(Problem(SPEC, "bhsd", False, 0))
    with pytest.raises(RuntimeError, match="sdpa_fwd_prefill_sm90"):
        FORWARDS["cudnn:bf16"].prepare(Inputs(q, k, v), SPEC)


def test_bounds_below_e5m2_are_refused() -> None:
    long = AttentionSpec.make(batch=1, heads=8, kv_heads=1, seqlen_q=2**17, head_dim=128)
    assert FP8.refusals(long, H200) == []
    assert "below e5m2" in "; ".join(FP8_BACKWARD.refusals(long, H200))
    assert FP8_BACKWARD.refusals(long.replace(kv_heads=8), H200) == []
