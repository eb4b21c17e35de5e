"""What is measured within a time, in stages: the first plans first, and nobody waits for one that is out of reach."""

import threading
import time
from types import SimpleNamespace

import delayed_kernels
import pytest
from autotune_setup import row
from delayed_kernels import spec
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE
from planted import setup

from attnbench.harness.autotune import deadline as module
from attnbench.harness.autotune.deadline import measured_within
from attnbench.harness.cases.case import Case
from attnbench.harness.sweep.device_sweep import PhaseStarted, StoppedError
from attnbench.harness.sweep.run import Finished
from attnbench.kernels.plan import Plan

PLANS = [Plan(f"paced:bf16-{number}") for number in range(10)]
CASES = [Case(str(spec(length)), spec(length)) for length in (64, 32, 16)]
HERE = setup(delayed_kernels.SOURCE)


class Bench:
    """A line that measures nothing: each stage takes ``starting`` seconds of its clock, and ``each`` for each plan.

    A plan of which ``hangs`` is true never comes to an end before the line is stopped.
    """

    def __init__(self, patch, starting=0.0, each=1.0, call_ms=lambda plan: 1.0, hangs=lambda plan: False, clock=True):
        self.starting, self.each, self.call_ms, self.hangs = starting, each, call_ms, hangs
        self.now, self.stages, self.started = 0.0, [], []
        self.stopped = threading.Event()
        patch.setattr(module, "DeviceSweep", lambda lab: self)
        if clock:
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def start(self, plans):
        self.started = list(plans)

    def stop(self):
        self.stopped.set()

    def measure(self, case, plans):
        self.stages.append((case, list(plans)))
        yield PhaseStarted("preparing", case)
        if any(map(self.hangs, plans)):
            self.stopped.wait(PATIENCE)
            raise StoppedError
        self.now += self.starting + self.each * len(plans)
        for plan in reversed(plans):
            yield row(case.spec, plan, self.call_ms(plan))

    def rows(self, work, seconds):
        return [event.row for event in measured_within(HERE, work, seconds) if isinstance(event, Finished)]


@given(
    counts=st.lists(st.integers(2, 10), min_size=1, max_size=3),
    starting=st.floats(0.0, 40.0),
    each=st.floats(0.01, 10.0),
    times=st.lists(st.floats(0.1, 9.0), min_size=10, max_size=10),
    seconds=st.floats(0.1, 300.0),
)
def test_what_has_rows_are_the_first_plans_and_each_stage_is_beside_the_fastest(counts, starting, each, times, seconds):
    call_ms = dict(zip(PLANS, times, strict=True))
    work = [(case, PLANS[:count]) for case, count in zip(CASES, counts, strict=False)]
    with pytest.MonkeyPatch.context() as patch:
        bench = Bench(patch, starting, each, call_ms.__getitem__)
        rows = bench.rows(work, seconds)
    for case, plans in work:
        own = [plans for known, plans in bench.stages if known == case]
        found = dict.fromkeys(row.plan for row in rows if row.case == case.name)
        assert set(found) == set(plans[: len(found)])
        reached: list[Plan] = []
        for stage in own:
            if reached:
                fastest, *stage = stage
                assert call_ms[fastest] == min(call_ms[plan] for plan in reached)
            assert stage == plans[len(reached) : len(reached) + len(stage)]  # the next ones, each once
            reached += stage
    begun = bench.now - (starting + each * len(bench.stages[-1][1]))
    assert begun < seconds  # no stage begins when time is over
    if bench.now < seconds:
        assert len({row.key for row in rows}) == sum(counts)
    assert [case for case, _ in bench.stages] == sorted((case for case, _ in bench.stages), key=CASES.index)


def test_with_time_for_all_there_are_few_stages_and_with_little_they_are_small(monkeypatch):
    bench = Bench(monkeypatch, starting=20.0, each=1.0)
    bench.rows([(case, PLANS) for case in CASES], 600.0)
    assert [len(plans) for _, plans in bench.stages] == [4, 7, 10, 10]  # once it is known how long they take, at once
    bench = Bench(monkeypatch, starting=20.0, each=1.0)
    bench.rows([(CASES[0], PLANS)], 40.0)
    assert [len(plans) for _, plans in bench.stages] == [4, 2]


def test_a_plan_that_never_ends_costs_its_own_stage_and_the_deadline_ends_it_at_once(monkeypatch):
    bench = Bench(monkeypatch, each=0.0, hangs=lambda plan: plan == PLANS[4], clock=False)
    rows = bench.rows([(CASES[0], PLANS), (CASES[1], PLANS)], time.monotonic() + 0.5)
    assert bench.stopped.is_set()
    assert {row.plan for row in rows} == set(PLANS[:4])
    assert {case for case, _ in bench.stages} == {CASES[0]}


def test_no_more_processes_start_at_once_than_there_are_cores_for(monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 3)
    bench = Bench(monkeypatch)
    one, *others = PLANS
    pairs = [Plan(one.forward, f"paced:bf16-{number}") for number in range(3)]
    bench.rows([(CASES[0], [*pairs, *others]), (CASES[1], PLANS)], 60.0)
    assert bench.started == [pairs[0], *others[:2]]  # plans of one forward share a process
