"""A case on a bench, in this process: what plans do to its buffers, to each other, and when they are judged."""

import math
from dataclasses import replace

import planted
import pytest
import torch
from planted import CPU, REFERENCE, FakeBackward, FakeForward, backend, healthy

from attnbench.errors import AttnbenchError
from attnbench.harness.cases.case import Case
from attnbench.harness.cases.inputs import draw
from attnbench.harness.measure import trial
from attnbench.harness.measure.bench import Bench
from attnbench.harness.measure.open_case import OpenCase
from attnbench.harness.measure.timing import Taken, Timer
from attnbench.harness.measure.trace import LONGEST_NAME, MOST_NAMES, shorten_names
from attnbench.kernels.contract import Result
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

CAUSAL = Case("causal", AttentionSpec.make(batch=1, heads=2, seqlen_q=64, head_dim=16, mask=Mask(right=0)))
TRAINING = Case("training", AttentionSpec.make(batch=1, heads=2, seqlen_q=32, head_dim=16, direction="training"))
TIMER = Timer(CPU, visit=0.0, limit=0.01, patience=1.0)
HONEST = Plan.parse("wide:bf16")
HONEST_TRAINING = Plan.parse("wide:bf16>wide:bf16")


class Watching(FakeForward):
    """The exact kernel; every prepare is counted, and may act on the values."""

    def __init__(self, act=lambda call, v: None):
        super().__init__("watching:bf16")
        self.act, self.calls = act, 0

    def prepare(self, inputs, spec):
        self.calls += 1
        self.act(self.calls, inputs.v)
        return super().prepare(inputs, spec)


WATCHED = Plan.parse("watching:bf16")


def bench_of(monkeypatch, *kernels, case=CAUSAL):
    """A bench with these kernels beside honest ones, and the case open."""
    made = Registry([*healthy().backends.values(), *(backend(kernel) for kernel in kernels)])
    monkeypatch.setattr(planted, "made_here", lambda: made, raising=False)
    bench = Bench("planted:made_here", TIMER)
    bench.open(case)
    return bench


def holds_first_family(bench):
    expected = draw(CAUSAL.spec, CAUSAL.families[0], CPU)
    return all(torch.equal(x, y) for x, y in zip(bench._open.tensors, expected.qkv.unquantised(), strict=True))


def through(bench, plan):
    bench.prepare(plan)
    bench.sample(plan)
    return bench.conclude(plan)


def worst(findings):
    return max(each.error for judged in findings.judged.values() for each in judged.values())


@pytest.mark.parametrize("prove", [False, True])
def test_what_is_prepared_has_been_called_whole(monkeypatch, prove):
    called = []
    monkeypatch.setattr(trial, "_call_of", lambda execution, _: lambda: called.append(execution.plan))
    bench = bench_of(monkeypatch)
    bench.prepare(HONEST, prove)
    assert called == [HONEST]


@pytest.mark.parametrize(
    "handed_back", [lambda q: q, lambda q: q[:], lambda q: q.new_zeros(1).expand(q.shape)], ids=["input", "view", "one"]
)
def test_a_result_that_is_no_memory_of_its_own_is_judged_as_it_is(monkeypatch, handed_back):
    """Results are filled with NaN between runs, one number that stands for many too; inputs are not."""

    class HandsBack(Watching):
        def prepare(self, inputs, spec):
            self.q = inputs.q
            return super().prepare(inputs, spec)

        def run(self, operands):
            return super().run(operands)._replace(out=handed_back(self.q))

    findings = through(bench_of(monkeypatch, HandsBack()), WATCHED)
    assert findings.untouched
    assert 0.5 < worst(findings) < math.inf


def test_a_kernel_that_spoils_its_inputs_is_reported_and_harms_no_other(monkeypatch):
    bench = bench_of(monkeypatch, Watching(lambda call, v: v.mul_(2)))
    bench.prepare(WATCHED)
    assert holds_first_family(bench)
    bench.prepare(HONEST)
    for _ in range(2):
        bench.sample(WATCHED)
        assert holds_first_family(bench)
        bench.sample(HONEST)
    spoilt = bench.conclude(WATCHED)
    assert holds_first_family(bench)
    honest = bench.conclude(HONEST)
    assert not spoilt.untouched
    assert honest.untouched
    assert worst(honest) < 0.01


def test_inputs_that_are_spoilt_only_while_the_plan_is_judged_are_noticed_too(monkeypatch):
    judged = []
    bench = bench_of(monkeypatch, Watching(lambda call, v: v.mul_(2) if judged else None))
    bench.prepare(WATCHED)
    judged.append(WATCHED)
    assert not bench.conclude(WATCHED).untouched


@pytest.mark.parametrize("after", range(1, 16))
def test_a_plan_that_fails_anywhere_leaves_the_next_what_it_must_find(monkeypatch, after):
    """It fails as it is called for the so-manieth time, whatever the buffers hold then, and spoils them first."""

    def fails(call, v):
        if call == after:
            v.zero_()
            raise RuntimeError("no more")

    monkeypatch.setattr(trial, "_HISTORY_SECONDS", 60.0)
    bench = bench_of(monkeypatch, Watching(fails))
    bench.prepare(HONEST)
    bench.sample(HONEST)
    with pytest.raises(RuntimeError, match="no more"):
        through(bench, WATCHED)
    findings = bench.conclude(HONEST)
    assert findings.untouched
    assert findings.deterministic
    assert worst(findings) < 0.01


def test_what_was_not_prepared_or_was_dropped_is_not_measured(monkeypatch):
    bench = bench_of(monkeypatch)
    with pytest.raises(KeyError):
        bench.sample(HONEST)
    bench.prepare(HONEST)
    bench.drop(HONEST)
    bench.drop(HONEST)
    with pytest.raises(KeyError):
        bench.conclude(HONEST)
    bench.prepare(HONEST)
    bench.close()
    with pytest.raises(KeyError):
        bench.sample(HONEST)
    bench.open(TRAINING)
    bench.prepare(HONEST_TRAINING)
    bench.open(CAUSAL)
    with pytest.raises(KeyError):
        bench.sample(HONEST_TRAINING)


class Remembered(FakeForward):
    """Quantises an input once for each version of it, as autograd counts them."""

    def prepare(self, inputs, spec):
        q = inputs.q
        seen = self.__dict__.setdefault("seen", {})
        self.prepared = getattr(self, "prepared", 0)
        key = (q.data_ptr(), q._version)
        if key not in seen:
            self.prepared += 1
            seen[key] = super().prepare(inputs, spec)
        return seen[key]


def trial_of(*kernels, direction="forward"):
    """A plan of these kernels on a tiny case, with nothing beside them."""
    spec = AttentionSpec.make(batch=1, heads=1, seqlen_q=16, head_dim=16, direction=direction)
    opened = OpenCase(Case("one", spec), Registry([REFERENCE, backend(*kernels)]), CPU)
    return trial.Trial(Plan(*(kernel.name for kernel in kernels)), opened)


@pytest.mark.parametrize(("bound", "scale"), [(False, 0.5), (True, 1.0)])
def test_a_call_on_a_slow_host_is_timed_as_on_the_usual_one(monkeypatch, bound, scale):
    """A host that started its small kernels in twice the usual time; one that waited for the device says nothing."""
    taken = Taken([0.1, 0.4], [0.3, 0.6], host_bound=bound, launch_ms=0.02, late_ms=0.7)
    monkeypatch.setattr(Timer, "take", lambda *_: taken)
    one = trial_of(FakeForward("wide:bf16"))
    one.run()
    visit = one.sample(TIMER, replay=False, launch_ms=0.01)
    assert (visit.host_scale, visit.launch_ms, visit.late_ms) == (scale, 0.02, 0.7)
    assert visit.host_ms == pytest.approx([0.3 * scale, 0.6 * scale])
    assert visit.time_ms["call"] == pytest.approx([max(0.1, 0.3 * scale), max(0.4, 0.6 * scale)])
    assert visit.time_ms["kernel"] == taken.device_ms
    assert visit.span[0] < visit.span[1]
    assert one.sample(TIMER, replay=False).host_ms == taken.host_ms
    assert one.sample(TIMER, replay=False, costs=["kernel"]).time_ms.keys() == {"kernel"}


def test_every_sample_of_a_call_prepares_its_inputs_as_a_user_s_would():
    kernel = Remembered("remembered:bf16")
    one = trial_of(kernel)
    one.run()
    before = kernel.prepared
    visit = one.sample(Timer(CPU, visit=0.0, limit=1.0, patience=1.0), replay=False)
    assert kernel.prepared - before >= sum(len(visit.time_ms[cost]) for cost in ("prepared", "call"))


class Reusing(FakeForward):
    """Answers in one buffer, again and again."""

    def run(self, operands):
        result = super().run(operands)
        self.buffer = getattr(self, "buffer", torch.empty_like(result.out))
        return result._replace(out=self.buffer.copy_(result.out))


@pytest.mark.parametrize(("kind", "settled"), [(Reusing, False), (FakeForward, True)])
def test_a_result_that_the_next_call_overwrites_is_not_settled(kind, settled):
    with torch.no_grad():
        assert trial_of(kind("reusing:bf16")).conclude().settled is settled


class Sparing(Reusing):
    """Writes its first row only for inputs that it has not seen."""

    def run(self, operands):
        seen = getattr(self, "seen", None) == operands.q._version
        before = self.buffer[:, :, :1].clone() if seen else None
        result, self.seen = super().run(operands), operands.q._version
        if seen:
            result.out[:, :, :1] = before
        return result


def test_what_a_kernel_leaves_unwritten_is_found_on_each_family():
    with torch.no_grad():
        judged = trial_of(Sparing("sparing:bf16")).conclude().judged
    assert {family: each["out"].error for family, each in judged.items()} == dict.fromkeys(judged, math.inf)


class Delayed(FakeForward):
    """Takes its scale from the inputs of its last four calls, as kernels do in training with FP8."""

    def run(self, operands):
        self.seen = [*getattr(self, "seen", []), operands.q._version][-4:]
        result = super().run(operands)
        return result._replace(out=result.out * (self.seen.count(operands.q._version) / 4))


def test_a_kernel_that_scales_by_earlier_inputs_is_judged_once_it_knows_those_of_the_family(monkeypatch):
    monkeypatch.setattr(trial, "_HISTORY_SECONDS", 60.0)
    one = trial_of(Delayed("delayed:bf16"))
    for _ in range(4):
        one.run()
    assert worst(one.conclude()) < 0.01


def test_the_noise_of_a_kernel_is_no_leak(monkeypatch):
    noisy = FakeForward("noisy:bf16", lambda out: out + 0.01 * torch.randn_like(out))
    findings = through(bench_of(monkeypatch, noisy), Plan.parse("noisy:bf16"))
    assert not findings.deterministic
    assert findings.leak == 0


def test_the_probe_for_leaks_leaves_the_only_family_as_it_was(monkeypatch):
    findings = through(bench_of(monkeypatch, case=replace(CAUSAL, families=CAUSAL.families[:1])), HONEST)
    assert findings.stale["out"].error < 0.01
    assert worst(findings) < 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"change_lse": lambda lse: None}, "no log-sum-exp"), ({"change": torch.Tensor.float}, r"out is torch\.float32")],
)
def test_an_answer_without_what_is_declared_or_in_another_type_is_none(changes, message):
    with pytest.raises(AttnbenchError, match=message):
        trial_of(FakeForward("other:bf16", **changes)).run()


class Recorded(FakeForward):
    """Keeps a graph of autograd's over the inputs where they lie, as FlexAttention does on a GPU."""

    def run(self, operands):
        leaves = tuple(x.detach().requires_grad_() for x in (operands.q, operands.k, operands.v))
        with torch.enable_grad():
            scores = (leaves[0] @ leaves[1].mT).float() * operands.spec.scale
            out = scores.softmax(-1).to(leaves[2].dtype) @ leaves[2]
        return Result(out.detach(), scores.detach().logsumexp(-1), (out, leaves))


class Replayed(FakeBackward):
    def run(self, saved, grad_out):
        out, leaves = saved.state
        return torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


def test_a_backward_through_a_recorded_graph_is_sampled_visit_after_visit():
    """What lies in the inputs' buffers is written between samples and visits, which such a graph refuses."""
    one = trial_of(Recorded("recorded:bf16"), Replayed("recorded:bf16"), direction="training")
    for _ in range(3):
        one.case.load_first()
        assert len(one.sample(Timer(CPU, visit=0.0, limit=1.0, patience=1.0), replay=False).time_ms["backward"]) > 0
    assert one.conclude().judged["normal"]["dk"].error < 0.05


def test_names_of_what_ran_are_bounded_and_the_evidence_is_kept():
    flash = FakeForward("x:bf16", evidence={"cpu": "flash"})
    names = [f"{number}" + "x" * 1000 for number in range(100)] + ["flash"]
    kept = shorten_names(flash, names, "cpu")
    assert kept[0] == "flash"
    assert len(kept) == MOST_NAMES
    assert max(map(len, kept)) == LONGEST_NAME
