"""The race of a case's plans: whoever wins is timed and judged, and all others have a row that says why not."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import setup

from attnbench.harness.cases.case import Case
from attnbench.harness.measure.bench import Bench
from attnbench.harness.measure.findings import Visit
from attnbench.harness.results.condense import condense
from attnbench.harness.sweep import device_sweep
from attnbench.harness.sweep.device_sweep import DeviceSweep, PhaseStarted
from attnbench.harness.sweep.interleave import Samples
from attnbench.harness.sweep.race import Race
from attnbench.harness.sweep.worker_process import LostError
from attnbench.kernels.plan import Plan
from attnbench.problem.spec import AttentionSpec

FORWARDS = ("a:bf16", "a:fp8", "b:bf16", "b:fp8")
BACKWARDS = ("a:bf16", "b:bf16", "b:fp8")
PAIRS = [Plan(forward, backward) for forward in FORWARDS for backward in BACKWARDS]
times = st.floats(1e-3, 1e3)


def look(forward, backward, late=0.0):
    """One visit: a call takes the device's time of both passes, or the host's."""
    passes = {"prepared": [forward]} | ({} if backward is None else {"backward": [backward]})
    call = forward + (backward or 0.0) + late
    return Samples({**passes, "call": [call]}, spans=[(0.0, 1.0)])


def run(race, forwards, backwards, inaccurate=(), late=None):
    """Race until nothing enters; returns the plans in the order in which they were judged."""
    judged = []
    while True:
        while unseen := race.unseen():
            for plan in unseen:
                extra = (late or {}).get(plan, 0.0)
                race.looks[plan] = look(forwards[plan.forward], backwards.get(plan.backward), extra)
        for plan in race.doubtful():
            race.looks[plan].time_ms["call"].append(forwards[plan.forward] + backwards.get(plan.backward, 0.0))
            race.looks[plan].spans.append((0.0, 1.0))
        entrants = race.entrants()
        for plan in entrants:
            race.timed[plan] = look(forwards[plan.forward], backwards.get(plan.backward))
        finalists = race.finalists()
        if not (entrants or finalists):
            return judged
        judged += finalists
        for plan in finalists:
            if plan in inaccurate:
                race.leave(plan)


@given(
    st.fixed_dictionaries(dict.fromkeys(FORWARDS, times)),
    st.fixed_dictionaries(dict.fromkeys(BACKWARDS, times)),
    st.sets(st.sampled_from(PAIRS)),
)
def test_the_fastest_accurate_plans_are_judged_with_and_without_fp8(forwards, backwards, inaccurate):
    race = Race(PAIRS)
    entered = run(race, forwards, backwards, inaccurate)
    took = {plan: forwards[plan.forward] + backwards[plan.backward] for plan in PAIRS}
    for admitted in (lambda plan: not plan.fp8, lambda plan: True):
        accurate = [plan for plan in PAIRS if admitted(plan) and plan not in inaccurate]
        if accurate:
            assert min(took[plan] for plan in entered if plan in accurate) == min(took[plan] for plan in accurate)
    lost = race.slower()
    assert len(entered) == len(set(entered))
    assert {*entered, *lost} == {*PAIRS}
    for plan, reason in lost.items():
        assert took[plan] >= min(took[each] for each in entered if each not in inaccurate)
        assert reason.startswith("slower than ")
        known = race.known(plan).time_ms
        assert known["prepared"] == [forwards[plan.forward]]
        assert known["backward"] == [backwards[plan.backward]]


@given(st.fixed_dictionaries(dict.fromkeys(FORWARDS, times)), st.sets(st.sampled_from(FORWARDS)))
def test_required_and_emulated_plans_run_whatever_their_time_and_emulated_ones_beat_nobody(forwards, chosen):
    plans = [Plan(name) for name in FORWARDS]
    required = {Plan(name) for name in chosen}
    assert required <= {*run(Race(plans, required), forwards, {})}
    alone = run(Race([plan for plan in plans if plan not in required]), forwards, {})
    assert {*run(Race(plans, emulated=required), forwards, {})} == {*alone, *required}


def test_a_plan_that_only_its_host_made_slow_is_looked_at_again():
    forwards = {"a:bf16": 1.0, "b:bf16": 0.9}
    plans = [Plan(name) for name in forwards]
    race = Race(plans)
    assert run(race, forwards, {}, late={plans[1]: 5.0}) == plans[1:]
    assert {*race.timed} == {*plans}


def test_what_failed_at_a_second_look_is_not_timed():
    plans = [Plan("a:bf16"), Plan("b:bf16")]
    race = Race(plans)
    race.looks |= {plan: look(1.0, None) for plan in plans}
    race.leave(plans[0])
    assert race.entrants() == plans[1:]


CASE = Case("one", AttentionSpec.make(batch=1, heads=1, seqlen_q=16, head_dim=8), ("normal", "outlier"))
QUICK, SLOW, EXACT = (Plan.parse(name) for name in ("small:fp8", "wide:bf16", "reference:fp32"))


@pytest.fixture
def paces(monkeypatch):
    """Milliseconds by plan that every sample says instead of the time that it took."""
    found = {QUICK: 1.0, SLOW: 10.0, EXACT: 2.0}

    def paced(taken):
        def visit(self, plan, *how):
            visited = taken(self, plan, *how)
            times = {cost: [found[plan]] * len(each) for cost, each in visited.time_ms.items()}
            return replace(visited, time_ms=times)

        return visit

    for method in ("look", "sample"):
        monkeypatch.setattr(Bench, method, paced(getattr(Bench, method)))
    return found


def raced(plans, required=()):
    with DeviceSweep(replace(setup(), race=True)) as sweep:
        events = list(sweep.measure(CASE, plans, required))
    rows = [event for event in events if not isinstance(event, PhaseStarted)]
    assert sorted(row.plan for row in rows) == sorted(plans)
    return {row.plan: row for row in rows}


def test_who_lost_at_a_first_look_is_neither_proved_nor_judged(local_workers, paces):
    rows = raced([QUICK, SLOW, EXACT])
    assert {plan: row.status for plan, row in rows.items()} == {QUICK: "ok", EXACT: "ok", SLOW: "slower"}
    assert rows[SLOW].reason == f"slower than {EXACT} at a first look; 5.00 times as long"
    assert {*rows[SLOW].time_ms["call"]} == {10.0}
    assert rows[SLOW].correctness_ is None
    assert local_workers.request_counts["prove", SLOW] == local_workers.request_counts["conclude", SLOW] == 0
    assert local_workers.request_counts["drop", SLOW] == 1
    assert rows[EXACT].ran
    assert {entry.plan: entry.time_ms for entry in condense(rows.values())}[SLOW] == 10.0


def test_a_required_plan_is_measured_in_full(local_workers, paces, monkeypatch):
    timed, named = device_sweep.interleave, []

    def noting(plans, *rest, required=(), **how):
        named.append(list(required))
        return timed(plans, *rest, required=required, **how)

    monkeypatch.setattr(device_sweep, "interleave", noting)
    assert raced([QUICK, SLOW, EXACT], [SLOW])[SLOW].status == "ok"
    assert named == [[SLOW]]


@pytest.mark.parametrize(("pace", "status"), [(0.1, "ok"), (100.0, "slower")])
def test_what_had_no_memory_in_a_race_is_looked_at_alone_and_measured_if_it_may_win(local_workers, paces, pace, status):
    paces[EXACT] = pace
    local_workers.fail_request(LostError("oom", "OutOfMemoryError: no more", died=False), "prepare", EXACT)
    rows = raced([QUICK, SLOW, EXACT])
    assert rows[EXACT].status == status
    assert {*rows[EXACT].time_ms["call"]} == {pace}
    assert local_workers.request_counts["conclude", EXACT] == (status == "ok")
    assert rows[QUICK].status == "ok"


@pytest.mark.parametrize(("forward_ms", "enters"), [(0.5, True), (9.0, False)])
def test_who_had_no_memory_to_be_judged_and_rejoins_is_timed_again_or_slower(forward_ms, enters):
    """It had won by its times in the race, which say nothing of a run alone."""
    first, other = Plan("a:bf16"), Plan("b:bf16")
    race = Race([first, other])
    assert run(race, {"a:bf16": 0.9, "b:bf16": 1.0}, {}, inaccurate=[first]) == [first, other]
    alone = {"prepared": [forward_ms], "call": [forward_ms]}
    race.rejoin(first, Visit(time_ms=alone, host_ms=[0.1], span=(0.0, 1.0), replayed=(), late_ms=0.0))
    assert (first in race.entrants()) == enters
    assert enters or set(race.slower()) == {first}


@pytest.mark.parametrize("fault", ["look", "conclude", "prove", "inaccurate"])
def test_behind_a_winner_that_failed_or_was_inaccurate_another_wins(local_workers, paces, monkeypatch, fault):
    paces[EXACT] = 0.1
    if fault == "inaccurate":
        usual = Bench.conclude
        monkeypatch.setattr(Bench, "conclude", lambda self, plan: replace(usual(self, plan), untouched=plan != EXACT))
    else:
        local_workers.fail_request(LostError("error", "RuntimeError: no", died=False), fault, EXACT)
    rows = raced([QUICK, SLOW, EXACT])
    assert rows[EXACT].status == ("inaccurate" if fault == "inaccurate" else "error")
    assert rows[QUICK].status == rows[SLOW].status == "ok"
