"""TransformerEngine behind the contract, against a stand-in of its two calls: layouts, scales, history, refusals."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch
from dense import dense_attention, dense_gradients, distance, gradient_sizes, probabilities, relative_l2
from hypothesis import given
from hypothesis import strategies as st
from problems import Problem, tensors_of
from standins_te import fused_attn_bwd, install_transformer_engine
from torch import Tensor

from attnbench.backends.te import backend as te
from attnbench.backends.te import history as te_history
from attnbench.backends.te import library as te_library
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

FORWARDS = {k.name: k for k in te.BACKEND.kernels if isinstance(k, ForwardKernel)}
BACKWARDS = {k.name: k for k in te.BACKEND.kernels if isinstance(k, BackwardKernel)}
FP8, FP8_BACKWARD = FORWARDS["te:fp8"], BACKWARDS["te:fp8"]
SPEC = AttentionSpec.make(batch=2, heads=4, kv_heads=2, seqlen_q=96, head_dim=64)
CAUSAL = Mask(right=0)
H200 = Device("cuda", "NVIDIA H200", (9, 0))


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    install_transformer_engine(monkeypatch)


def training(**sizes: object) -> AttentionSpec:
    return AttentionSpec.make(**{"batch": 2, "heads": 4, "kv_heads": 2, "direction": "training", **sizes})


def step(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """O, dQ, dK, dV of one FP8 training step."""
    operands = FP8.prepare(Inputs(q, k, v), spec)
    result = FP8.run(operands)
    return (result.out, *FP8_BACKWARD.run(Saved(operands, *result), grad))


def test_results_are_accurate_after_inputs_of_any_earlier_scale() -> None:
    """Plain delayed scaling would saturate here, because all callers of a spec share one history."""
    spec = training(head_dim=128, seqlen_q=96, mask=CAUSAL)
    q, k, v, grad = tensors_of(Problem(spec, "bhsd", False, 5))
    alike = v[:, :, :1].expand_as(v), grad[:, :, :1].expand_as(grad)
    for factor, (values, onto) in itertools.product((1e-3, 1.0, 300.0, 1e-2), ((v, grad), alike)):
        inputs = (q, k, values * factor, onto * factor)
        out, *found = step(spec, *inputs)
        assert relative_l2(out, dense_attention(*inputs[:3], spec)[0]) <= FP8.declared_error
        sizes = gradient_sizes(*inputs, spec)
        for each, wanted, size in zip(found, dense_gradients(*inputs, spec), sizes, strict=True):
            assert distance(each, wanted, size) <= FP8_BACKWARD.declared_error


def test_the_first_backward_of_a_spec_runs_twice_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    standin = te_library.library()
    counted = standin._replace(backward=lambda *a, **k: (calls.append(1), fused_attn_bwd(*a, **k))[1])
    monkeypatch.setattr(te_library, "library", lambda: counted)
    for spec, wanted in ((training(head_dim=128, seqlen_q=32), [2, 1, 1]), (training(head_dim=128, seqlen_q=33), [2])):
        q, k, v, grad = tensors_of(Problem(spec, "bhsd", False, 0))
        for count in wanted:
            calls.clear()
            step(spec, q, k, v, grad)
            assert len(calls) == count


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 4]), st.sampled_from([Mask(), CAUSAL]),
       st.sampled_from([0.01, 1.0, 30.0]), st.sampled_from([-0.4, 2.0]))  # fmt: skip
def test_no_gradient_exceeds_its_bound(seed: int, group: int, mask: Mask, spread: float, scale: float) -> None:
    spec = AttentionSpec.make(batch=1, heads=4, kv_heads=4 // group, seqlen_q=40, seqlen_kv=56, head_dim=16, mask=mask,
                              dtype="fp32", scale=scale)  # fmt: skip
    q, k, v, grad = tensors_of(Problem(spec, "bhsd", False, seed))
    q = q * spread
    v[0, 0, 0] *= 100
    ds_bound, gradient_bound = te._bounds(spec, *(x.abs().max().reshape(1) for x in (q, k, v, grad))).tolist()
    (p, _), wide_v = probabilities(q, k, spec), v.double().repeat_interleave(group, 1)
    ds = p * (grad.double() @ wide_v.mT - (grad * (p @ wide_v)).sum(-1, keepdim=True))
    assert max(1.0, abs(scale)) * ds.abs().max().item() <= ds_bound
    assert max(x.abs().max().item() for x in dense_gradients(q, k, v, grad, spec)) <= gradient_bound


def test_scales_follow_the_largest_finite_step_up_to_the_bound() -> None:
    history, bounds = te_history.History(2, torch.device("cpu")), torch.tensor([2.0, 4.0])
    for amax, wanted in (
        ([2.0**-10, 2.0**-9], [32.0, 16.0]),
        ([math.nan, math.inf], [32.0, 16.0]),
        ([1.0, 2.0**-9], [4.0, 16.0]),
    ):
        history.note(torch.tensor(amax), bounds)
        assert history.scales(bounds, 8.0).tolist() == wanted


def test_nonfinite_values_do_not_affect_the_next_call() -> None:
    spec = training(head_dim=128, seqlen_q=64)
    q, k, v, grad = tensors_of(Problem(spec, "bhsd", False, 0))
    poisoned = v.clone()
    poisoned[0, 0, 0, 0] = math.nan
    for values in (v, poisoned, v):
        _, *found = step(spec, q, k, values, grad)
    for each, wanted in zip(found, dense_gradients(q, k, v, grad, spec), strict=True):
        assert relative_l2(each, wanted) <= FP8_BACKWARD.declared_error


def test_no_history_is_recorded_during_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = training(head_dim=128, seqlen_q=64)
    inputs, recording = tensors_of(Problem(spec, "bhsd", False, 0)), False
    for module in (te_history, te_library):
        monkeypatch.setattr(module, "recording", lambda: recording)
    monkeypatch.setattr(te_library, "_generator", lambda device: torch.Generator())
    recording = True
    step(spec, *inputs)
    assert not te._gradients._kept
    assert not te._gradients._recorded
    recording = False
    step(spec, *inputs)
    step(spec, *inputs)
    history = te._gradients._kept[(spec, torch.device("cpu"), 0)]
    pending, steps, bounds = history._pending, history._steps, torch.ones(2)
    recording = True
    frozen = te._gradients.of(spec, torch.device("cpu"))
    assert frozen.scales(bounds, 1.0).tolist() != bounds.tolist(), "the recorded step uses what was seen before"
    step(spec, *inputs)
    assert (history._pending, history._steps) == (pending, steps)
    assert te._gradients._recorded == [history]


def test_a_history_created_in_inference_mode_can_be_updated_later() -> None:
    spec = training(head_dim=128, seqlen_q=64)
    for mode in (True, False, True, False):
        with torch.inference_mode(mode):
            step(spec, *tensors_of(Problem(spec, "bhsd", False, 0)))
    history = te._gradients._kept[(spec, torch.device("cpu"), 0)]
    assert history._steps == 4  # of five: the last one's is folded in when the next one asks


def test_two_threads_share_a_history() -> None:
    spec = training(head_dim=128, seqlen_q=64, mask=CAUSAL)
    q, k, v, grad = tensors_of(Problem(spec, "bhsd", False, 0))
    truth = dense_gradients(q, k, v, grad, spec)
    errors: list[float] = []

    def work(sign: float) -> None:
        for _ in range(5):
            _, *found = step(spec, q, k, v * sign, grad * sign)
            errors.extend(relative_l2(x, y) for x, y in zip(found, (*truth[:2], truth[2] * sign), strict=True))

    threads = [threading.Thread(target=work, args=(sign,)) for sign in (1.0, -1.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 30
    assert max(errors) <= FP8_BACKWARD.declared_error


def test_histories_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_history, "_KEPT", 3)
    for length in range(8, 14):
        spec = SPEC.replace(seqlen_q=length)
        te._gradients.of(spec, torch.device("cpu"))
    assert [key[0].seqlen_q for key in te._gradients._kept] == [11, 12, 13]
