"""What is measured inside a step: attention's share, the warning signs, and that neither changes what is learnt."""

import math
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dense import visible
from hypothesis import given
from hypothesis import strategies as st
from small_training import build_small, exact, run_all, small
from torch import nn
from torch.utils.checkpoint import checkpoint

from attnbench import AttentionSpec, Mask
from attnbench.errors import BreachWarning
from attnbench.guarding.guard import Guard
from attnbench.harness.training.config import TrainConfig
from attnbench.harness.training.models.attention import AttentionCore
from attnbench.harness.training.report.summary import report
from attnbench.harness.training.run import warning_signs
from attnbench.harness.training.run.attention_share import _busy_us, share_of_attention
from attnbench.harness.training.run.loop import LoopOptions, train, warm_up_steps
from attnbench.harness.training.run.parallel import Ranks
from attnbench.harness.training.run.session import plan_runs
from attnbench.harness.training.run.step_clock import StepClock
from attnbench.harness.training.run.trainable import build
from attnbench.harness.training.run.warning_signs import kurtosis, score_gradients, signs_of, underflow

CPU = torch.device("cpu")


class _Slow(torch.autograd.Function):
    """Sleeps so many seconds in its forward and in its backward."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_s = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_s)
        return grad, None, None


def _slow_attention(forward: float, backward: float) -> AttentionCore:
    return AttentionCore(lambda q, k, v, is_causal: exact(_Slow.apply(q, forward, backward), k, v, is_causal))


def _step(core: nn.Module, beside: float, checkpointed: bool = False, last: bool = False):
    q, k, v = torch.randn(3, 1, 1, 8, 4, requires_grad=True).unbind()

    def layer(q, k, v):
        return core(q, k, v, True) if last else core(q, k, v, True).sin()

    def step() -> None:
        out = checkpoint(layer, q, k, v, use_reentrant=False) if checkpointed else layer(q, k, v)
        _Slow.apply(out, beside, 0.0).sum().backward()

    return step


def test_the_share_is_the_time_that_attention_takes() -> None:
    core = _slow_attention(0.02, 0.06)
    share = share_of_attention([_step(core, 0.08)] * 2, [core], CPU, compiled=False)
    assert share.steps == 2
    # Sleeps take as long as they say or longer, and none of the three is counted as another.
    assert share.forward_ms >= 20
    assert share.backward_ms >= 60
    assert share.busy_ms - share.forward_ms - share.backward_ms >= 80
    assert share.share == pytest.approx((share.forward_ms + share.backward_ms) / share.busy_ms)
    assert not core._forward_hooks
    assert not core._backward_hooks
    assert share_of_attention([lambda: None], [], CPU, compiled=False) is None  # without attention


@pytest.mark.parametrize(("backward", "beside", "last"), [(0, 30, False), (80, 0, True)])
def test_a_recomputed_forward_counts_as_forward_and_only_once_and_may_end_inside_attention(
    backward: float, beside: float, last: bool
) -> None:
    core = _slow_attention(0.04, backward / 1e3)
    share = share_of_attention([_step(core, beside / 1e3, checkpointed=True, last=last)], [core], CPU, compiled=False)
    assert share.forward_ms >= 80  # both, and the sleeps alone take that long
    assert share.backward_ms >= backward
    rest = share.busy_ms - share.forward_ms - share.backward_ms
    assert rest > 0
    assert rest >= beside


def test_a_gpu_is_busy_while_it_computes_and_not_while_it_waits_for_other_ranks() -> None:
    def event(name: str, start: float, end: float, device: str = "CUDA") -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, time_range=span, device_type=SimpleNamespace(name=device))

    events = [event("gemm", 0, 10), event("attention", 5, 20), event("host", 0, 500, "CPU"), event("norm", 30, 31)]
    assert _busy_us(events) == 21
    assert _busy_us([*events, event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 0, 400)]) == 21


def test_torchs_own_operators_are_found_in_a_compiled_model() -> None:
    core = AttentionCore(exact)
    share = share_of_attention([_step(core, 0.0)], [], CPU, compiled=True)
    assert 0 < share.share < 1
    assert share.forward_ms > 0
    assert share.backward_ms > 0


@given(st.integers(0, 100))
def test_kurtosis_is_three_for_normal_numbers_and_grows_with_outliers(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 64, 32, generator=generator)
    assert torch.allclose(kurtosis(x), torch.full((2, 3), 3.0), atol=0.7)
    assert torch.allclose(kurtosis(1e-20 * x), kurtosis(x), rtol=1e-3)
    x[1, 2, 5, 7] = 100.0
    assert kurtosis(x)[1, 2] > 100
    assert kurtosis(x)[0].max() < 4


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("mask", [Mask(), Mask(right=0), Mask(4, 2)], ids=str)
def test_the_gradient_of_the_scores_is_autograds(mask: Mask, softcap: float) -> None:
    q, k, v, grad = torch.randn(4, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    spec = AttentionSpec.make(batch=1, heads=1, seqlen_q=16, head_dim=8, scale=0.3, mask=mask, softcap=softcap)
    scores = (q @ k.T).requires_grad_()
    capped = softcap * torch.tanh(scores * 0.3 / softcap) if softcap else scores * 0.3
    (capped.masked_fill(~visible(spec), -math.inf).softmax(-1) @ v).backward(grad)
    rows = torch.tensor([0, 3, 15])
    found = score_gradients(q[rows], k, v, grad[rows], rows, spec)
    assert torch.allclose(found.double(), scores.grad[rows], atol=1e-5)


@given(st.integers(0, 100), st.sampled_from(["e4m3", "e5m2"]))
def test_underflow_is_what_lies_below_half_the_smallest_number(seed: int, format: str) -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(seed)).exp() ** 4
    largest, smallest = {"e4m3": (448, 2.0**-9), "e5m2": (57344, 2.0**-16)}[format]
    expected = (x.double() / x.max() * largest <= smallest / 2).double().mean()
    assert underflow(x, format) == pytest.approx(float(expected), abs=0.005)
    assert underflow(torch.cat((x, torch.zeros(500))), format) == pytest.approx(float(expected), abs=0.005)
    assert underflow(torch.zeros(3), format) == 0


def test_the_signs_name_the_worst_module_and_the_whole_gradient() -> None:
    cores = [AttentionCore(exact), AttentionCore(exact)]
    inputs = [torch.randn(3, 2, 4, 8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    inputs[1][0, 0, 0, 0, 0] = 50.0
    leaves = [each.requires_grad_() for each in inputs]

    def work() -> None:
        sum(core(*x.unbind(), True).square().sum() for core, x in zip(cores, leaves, strict=True)).backward()

    sign = signs_of(7, cores, work)
    assert sign.step == 7
    assert sign.kurtosis_q > 20 > sign.kurtosis_k
    assert set(sign.ds_underflow) == {"e4m3", "e5m2"}
    assert sign.gradient_norm == pytest.approx(math.sqrt(sum(float(x.grad.square().sum()) for x in leaves)), rel=1e-5)
    assert signs_of(0, [], work) is None


def test_windows_and_softcaps_have_gradients_of_their_own_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(warning_signs, "underflow", lambda scores, format: seen.append(scores) or 0.0)
    options = {"scale": 0.5, "window": (2, 0), "softcap": 2.0}
    core = AttentionCore(lambda q, k, v, is_causal, **asked: exact(q, k, v, is_causal))
    x = torch.randn(3, 1, 1, 8, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    signs_of(0, [core], lambda: core(*x.unbind(), True, **options).square().sum().backward())
    spec = AttentionSpec.make(batch=1, heads=1, seqlen_q=8, head_dim=4, scale=0.5, mask=Mask(2, 0), softcap=2.0)
    q, k, v = (each[0, 0] for each in x.detach().unbind())
    grad = 2 * exact(*x.detach().unbind(), True)[0, 0]
    assert torch.equal(seen[0], score_gradients(q, k, v, grad, torch.arange(8), spec))
    assert torch.equal(seen[0][1:] != 0, visible(spec)[1:])


def test_watching_changes_nothing_of_what_is_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def losses() -> list[float]:
        kept: list = []
        train(build_small(small(), CPU, dropout=True), Ranks(CPU), LoopOptions(tmp_path, 0), kept.append)
        return kept[-1].loss

    watched = losses()
    monkeypatch.setattr("attnbench.harness.training.run.loop.signs_of", lambda *_: None)
    monkeypatch.setattr("attnbench.harness.training.run.loop._MOST_WATCHED", 0)
    assert losses() == watched


def test_watched_steps_and_the_warm_up_are_not_timed(tmp_path: Path) -> None:
    kept: list = []
    train(build_small(small(steps=24), CPU), Ranks(CPU), LoopOptions(tmp_path, 0), kept.append)
    history = kept[-1]
    assert history.steps == len(history.step_ms) == 24
    assert warm_up_steps(24) == 6
    assert sorted(set(history.untimed)) == [0, 6, 7, 8, 12, 23]
    assert history.attention.steps == 3
    assert 0 < history.attention.share < 1


def test_the_clock_times_the_step_and_not_what_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = StepClock(CPU)
    for step, seconds in enumerate((0.05, 0.01)):
        clock.start()
        now[0] += seconds
        clock.stop(step, torch.tensor([1.0 + step, 2.0]))
        now[0] += 0.05
    first, second = clock.ended()
    assert (first.ms, second.ms) == pytest.approx((50, 10))
    assert [(each.step, each.loss, each.grad_norm) for each in (first, second)] == [(0, 1.0, 2.0), (1, 2.0, 2.0)]
    assert clock.ended(all=True) == []


@pytest.mark.parametrize(("bound", "found"), [(None, 0), (1e-4, 3)])
def test_a_guard_checks_attention_where_the_signs_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: float | None, found: int
) -> None:
    """As it would be if the plan were to keep ``bound``."""
    bounded = "attnbench.harness.training.run.loop.Guard"
    monkeypatch.setattr(bounded, lambda every, _, *others: Guard(every, bound, *others))
    config = TrainConfig.make(size="tiny", seqlen=64, batch=1, steps=4, attention="emulated:fp8")
    with pytest.warns(BreachWarning) if found else nullcontext():
        (row,) = run_all(tmp_path, plan_runs(config, None, 1), build)
    assert [sign.checks for sign in row.signs] == [2, 2, 2]
    assert [sign.breaches > 0 for sign in row.signs] == [found > 0] * 3
    found = sum(sign.breaches for sign in row.signs)
    assert f"a guard found {found} breaches in 6 checks" in " ".join(report([row], "text").split())
