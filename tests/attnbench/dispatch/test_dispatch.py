"""Repeated calls: one look-up, with a key of everything that the choice depends on."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from patience import PATIENCE
from problems import tensors
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from watched_passes import watch_passes

from attnbench import api, attention, explain, use_backend
from attnbench.dispatch import memory
from attnbench.kernels.execution import Execution
from attnbench.state import Cache


@pytest.fixture
def passes_run(monkeypatch) -> list[Execution]:
    return watch_passes(monkeypatch)


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "causal_alignment": "bottom-right"},
    "window": {"window": (3, 2)},
    "half a window": {"window": (3, None)},
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 3.0},
    "lse": {"return_lse": True},
    "fp8": {"dtype": "fp8", "backend": "emulated"},
    "kernel": {"backend": "emulated:fp8"},
    "budget": {"max_error": 0.3, "backend": "auto"},
    "backend": {"backend": "sdpa-math"},
    "auto": {"backend": "auto"},
}


def test_every_argument_is_part_of_the_key(passes_run):
    """Runs each call twice, in two orders, so that a missing part of the key would give another call's choice."""
    q, k, v = tensors()
    grads = [x.clone().requires_grad_() for x in (q, k, v)]
    given = {
        "as they are": (q, k, v),
        "queries": (q[:, :, 1:], k, v),
        "keys": (q, k[:, :, 1:], v[:, :, 1:]),
        "values": (q, k, v[..., :8]),
        "dtype": (q.float(), k.float(), v.float()),
        "gradients of k": (q, grads[1], v),
    }
    calls = [(given["as they are"], arguments) for arguments in CALLS.values()]
    calls += [(x, {}) for x in given.values()]
    for x, arguments in [*calls, *reversed(calls)]:
        choice = explain(*x, **{"backend": "reference", **arguments})
        attention(*x, **{"backend": "reference", **arguments})
        ran = passes_run.pop()
        assert (ran.forward.name, ran.spec) == (choice.plan.forward, choice.spec)
    with torch.no_grad():
        attention(q, grads[1], v, backend="reference")
    assert passes_run.pop().spec == explain(q, k, v).spec


def test_layouts_and_grouping_are_part_of_the_key(passes_run):
    x = torch.randn(2, 4, 4, 16)
    attention(x, x, x)
    attention(x[:, :, :2], x, x)
    attention(x[:, :2], x[:, :2], x[:, :2])
    attention(x[:, :2], x[:, :2], x[:, :2], layout="bshd")
    sizes = [(spec.heads, spec.seqlen_q, spec.seqlen_kv) for spec in (ran.spec for ran in passes_run)]
    assert sizes == [(4, 4, 4), (4, 2, 4), (2, 4, 4), (4, 2, 2)]
    attention(x, x[:, :2], x[:, :2])
    with pytest.raises(ValueError, match="enable_gqa"):
        attention(x, x[:, :2], x[:, :2], enable_gqa=False)


class CountingMode(TorchFunctionMode):
    """A mode that counts calls and passes them on."""

    seen = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        type(self).seen += function is attention
        return function(*args, **(kwargs or {}))


def test_a_cached_choice_is_not_used_after_the_state_changed(passes_run):
    """Repeats a call with the same tensors while the surrounding state changes and changes back."""
    q, k, v = tensors(dtype=torch.float32)
    wanted, leaf = attention(q, k, v), q.detach()
    for turn in (1, 2):
        passes_run.clear()
        assert attention(leaf, k, v).grad_fn is None
        leaf.requires_grad_()
        assert attention(leaf, k, v).grad_fn is not None
        with torch.no_grad():
            assert attention(leaf, k, v).grad_fn is None
        with torch.inference_mode():
            assert attention(leaf, k, v).is_inference()
        leaf.requires_grad_(False)
        with torch.autocast("cpu", torch.bfloat16):
            assert attention(leaf, k, v).dtype == torch.bfloat16
        with use_backend("emulated:fp8"):
            assert not torch.equal(attention(leaf, k, v), wanted)
        with CountingMode():
            assert torch.equal(attention(leaf, k, v), wanted)
        assert CountingMode.seen == turn
        lying_otherwise = (x.mT.contiguous().mT for x in (leaf, k, v))
        assert torch.allclose(attention(*lying_otherwise), wanted, atol=1e-6)
        assert [ran.spec.training for ran in passes_run] == [False, True] + 6 * [False]


def test_a_cache_is_bounded_and_keeps_no_entry_from_before_it_was_cleared():
    kept: Cache[int, int] = Cache(size=3, lasting=True)
    for n in range(5):
        assert kept.of(n, lambda n: n, n) == n
    assert list(kept.entries.values()) == [2, 3, 4]
    assert kept.of(4, lambda: 40) == 4

    def slow_choose() -> int:
        kept.forget()
        return 9

    assert kept.of(9, slow_choose) == 9
    assert not kept.entries


def test_eight_threads_each_get_their_own_choice():
    plans = ["reference:fp32", "sdpa-math:bf16", "sdpa-flash:bf16", "emulated:fp8"]
    problems = [(tensors(sq=sq, seed=sq), plan) for sq in (3, 5) for plan in plans]
    truth = [attention(*x, backend=plan) for x, plan in problems]
    api.forget_choices()
    together = threading.Barrier(len(problems))

    def wrong_answers(place: int) -> int:
        x, plan = problems[place]
        with use_backend(plan):
            together.wait(timeout=PATIENCE)
            return sum(not torch.equal(attention(*x), truth[place]) for _ in range(10))

    with ThreadPoolExecutor(len(problems)) as pool:
        assert list(pool.map(wrong_answers, range(len(problems)))) == [0] * len(problems)


def test_a_context_applies_to_checkpoint_recomputation(passes_run):
    """The backward runs outside of the block, on a GPU in another thread: checkpoint's context_fn brings it there."""
    x = [each.requires_grad_() for each in tensors()]

    def contexts():
        return nullcontext(), use_backend("emulated:fp8")

    with use_backend("emulated:fp8"):
        out = checkpoint(attention, *x, use_reentrant=False, context_fn=contexts)
    out.sum().backward()
    assert [ran.forward.name for ran in passes_run] == ["emulated:fp8", "emulated:fp8"]


def test_a_choice_by_rule_warns_only_at_the_first_call_of_a_question(monkeypatch):
    """Explaining and repeated calls do not warn: the warning is for programs that run by rule."""
    warned = []
    monkeypatch.setattr(memory, "warn_of_rule", lambda choice, device: warned.append((choice.basis, device.type)))
    x = tensors(sq=13)
    explain(*x)
    assert warned == []
    attention(*x)
    attention(*x)
    assert warned == [("rule", "cpu")]


@pytest.mark.parametrize(("training", "most"), [(False, 21), (True, 33)])
def test_a_repeated_call_runs_little_python(training, most):
    """Most of a call's overhead over torch's own is calls of Python functions."""
    x = tuple(each.requires_grad_(training) for each in tensors())
    attention(*x)
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_qualname) if event == "call" else None)
    try:
        attention(*x)
    finally:
        sys.setprofile(None)
    assert len(calls) <= most, calls
