"""TransformerEngine behind the contract, against a stand-in of its two calls: layouts, scales, history, refusals."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from dense import dense_gradients, probabilities, relative_l2
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import Documents, answers, documents
from problems import Problem, tensors_of
from standins_te import fused_attn_bwd, install_transformer_engine

from attnbench.backends.te import backend as te
from attnbench.backends.te import history as te_history
from attnbench.backends.te import library as te_library
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec
from examples import examples

FORWARDS = {k.name: k for k in te.BACKEND.kernels if isinstance(k, ForwardKernel)}
BACKWARDS = {k.name: k for k in te.BACKEND.kernels if isinstance(k, BackwardKernel)}
FP8, FP8_BACKWARD = FORWARDS["te:fp8"], BACKWARDS["te:fp8"]
SPEC = AttentionSpec.make(batch=2, heads=4, kv_heads=2, seqlen_q=96, head_dim=64)
CAUSAL = Mask(right=0)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    install_transformer_engine(monkeypatch)


def training(**sizes: object) -> AttentionSpec:
    return AttentionSpec.make(**{"batch": 2, "heads": 4, "kv_heads": 2, "direction": "training", **sizes})


@given(documents(70, st.sampled_from([Mask(), CAUSAL, Mask(9, 0), Mask(right=0, alignment="bottom-right")]),
                 heads=(4, 2)))  # fmt: skip
@settings(max_examples=examples(15, 100))
def test_packed_sequences_are_what_they_are_alone(batch: Documents) -> None:
    batch = replace(batch, lengths=tuple((max(pair), max(pair)) for pair in batch.lengths))
    forward, backward = FORWARDS["te:bf16"], BACKWARDS["te:bf16"]
    for found, alone in zip(answers(batch, forward, backward), batch.alone(forward, backward), strict=True):
        for x, y in zip(found, alone, strict=True):
            torch.testing.assert_close(x.float(), y.float(), rtol=1e-2, atol=1e-3)


def test_scales_follow_what_earlier_steps_reached() -> None:
    history, bounds = te_history.History(2, torch.device("cpu")), torch.tensor([1e3, 1e6])
    assert history.cold
    assert history.scales(bounds, 5.0).tolist() == pytest.approx([5e-3, 5e-6])
    for amax in (torch.tensor([1.0, 1e5]), torch.tensor([0.5, 2.0])):
        history.note(amax, bounds)
        history.note(amax, bounds)
        assert not history.cold
        # The largest of all steps, with a margin, and never beyond the bound; in proportion to this step's bound.
        assert history.scales(2 * bounds, 5.0).tolist() == pytest.approx([5 / (2 * te_history._MARGIN), 2.5e-6])
    assert history._steps == 2
    for _ in range(te_history._LENGTH):
        history.note(torch.tensor([0.25, 2.0]), bounds)
        found = history.scales(bounds, 5.0)
    assert found.tolist() == pytest.approx([20 / te_history._MARGIN, 2.5 / te_history._MARGIN])


def test_the_first_backward_of_a_spec_runs_twice_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    standin = te_library.library()
    counted = standin._replace(backward=lambda *a, **k: (calls.append(1), fused_attn_bwd(*a, **k))[1])
    monkeypatch.setattr(te_library, "library", lambda: counted)
    for spec, wanted in ((training(head_dim=128, seqlen_q=32), [2, 1, 1]), (training(head_dim=128, seqlen_q=33), [2])):
        q, k, v, grad = tensors_of(Problem(spec, "bhsd", False, 0))
        for count in wanted:
            calls.clear()
            operands = FP8.prepare(Inputs(q, k, v), spec)
            FP8_BACKWARD.run(Saved(operands, *FP8.run(operands)), grad)
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


def test_while_a_graph_is_recorded_nothing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = training(head_dim=128, seqlen_q=64)
    q, k, v, grad = tensors_of(Problem(spec, "bhsd", False, 0))
    recording = False

    def step() -> None:
        operands = FP8.prepare(Inputs(q, k, v), spec)
        FP8_BACKWARD.run(Saved(operands, *FP8.run(operands)), grad)

    for module in (te_history, te_library):
        monkeypatch.setattr(module, "recording", lambda: recording)
    monkeypatch.setattr(te_library, "_generator", lambda device: torch.Generator())
    recording = True
    step()
    assert not te._gradients._kept
    assert not te._gradients._recorded
    recording = False
    step()
    step()
    history = te._gradients._kept[(spec, torch.device("cpu"), 0)]
    pending, steps, bounds = history._pending, history._steps, torch.ones(2)
    recording = True
    frozen = te._gradients.of(spec, torch.device("cpu"))
    assert frozen.scales(bounds, 1.0).tolist() != bounds.tolist(), "the recorded step uses what was seen before"
    step()
    assert (history._pending, history._steps) == (pending, steps)
    assert te._gradients._recorded == [history]


def test_two_threads_share_a_history() -> None:
    spec = training(head_dim=128, seqlen_q=64, mask=CAUSAL)
    q, k, v, grad = tensors_of(Problem(spec, "bhsd", False, 0))
    truth = dense_gradients(q, k, v, grad, spec)
    errors: list[float] = []

    def work(sign: float) -> None:
        for _ in range(5):
            operands = FP8.prepare(Inputs(q, k, v * sign), spec)
            found = FP8_BACKWARD.run(Saved(operands, *FP8.run(operands)), grad * sign)
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
