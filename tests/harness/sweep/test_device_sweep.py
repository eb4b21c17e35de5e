"""One device's cases with workers that live in the test: who pays for a death, what is tried again, and how it ends."""

import threading
import time
from dataclasses import replace
from datetime import datetime, timezone

import pytest
from patience import PATIENCE
from planted import setup
from scripted_workers import wait_until

from attnbench.harness.cases.case import Case
from attnbench.harness.measure.bench import Bench
from attnbench.harness.measure.setup import DeviceSetup
from attnbench.harness.results.peaks import PEAK_TFLOPS
from attnbench.harness.results.records import Measurement
from attnbench.harness.sweep import device_sweep, devices
from attnbench.harness.sweep.backend_process import BackendProcess
from attnbench.harness.sweep.device_sweep import DeviceSweep, PhaseStarted, StoppedError
from attnbench.harness.sweep.worker_process import LostError
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry
from attnbench.problem.spec import AttentionSpec

CASE, NEXT = (
    Case(name, AttentionSpec.make(batch=1, heads=1, seqlen_q=16, head_dim=8), ("normal",)) for name in ("one", "next")
)
WIDE, SMALL, EXACT, WIDER = (
    Plan.parse(name) for name in ("wide:bf16", "small:fp8", "reference:fp32", "reference:fp64")
)
PLANS = [WIDE, SMALL, EXACT, WIDER]
DIED = LostError("crashed", "the process was killed", died=True)
FULL = LostError("oom", "OutOfMemoryError: no more", died=False)


def measured(case=CASE, plans=PLANS, line=None):
    """The rows by plan, and the phases in the order in which they were reported."""
    if line is None:
        with DeviceSweep(setup()) as line:
            return measured(case, plans, line)
    events = list(line.measure(case, plans))
    rows = [event for event in events if not isinstance(event, PhaseStarted)]
    assert len({row.plan for row in rows}) == len(rows)
    assert all(row.case == case.name for row in rows)
    return {row.plan: row for row in rows}, [event.phase for event in events if isinstance(event, PhaseStarted)]


def statuses(rows):
    return {plan: row.status for plan, row in rows.items()}


def test_each_plan_has_one_row_and_each_phase_is_reported_once(local_workers):
    rows, phases = measured()
    assert statuses(rows) == dict.fromkeys(PLANS, "ok")
    assert phases == ["preparing", "timing", "judging"]
    assert local_workers.request_counts["open", CASE] == 3
    assert len(local_workers.workers) == 3  # one for each backend
    assert {worker.generation for worker in local_workers.workers} == {1}
    assert all(worker.requests[-1][1] == "close" for worker in local_workers.workers)
    assert not any(worker.alive for worker in local_workers.workers)
    for (method, *what), times in local_workers.request_counts.items():
        assert times == 1 or method in ("sample", "open", "close"), (method, what)


@pytest.mark.parametrize(("method", "status"), [("prepare", "crashed"), ("sample", "timeout"), ("conclude", "oom")])
def test_a_death_costs_one_row_and_the_others_of_its_backend_are_measured(local_workers, method, status):
    local_workers.fail_request(LostError(status, "gone", died=True), method, EXACT, times=2)
    rows, _ = measured()
    assert statuses(rows) == {**dict.fromkeys(PLANS, "ok"), EXACT: status}
    assert rows[EXACT].reason == "gone"
    assert len(rows[WIDER].time_ms["call"]) == len(rows[WIDER].performance.host_ms) > 0


@pytest.mark.parametrize("method", ["prepare", "sample", "conclude"])
def test_what_had_no_memory_beside_others_is_tried_alone(local_workers, method):
    local_workers.fail_request(FULL, method, WIDE)
    rows, phases = measured()
    assert statuses(rows) == dict.fromkeys(PLANS, "ok")
    assert phases == ["preparing", "timing", "judging"] * 2
    assert [local_workers.request_counts["prepare", plan] for plan in PLANS] == [2, 1, 1, 1]


def test_memory_that_does_not_suffice_alone_either_is_the_row(local_workers):
    local_workers.fail_request(FULL, "prepare", WIDE, times=9)
    rows, _ = measured()
    assert statuses(rows) == {**dict.fromkeys(PLANS, "ok"), WIDE: "oom"}
    assert local_workers.request_counts["prepare", WIDE] == 2
    assert measured(plans=[WIDE])[0][WIDE].status == "oom"
    assert local_workers.request_counts["prepare", WIDE] == 3


@pytest.mark.parametrize("method", ["prepare", "sample", "conclude"])
def test_what_failed_for_another_reason_is_not_tried_again(local_workers, method):
    local_workers.fail_request(LostError("error", "RuntimeError: no", died=False), method, WIDE)
    rows, phases = measured()
    assert statuses(rows) == {**dict.fromkeys(PLANS, "ok"), WIDE: "error"}
    assert len(phases) == 3
    assert local_workers.request_counts["prepare", WIDE] == 1
    assert local_workers.request_counts["drop", WIDE] == (
        method == "sample"
    )  # so that it holds no memory while others go on


@pytest.mark.parametrize("sample", [0.0, float("nan"), float("inf")])
def test_a_sample_that_is_no_time_costs_its_own_row(local_workers, monkeypatch, sample):
    """An event that was never recorded reads as 0."""
    taken = Bench.sample

    def broken(self, plan, *how):
        visit = taken(self, plan, *how)
        if plan == WIDE:
            visit.time_ms["kernel"][-1] = sample
        return visit

    monkeypatch.setattr(Bench, "sample", broken)
    rows, _ = measured()
    assert statuses(rows) == {**dict.fromkeys(PLANS, "ok"), WIDE: "error"}
    assert rows[WIDE].reason == f"a sample of the cost kernel took {sample:g} ms"


def test_times_are_given_for_the_host_as_fast_as_it_usually_was(local_workers, monkeypatch):
    taken, launches, usual = Bench.sample, iter([0.02, 0.01, 0.04] + [0.01] * 999), []

    def on_gpu(self, plan, replay, launch_ms):
        usual.append(launch_ms)
        return replace(taken(self, plan, replay, launch_ms), launch_ms=next(launches), host_scale=0.5)

    monkeypatch.setattr(Bench, "sample", on_gpu)
    with DeviceSweep(setup()) as line:
        row = measured(plans=[WIDE], line=line)[0][WIDE]
        measured(NEXT, [WIDE], line)
    assert usual[:4] == [None, 0.02, 0.015, 0.02]
    assert usual[-1] == 0.01
    assert row.performance.host_scale == [0.5] * len(row.performance.visits["call"])
    assert Measurement.model_validate_json(row.to_line()) == row


@pytest.mark.parametrize(("late_ms", "check"), [(0.0, None), (1e3, "settled")])
def test_a_row_holds_what_was_found_beside_its_times(local_workers, monkeypatch, late_ms, check):
    sampled, concluded, ended = Bench.sample, Bench.conclude, []
    found = {"memory_bytes": 7, "retained_bytes": 5, "leak": 0.25}
    monkeypatch.setattr(Bench, "sample", lambda *asked: replace(sampled(*asked), replayed=("call",), late_ms=late_ms))
    monkeypatch.setattr(Bench, "conclude", lambda *asked: replace(concluded(*asked), **found))
    monkeypatch.setattr(Registry, "emulated", lambda *_: ended.append(datetime.now(timezone.utc)) or True)
    row = measured(plans=[WIDE])[0][WIDE]
    assert (row.performance.memory_bytes, row.performance.retained_bytes, row.correctness.leak) == (7, 5, 0.25)
    assert (row.performance.replayed, row.check) == (["call"], check)
    assert row.emulated
    assert row.started < ended[-1], "it is when the measurement began"


def test_a_time_that_cannot_be_is_an_error_and_a_possible_one_a_share(local_workers, monkeypatch):
    lab = setup()
    with DeviceSweep(lab) as line:
        monkeypatch.setitem(PEAK_TFLOPS, lab.environment.device_name, {"bf16": 1e-9})
        row = measured(plans=[WIDE], line=line)[0][WIDE]
        assert row.status == "error"
        assert "of the device's peak" in row.reason
        assert (row.check, row.ran.keys()) == ("peak", {"forward"})
        first = dict(line.spent)
        assert set(first) == {"preparing", "timing", "judging"}
        monkeypatch.setitem(PEAK_TFLOPS, lab.environment.device_name, {"bf16": 1e3})
        row = measured(NEXT, [WIDE], line)[0][WIDE]
        assert row.status == "ok"
        assert 0 < row.performance.peak_share < 1
        assert all(line.spent[phase] > first[phase] for phase in first)


@pytest.mark.parametrize(("cores", "together"), [(1, 1), (64, 2)])
def test_two_backends_work_at_once_on_a_cpu_but_not_while_one_is_timed(local_workers, monkeypatch, cores, together):
    inside, most, met = [], [], threading.Event()

    def watched(usual, alone=False):
        def work(process, plan, *arguments, **named):
            inside.append(plan)
            most.append(len(inside))
            if len(inside) >= together or alone:
                met.set()
            assert met.wait(30.0), "no second backend began"
            time.sleep(0.05)  # a third would come now
            assert not (alone and len(inside) > 1)
            found = usual(process, plan, *arguments, **named)
            inside.remove(plan)
            return found

        return work

    monkeypatch.setattr(device_sweep, "usable_cores", lambda: cores)
    monkeypatch.setattr(BackendProcess, "prepare", watched(BackendProcess.prepare))
    monkeypatch.setattr(BackendProcess, "sample", watched(BackendProcess.sample, alone=True))
    assert set(statuses(measured()[0]).values()) == {"ok"}
    assert max(most) == together


@pytest.mark.parametrize(("compiles", "processes"), [(False, 2), (True, 3)])
def test_kernels_that_compile_have_processes_of_their_own(local_workers, monkeypatch, compiles, processes):
    backends = [replace(each, compiles=compiles) for each in setup().registry.backends.values()]
    monkeypatch.setattr(DeviceSetup, "registry", Registry(backends))
    with DeviceSweep(setup()) as line:
        line.start([WIDE, EXACT, WIDER])
        assert len(local_workers.workers) == processes
        assert statuses(measured(line=line, plans=[WIDE, EXACT, WIDER])[0]) == dict.fromkeys([WIDE, EXACT, WIDER], "ok")
        assert len(local_workers.workers) == processes


@pytest.mark.parametrize("method", ["open", "prepare", "sample", "conclude"])
def test_stopping_ends_what_is_under_way_and_invents_no_row(local_workers, method):
    """As for a real worker: the request that is under way ends because its process was killed."""
    asked, killed = threading.Event(), threading.Event()

    def hangs(wanted, *arguments):
        if wanted != method or asked.is_set():
            return False
        asked.set()
        assert killed.wait(PATIENCE)
        return True

    local_workers.faults.append((DIED, 1, hangs))
    rows, ended = [], []

    def work():
        try:
            with line:
                rows.extend(event for event in line.measure(CASE, PLANS) if not isinstance(event, PhaseStarted))
        except StoppedError as error:
            ended.append(error)

    line = DeviceSweep(setup())
    thread = threading.Thread(target=work)
    thread.start()
    assert asked.wait(PATIENCE)
    line.stop()
    assert not any(worker.alive for worker in local_workers.workers)
    killed.set()
    wait_until(lambda: not thread.is_alive())
    assert len(ended) == 1
    assert rows == []
    assert not any(worker.alive for worker in local_workers.workers)


@pytest.mark.parametrize("phase", ["preparing", "timing", "judging"])
def test_a_sweep_that_is_stopped_between_two_requests_makes_no_more(local_workers, phase):
    """Each would start its process again."""
    with DeviceSweep(setup()) as line:
        events = line.measure(CASE, PLANS)
        while next(events).phase != phase:
            pass
        line.stop()
        before = local_workers.request_counts
        with pytest.raises(StoppedError):
            next(events)
    assert local_workers.request_counts == before


def test_the_first_cases_are_measured_before_the_rest_is_compiled(local_workers, monkeypatch):
    order: list[object] = []

    class Compiled:
        needed = True

        def __init__(self, work, setup):
            self.names = [case.name for case, _ in work]

        def run(self):
            order.append(self.names)
            return {}

    monkeypatch.setattr(devices, "FirstRuns", Compiled)
    monkeypatch.setattr(devices, "_FIRST", 1)
    cases = [replace(CASE, name=name) for name in ("one", "two", "three")]
    with devices.DeviceSweeps([setup()]) as sweeps:
        for event in sweeps.measured([devices.Task(case, EXACT, "ok", ()) for case in cases]):
            if not isinstance(event, PhaseStarted):
                order.append(event.case)
    assert order == [["one"], "one", ["two", "three"], "two", "three"]
