"""autotune: what a program asks is measured after it, whole or not at all, and chosen by from then on."""

import json
import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import paced
import pytest
import torch
from paced import HANG_SECONDS, HOW, spec
from planted import CPU, laboratory

import attnbench
from attnbench import api, attention, choice_hook, explain, guard_hook, use_backend
from attnbench.errors import InputError, MisuseError, OutputError, UnknownBackendError
from attnbench.execution import Execution
from attnbench.harness import autotune as tuning
from attnbench.harness.bounded import measured_within
from attnbench.harness.cases import Case
from attnbench.harness.condense import condense
from attnbench.harness.laboratory import INSTALLED
from attnbench.harness.sweep import Finished
from attnbench.harness.tuning import alone, shortage
from attnbench.plan import Plan
from attnbench.registry import registry
from attnbench.table import Table
from attnbench.user_table import user_table_path

SLOW, FAST, FP8 = "paced:bf16-slow", "paced:bf16-fast", "paced:fp8"
BREAKS = "paced:bf16-breaks"


@pytest.fixture(autouse=True)
def unread():
    api.forget_choices()
    yield
    api.forget_choices()


@pytest.fixture
def planted(monkeypatch):
    """Kernels of which the first in the declared order is the slowest."""
    paced.install(monkeypatch.setattr)
    api.forget_choices()
    yield
    monkeypatch.undo()
    registry.cache_clear()


@pytest.fixture
def unmeasured(planted, monkeypatch):
    """Nothing is measured; the answer lists what would have been, in order."""
    works = []

    def nothing(lab, work, deadline):
        works.extend(work)
        yield from ()

    monkeypatch.setattr(tuning, "measured_within", nothing)
    return works


def tensors(length=32, grad=False):
    generator = torch.Generator().manual_seed(length)
    shape = (1, 2, length, 16)
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_(grad) for _ in range(3)]


def step(length=32, **options):
    x = tensors(length, grad=True)
    return torch.autograd.grad(attention(*x, **options).sum(), x)


def entries(path):
    """The plans of each spec."""
    found = {}
    for asked, plan in Table.load(path).entries:
        found.setdefault(asked, set()).add(str(plan))
    return found


def own_path(environment=None):
    return user_table_path(environment or laboratory(paced.SOURCE).environment)


def children():
    found = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            found |= set((task / "children").read_text().split())
    return found


# --- measured, and chosen by ---


def test_the_fastest_is_chosen_by_measurement_and_the_user_s_program_is_left_alone(planted):
    x = tensors()
    before = attention(*x)
    assert (str(explain(*x).plan), explain(*x).basis) == (SLOW, "rule")
    random_states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with attnbench.autotune(120) as tuned:
        assert torch.equal(attention(*x), before)
        attention(*x, return_lse=True)
        attention(*x, layout="bshd", is_causal=False)  # another question, another spec: 32 heads on 2 queries
        step()
        assert not tuned.measured
        assert not children()
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == random_states[1:]
    assert not children()
    swapped = paced.AttentionSpec.make(batch=1, heads=32, seqlen_q=2, head_dim=16)
    training = spec(direction="training")
    found = {each.spec: each for each in tuned.measured}
    assert {asked: each.calls for asked, each in found.items()} == {spec(): 2, training: 1, swapped: 1}
    assert not tuned.skipped
    assert tuned.tables == [own_path()]
    for asked, plan in {spec(): FAST, training: f"{FAST}>{FAST}"}.items():
        assert str(found[asked].before.plan) == plan.replace("fast", "slow")
        assert (str(found[asked].after.plan), found[asked].after.basis) == (plan, "measured")
    assert entries(own_path()) == {
        spec(): {SLOW, FAST, BREAKS},
        swapped: {SLOW, FAST, BREAKS},
        training: {f"{name}>{name}" for name in (SLOW, FAST, BREAKS)},
    }
    assert (str(explain(*x).plan), explain(*x).basis) == (FAST, "measured")
    assert str(explain(*tensors(grad=True)).plan) == f"{FAST}>{FAST}"
    line = next(line for line in str(tuned).splitlines() if line.startswith(str(spec())))
    times = {each.plan: each.time_ms for each in found[spec()].after.candidates}
    assert line == (
        f"{spec()} on cpu: {SLOW} {times[Plan.parse(SLOW)]:.3g} ms → {FAST} {times[Plan.parse(FAST)]:.3g} ms"
    )
    assert times[Plan.parse(SLOW)] > 2 * times[Plan.parse(FAST)]


def test_fp8_is_measured_for_who_opens_it_and_chosen_for_nobody_else(planted, monkeypatch, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "measured_within", replayed(rows))
        with attnbench.autotune(120, backends=FAST) as tuned:
            attention(*tensors())
    assert entries(own_path()) == {spec(): {SLOW, FAST}}  # what is chosen now is measured beside what was named
    with attnbench.autotune(120) as tuned:
        attention(*tensors())
        attention(*tensors(), max_error=0.5)
    assert f"{FAST} " in str(tuned).splitlines()[1]
    assert str(tuned).splitlines()[1].endswith(" ms, as before")
    assert [(each.calls, str(each.before.plan), str(each.after.plan)) for each in tuned.measured] == [
        (2, FAST, FAST),
        (2, FAST, FP8),
    ]
    assert entries(own_path()) == {spec(): {SLOW, FAST, BREAKS, FP8}}
    assert str(explain(*tensors()).plan) == FAST
    assert str(explain(*tensors(), dtype="fp8").plan) == FP8
    error = explain(*tensors(), dtype="fp8").chosen.error
    assert str(explain(*tensors(), max_error=error / 2).plan) == FAST


def test_real_kernels(own_cache):
    x = [torch.randn(1, 2, 128, 16) for _ in range(3)]
    with attnbench.autotune(300, backends=("sdpa-flash", "sdpa-math")) as tuned:
        attention(*x, is_causal=True)
    (one,) = tuned.measured
    assert not tuned.skipped
    assert not one.lost
    choice = explain(*x, is_causal=True)
    assert choice == one.after
    assert choice.basis == "measured"
    times = {str(each.plan): each.time_ms for each in choice.candidates if each.time_ms is not None}
    assert times.keys() == {"sdpa-flash:fp32", "sdpa-math:fp32"}
    assert choice.chosen.time_ms <= 1.03 * min(times.values())  # within the noise the more accurate one runs
    assert choice.chosen.error <= choice.budget


def test_a_plan_that_dies_costs_itself_alone(planted, monkeypatch):
    monkeypatch.setenv(HOW, "dies")
    tuned = attnbench.autotune(120).measure([spec()], "cpu")
    (one,) = tuned.measured
    assert one.lost.keys() == {BREAKS}
    assert "exit code 7" in one.lost[BREAKS]
    assert "exit code 7" in str(tuned)
    assert str(explain(*tensors()).plan) == FAST
    assert {str(each.plan): each.verdict for each in explain(*tensors()).candidates}[BREAKS] == "unmeasured"


# --- bounded ---


def test_a_deadline_ends_a_plan_that_hangs_and_leaves_no_process(planted, monkeypatch):
    monkeypatch.setenv(HOW, "hangs")
    start = time.monotonic()
    tuned = attnbench.autotune(4).measure([spec()], "cpu")
    assert time.monotonic() - start < HANG_SECONDS / 10
    assert not children()
    assert not tuned.measured
    assert not own_path().exists()
    assert tuned.skipped == {spec(): "it was not measured whole when 4 s were over"}


def test_without_time_nothing_is_measured_and_that_is_said(unmeasured):
    with attnbench.autotune(0) as tuned:
        attention(*tensors())
    assert tuned.skipped == {spec(): "no time was given"}
    assert "no time was given" in str(tuned)
    assert not unmeasured
    assert not own_path().exists()


def test_all_measuring_of_one_object_shares_its_seconds(unmeasured, monkeypatch):
    def spends(lab, work, deadline):
        unmeasured.append(deadline - time.monotonic())
        time.sleep(1.0)
        yield from ()

    monkeypatch.setattr(tuning, "measured_within", spends)
    tuned = attnbench.autotune(1.5)
    for _ in range(3):
        tuned.measure([spec()], "cpu")
    assert len(unmeasured) == 2
    assert unmeasured[1] < unmeasured[0] - 0.9
    assert tuned.skipped == {spec(): "no time was left of 1.5 s"}


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


@pytest.fixture(scope="module")
def rows():
    """Of two specs, as they are measured."""
    work = [(Case(str(each), each), [Plan(SLOW), Plan(FAST)]) for each in (spec(64), spec(32))]
    events = list(measured_within(laboratory(paced.SOURCE), work, time.monotonic() + 300))
    return [event.row for event in events if isinstance(event, Finished)]


def replayed(rows, calls=None, most=None):
    """Instead of measuring: the rows of the specs and plans that are to be measured."""

    def measured(lab, work, deadline):
        calls is None or calls.append([case.spec for case, _ in work])
        wanted = [(case.spec, plan) for case, plans in work for plan in plans]
        for index, row in enumerate([row for row in rows if (row.spec, row.plan) in wanted][:most]):
            yield Finished(index, len(wanted), row, resumed=False)

    return measured


def test_rows_come_case_by_case(rows):
    assert [(row.spec, row.status) for row in rows] == [(spec(length), "ok") for length in (64, 64, 32, 32)]
    assert {str(row.plan) for row in rows[:2]} == {str(row.plan) for row in rows[2:]} == {SLOW, FAST}


def test_a_spec_that_is_cut_off_is_not_in_the_table(planted, monkeypatch, rows):
    monkeypatch.setattr(tuning, "measured_within", replayed(rows, most=3))
    tuned = attnbench.autotune(60, backends=FAST).measure([spec(32), spec(64), spec(8)], "cpu")
    assert [each.spec for each in tuned.measured] == [spec(64)]
    assert entries(own_path()) == {spec(64): {SLOW, FAST}}
    assert tuned.skipped == {
        spec(32): "it was not measured whole when 60 s were over",
        spec(8): "no time was left of 60 s",
    }


def test_an_interrupt_keeps_what_is_whole_and_leaves_no_process(planted, monkeypatch):
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
    assert not children()
    assert entries(own_path()) == {spec(64): {SLOW, FAST}}
    assert str(explain(*tensors(64)).plan) == FAST
    assert choice_hook.listener is None


# --- what is left alone ---


def test_what_the_table_has_is_not_measured_again_unless_that_is_asked_for(planted, monkeypatch, rows):
    calls, found = [], []

    monkeypatch.setattr(tuning, "measured_within", replayed(rows, calls))
    for again in (False, False, True):
        tuned = attnbench.autotune(60, backends=(FAST, SLOW), again=again)
        found.append(tuned.measure([spec(64)], "cpu"))
        tuned.measure([spec(64)], "cpu")  # what it has measured itself it does not measure twice
    assert calls == [[spec(64)], [spec(64)]]
    assert [len(each.measured) for each in found] == [1, 0, 1]
    assert [list(each.skipped.values()) for each in found] == [
        [], ["your table has it already; again=True measures it anew"], [],
    ]  # fmt: skip
    alone = attnbench.autotune(60, backends=FAST, again=True).measure([spec(64)], "cpu")
    assert alone.skipped[spec(64)] == f"there is nothing to choose: of what was named nothing but {FAST} can serve it"


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
    assert choice_hook.listener is None
    with attnbench.autotune(0):  # the place is free
        pass


def test_calls_are_counted_only_while_it_is_open(unmeasured):
    attention(*tensors())
    with attnbench.autotune(0):
        attention(*tensors())
        assert type(next(iter(api._executions.values()))) is not Execution
    attention(*tensors())
    assert [type(each) for each in api._executions.values()] == [Execution]


def test_a_compiled_program_is_seen_and_not_compiled_anew(unmeasured):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    function = torch.compile(lambda q, k, v: attention(q * 1, k, v, is_causal=True), backend=backend, fullgraph=True)
    x = tensors()
    with torch.no_grad():
        function(*x)
        with attnbench.autotune(0) as tuned:
            for _ in range(3):
                function(*x)
        function(*x)
    assert len(graphs) == 1
    assert [asked.calls for asked in tuned._asked.heaviest_first] == [3]
    assert [asked.mask.kind for asked in tuned.skipped] == ["causal"]
    torch._dynamo.reset()


def test_a_compiled_program_runs_what_was_measured(planted, monkeypatch, rows):
    torch._dynamo.reset()
    ran = []

    class Watcher:
        def answered(self, execution, *_):
            ran.append(str(execution.plan))

        def sample(self, *_):
            return None

    function = torch.compile(lambda q, k, v: attention(q, k, v), backend="eager", fullgraph=True)
    monkeypatch.setattr(guard_hook, "watcher", Watcher())
    monkeypatch.setattr(tuning, "measured_within", replayed(rows))
    with torch.no_grad():
        with attnbench.autotune(120, backends=FAST) as tuned:
            function(*tensors())
            tuned.measure()
            function(*tensors())
            assert ran == [SLOW, FAST]
        function(*tensors())
    assert ran[2:] == [FAST]
    (one,) = tuned.measured
    assert one.calls == 1
    torch._dynamo.reset()


# --- several processes ---


def test_of_two_processes_one_measures_and_the_other_finds_it_in_the_table(tmp_path):
    start = tmp_path / "start"
    commands = [(tmp_path / f"ready{number}", lengths) for number, lengths in enumerate(((32, 48), (48, 24)))]
    running = [
        subprocess.Popen(
            [sys.executable, paced.__file__, ready, start, *map(str, lengths)], stdout=subprocess.PIPE, text=True
        )
        for ready, lengths in commands
    ]
    while not all(ready.exists() for ready, _ in commands):
        assert all(each.poll() is None for each in running)
        time.sleep(0.01)
    start.touch()
    said = [json.loads(each.communicate(timeout=300)[0]) for each in running]
    assert sorted(length for each in said for length in each["measured"]) == [24, 32, 48]
    assert [why for each in said for why in each["skipped"].values()] == [
        "your table has it already; again=True measures it anew"
    ]
    assert all(each["chosen"][length] == [FAST, "measured"] for each in said for length in each["chosen"])


def test_what_another_process_has_measured_since_is_chosen_by(planted, rows):
    assert explain(*tensors()).basis == "rule"
    here = laboratory(paced.SOURCE).environment
    Table.from_entries(here, condense(rows)).save(own_path())  # as another process does: this one has read its tables
    tuned = attnbench.autotune(60, backends=(SLOW, FAST))
    with tuned:
        attention(*tensors())
    assert list(tuned.skipped) == [spec()]
    assert (str(explain(*tensors()).plan), explain(*tensors()).basis) == (FAST, "measured")


def test_who_cannot_measure_because_another_does_says_so(unmeasured):
    with alone(own_path(), 0.0) as ours:
        assert ours
        # Locks of one process exclude each other as those of two do: each belongs to what was opened.
        tuned = attnbench.autotune(0.2).measure([spec()], "cpu")
    assert not unmeasured
    assert tuned.skipped == {spec(): "another process was measuring for this table all the time"}
    attnbench.autotune(60).measure([spec()], "cpu")
    assert len(unmeasured) == 1


# --- errors ---


def test_a_table_that_cannot_be_written_is_said_before_anything_is_measured(own_cache, unmeasured, monkeypatch):
    place = own_cache / "no folder"
    place.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    with pytest.raises(OutputError, match="no folder"):
        attnbench.autotune(60)
    assert choice_hook.listener is None


@pytest.mark.parametrize(
    "arguments", [{"seconds": -1}, {"seconds": float("nan")}, {"seconds": float("inf")}, {"seconds": "1"},
                  {"seconds": True}, {"dtype": "bf16"}],
)  # fmt: skip
def test_arguments_that_cannot_be(arguments):
    with pytest.raises(InputError):
        attnbench.autotune(**arguments)


def test_unknown_names_devices_and_an_autotune_within_an_autotune(unmeasured):
    with pytest.raises(UnknownBackendError):
        attnbench.autotune(backends=["nobody"])
    with pytest.raises(InputError, match="nowhere"):
        attnbench.autotune().measure([spec()], "nowhere")
    with attnbench.autotune(0) as outer, pytest.raises(MisuseError, match="another autotune"), attnbench.autotune(0):
        pass
    with outer:
        attention(*tensors())
    assert spec() in outer.skipped


def test_a_gpu_without_room_is_said_and_not_tried(monkeypatch):
    free = [0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 2**40))
    lab = laboratory(INSTALLED)
    object.__setattr__(lab, "device", torch.device("cuda", 0))
    large = attnbench.AttentionSpec.make(batch=1, heads=16, seqlen_q=2**16, head_dim=128)
    assert "GB are free" in shortage(large, [Plan("sdpa-flash:bf16")], lab)
    free[0] = 2**36
    assert shortage(large, [Plan("sdpa-flash:bf16")], lab) is None
    assert "GB are free" in shortage(large, [Plan(f"{name}:bf16") for name in registry().backends] * 3, lab)
    object.__setattr__(lab, "device", CPU)
    free[0] = 0
    assert shortage(large, [Plan("sdpa-flash:bf16")], lab) is None


def test_attention_alone_loads_nothing_of_the_harness():
    code = (
        "import sys, torch, attnbench; x = torch.randn(1, 1, 4, 8); attnbench.attention(x, x, x);"
        "print([name for name in sys.modules if name.startswith('attnbench.harness')], attnbench.autotune.__module__)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["[]", "attnbench.harness.autotune"]
