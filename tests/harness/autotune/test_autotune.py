"""autotune: what a program asks is measured after it, within its seconds, or is left alone with a reason."""

import random
import time
from dataclasses import replace
from types import SimpleNamespace

import delayed_kernels
import numpy as np
import pytest
import torch
from autotune_setup import BREAKS, FAST, SLOW, children, entries, own_path, replay_rows, rows_of, tensors
from delayed_kernels import BREAKS_HOW, HANG_SECONDS, spec
from planted import CPU, setup

import attnbench
from attnbench import AttentionSpec, api, attention, explain, use_backend
from attnbench.dispatch.memory import listening
from attnbench.errors import InputError, MisuseError, OutputError, UnknownBackendError
from attnbench.harness.autotune import run as tuning
from attnbench.harness.autotune.observed_specs import ObservedSpec
from attnbench.harness.autotune.tuning import TuningTask, alone, shortage, tuning_task
from attnbench.harness.cases.inputs import draw
from attnbench.harness.measure.setup import INSTALLED
from attnbench.harness.sequence_lengths import SequenceLengths
from attnbench.kernels.guard_hook import watching
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import registry
from attnbench.problem.lengths_kind import LengthsKind
from attnbench.tables.table import Table


@pytest.fixture(autouse=True)
def unread():
    api.forget_choices()
    yield
    api.forget_choices()


def test_the_fastest_is_chosen_by_measurement_and_the_user_s_program_is_left_alone(planted, monkeypatch):
    monkeypatch.setenv(BREAKS_HOW, "dies")  # which costs that plan alone
    others = children()
    x = tensors()
    before = attention(*x)
    assert (str(explain(*x).plan), explain(*x).basis) == (SLOW, "rule")
    random_states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with attnbench.autotune(120) as tuned:
        assert torch.equal(attention(*x), before)
        attention(*x, return_lse=True)
        y = tensors(grad=True)
        torch.autograd.grad(attention(*y).sum(), y)
        assert not tuned.measured
        assert children() <= others
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == random_states[1:]
    assert children() <= others
    training = spec(direction="training")
    found = {each.spec: each for each in tuned.measured}
    assert {asked: each.calls for asked, each in found.items()} == {spec(): 2, training: 1}
    assert not tuned.skipped
    assert tuned.tables == [own_path()]
    for asked, plan, died in (
        (spec(), FAST, BREAKS),
        (training, f"{FAST}>{FAST}", f"{BREAKS}>{BREAKS}"),
    ):
        assert str(found[asked].before.plan) == plan.replace("fast", "slow")
        assert (str(found[asked].after.plan), found[asked].after.basis) == (plan, "measured")
        assert found[asked].lost.keys() == {died}
        assert "exit code 7" in found[asked].lost[died]
    assert "exit code 7" in str(tuned)
    assert entries(own_path()) == {
        spec(): {SLOW, FAST, BREAKS},
        training: {f"{name}>{name}" for name in (SLOW, FAST, BREAKS)},
    }
    assert (str(explain(*x).plan), explain(*x).basis) == (FAST, "measured")
    assert {str(each.plan): each.verdict for each in explain(*x).candidates}[BREAKS] == "unmeasured"
    assert str(explain(*tensors(grad=True)).plan) == f"{FAST}>{FAST}"
    line = next(line for line in str(tuned).splitlines() if line.startswith(str(spec())))
    times = {each.plan: each.time_ms for each in found[spec()].after.candidates}
    assert line == (
        f"{spec()} on cpu: {SLOW} {times[Plan.parse(SLOW)]:.3g} ms → {FAST} {times[Plan.parse(FAST)]:.3g} ms"
    )
    assert times[Plan.parse(SLOW)] >= 1e3 * delayed_kernels.SLOW  # which it sleeps
    assert times[Plan.parse(FAST)] >= 1e3 * delayed_kernels.FAST


def test_a_compiled_program_runs_what_was_measured(planted, compiled_anew, monkeypatch):
    ran = []

    class Watcher:
        def answered(self, execution, *_):
            ran.append(str(execution.plan))

        def sample(self, *_):
            return None

    function = torch.compile(lambda q, k, v: attention(q, k, v), backend="eager", fullgraph=True)
    monkeypatch.setattr(watching, "active", Watcher())
    monkeypatch.setattr(tuning, "measured_within", replay_rows(rows_of(32)))
    with torch.no_grad():
        function(*tensors())  # whose plan the program keeps, and is asked for again all the same
        with attnbench.autotune(120, backends=FAST) as tuned:
            function(*tensors())
            tuned.measure()
            function(*tensors())
            assert ran == [SLOW, SLOW, FAST]
        function(*tensors())
    assert ran[3:] == [FAST]
    (one,) = tuned.measured
    assert one.calls == 1


def test_a_deadline_ends_a_plan_that_hangs_and_leaves_no_process(planted, monkeypatch):
    monkeypatch.setenv(BREAKS_HOW, "hangs")
    others = children()
    start = time.monotonic()
    tuned = attnbench.autotune(2).measure([spec()], "cpu")
    assert time.monotonic() - start < HANG_SECONDS
    assert children() <= others
    assert not tuned.measured
    assert not own_path().exists()
    assert tuned.skipped == {spec(): "it was not measured whole when 2 s were over"}


def test_all_measuring_of_one_object_shares_its_seconds(planted, monkeypatch):
    now, given = [0.0], []

    def spends(lab, work, deadline):
        given.append(deadline - now[0])
        now[0] += 1.0
        yield from ()

    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(tuning, "measured_within", spends)
    tuned = attnbench.autotune(1.5)
    for _ in range(3):
        tuned.measure([spec()], "cpu")
    assert given == [1.5, 0.5]
    assert tuned.skipped == {spec(): "no time was left of 1.5 s"}
    tuned = attnbench.autotune(0).measure([spec()], "cpu")
    assert tuned.skipped == {spec(): "no time was given"}
    assert "no time was given" in str(tuned)
    assert len(given) == 2


def test_what_takes_most_of_the_program_s_time_comes_first(unmeasured):
    with attnbench.autotune(60) as tuned:
        for length, calls in {16: 40, 64: 1, 48: 4, 8: 1}.items():
            for _ in range(calls):
                attention(*tensors(length))
    assert [case.spec.seqlen_q for case, _ in unmeasured] == [16, 48, 64, 8]
    assert tuned.skipped == {
        spec(16): "it was not measured whole when 60 s were over",
        **{spec(length): "no time was left of 60 s" for length in (48, 64, 8)},
    }


def test_an_interrupt_keeps_what_is_whole_and_leaves_no_process(planted, monkeypatch):
    others = children()
    keep = tuning.Autotune._keep

    def interrupted(self, *arguments):
        keep(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning.Autotune, "_keep", interrupted)
    tuned = attnbench.autotune(120, backends=FAST)
    with pytest.raises(KeyboardInterrupt):
        tuned.measure([spec(32), spec(64)], "cpu")
    assert [each.spec for each in tuned.measured] == [spec(64)]
    assert tuned.skipped == {spec(32): "measuring was interrupted"}
    assert children() <= others
    assert entries(own_path()) == {spec(64): {SLOW, FAST}}
    assert str(explain(*tensors(64)).plan) == FAST
    assert listening.active is None


def test_a_process_that_cannot_measure_because_another_does_reports_so(unmeasured):
    with alone(own_path(), 0.0) as ours:
        assert ours
        # Locks of one process exclude each other as those of two do: each belongs to what was opened.
        tuned = attnbench.autotune(0.2).measure([spec()], "cpu")
    assert not unmeasured
    assert tuned.skipped == {spec(): "another process was measuring for this table all the time"}
    attnbench.autotune(60).measure([spec()], "cpu")
    assert len(unmeasured) == 1


def capturing(monkeypatch, value):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: value)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: value)


def test_nothing_is_measured_while_a_cuda_graph_is_captured(unmeasured, monkeypatch):
    with attnbench.autotune(60) as tuned:
        capturing(monkeypatch, True)
        attention(*tensors())
    assert not unmeasured
    assert "a CUDA graph is being captured" in tuned.skipped[spec()]
    capturing(monkeypatch, False)
    tuned.measure()
    assert [case.spec for case, _ in unmeasured] == [spec()]


def test_calls_that_leave_nothing_to_choose(unmeasured):
    with attnbench.autotune(60) as tuned:
        attention(*tensors(), backend=FAST)
        with use_backend("paced"):
            attention(*tensors(16))
        attention(*tensors(48), backend=FAST)
        attention(*tensors(48))
    assert [case.spec.seqlen_q for case, _ in unmeasured] == [48]
    assert tuned.skipped[spec()] == f"there is nothing to choose: {FAST} was asked for by argument"
    assert tuned.skipped[spec(16)] == "there is nothing to choose: paced was asked for by context"


def test_fp8_tensors_are_no_case_of_a_sweep():
    quantised = spec(dtype="e4m3", descale="head")
    tuned = attnbench.autotune(60).measure([quantised], "cpu")
    assert not tuned.measured
    assert "not e4m3" in tuned.skipped[quantised]


def test_a_program_that_fails_is_not_measured(unmeasured):
    def program():
        with attnbench.autotune(60):
            attention(*tensors())
            raise RuntimeError("the program's own")

    with pytest.raises(RuntimeError, match="the program's own"):
        program()
    assert not unmeasured
    assert listening.active is None
    with attnbench.autotune(0):  # the place is free
        pass


def test_a_gpu_without_room_is_reported_and_not_tried(monkeypatch):
    free = [0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 2**40))
    lab = replace(setup(INSTALLED), device=torch.device("cuda", 0))
    large = attnbench.AttentionSpec.make(batch=1, heads=16, seqlen_q=2**16, head_dim=128)
    assert "GB are free" in shortage(large, [Plan("sdpa-flash:bf16")], lab)
    free[0] = 2**36
    assert shortage(large, [Plan("sdpa-flash:bf16")], lab) is None
    assert "GB are free" in shortage(large, [Plan(f"{name}:bf16") for name in registry().backends] * 3, lab)
    free[0] = 0
    assert shortage(large, [Plan("sdpa-flash:bf16")], replace(lab, device=CPU)) is None


def test_a_table_that_cannot_be_written_is_reported_before_anything_is_measured(own_cache, unmeasured, monkeypatch):
    place = own_cache / "no folder"
    place.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    with pytest.raises(OutputError, match="no folder"):
        attnbench.autotune(60)
    assert listening.active is None


def test_misuse_and_an_autotune_within_an_autotune(unmeasured):
    for wrong in ({"seconds": -1}, {"seconds": float("nan")}, {"seconds": "1"}, {"seconds": True}, {"dtype": "bf16"}):
        with pytest.raises(InputError):
            attnbench.autotune(**wrong)
    with pytest.raises(UnknownBackendError):
        attnbench.autotune(backends=["nobody"])
    with pytest.raises(InputError, match="nowhere"):
        attnbench.autotune().measure([spec()], "nowhere")
    with attnbench.autotune(0) as outer, pytest.raises(MisuseError, match="another autotune"), attnbench.autotune(0):
        pass
    with outer:
        attention(*tensors())
    assert spec() in outer.skipped


HERE = setup(INSTALLED)
NOTHING = Table(HERE.environment, {})


def task_of(asked: ObservedSpec) -> TuningTask | str:
    return tuning_task(asked, HERE, True, ("sdpa-flash", "emulated:fp8"), NOTHING, False)


def test_sequences_are_measured_as_long_as_they_were():
    q, k, v = torch.randn(3, 40, 2, 16, dtype=torch.bfloat16)
    starts = torch.tensor([0, 9, 9, 40], dtype=torch.int32)
    with attnbench.autotune(seconds=0) as tuned:
        attnbench.attention(q, k, v, layout="thd", cu_seqlens_q=starts, max_seqlen_q=36, is_causal=True)
        starts.zero_()  # the copy is what was called
    (seen,) = tuned._asked.heaviest_first
    task = task_of(seen)
    assert task.case.lengths == SequenceLengths(layout="packed", q=(9, 0, 31))
    assert task.case.spec == seen.spec
    assert {str(plan) for plan in task.plans} >= {"sdpa-flash:bf16", "emulated:fp8"}
    assert draw(seen.spec, "normal", CPU, task.case.lengths).lengths.longest_q == 40  # no more than there are tokens
    alone = task_of(ObservedSpec(seen.spec, CPU, choices=seen.choices)).case.lengths
    assert (len(alone.q), max(alone.q), sum(alone.q)) == (3, 46, 46)


def test_padded_rows_are_measured_as_full_as_they_were_and_those_of_no_call_are_not():
    x = torch.randn(2, 2, 8, 16, dtype=torch.bfloat16)
    with attnbench.autotune(seconds=0) as tuned:
        attnbench.attention(x, x, x, kv_lengths=torch.tensor([3, 8], dtype=torch.int32), padding_side="left")
    (seen,) = tuned._asked.heaviest_first
    assert task_of(seen).case.lengths == SequenceLengths(layout="left-padded", q=(8, 8), kv=(3, 8))
    padded = AttentionSpec.make(batch=2, heads=2, seqlen_q=8, head_dim=16, lengths=LengthsKind(batch="padded"))
    assert "does not say how long" in task_of(ObservedSpec(padded, CPU))
