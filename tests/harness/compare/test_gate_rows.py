"""Which rows a gate takes, its rounds as a later gate's base, and gates with real processes of two environments."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import attnbench, fails_in_one_line
from compared import results, row, times, written
from places import SUPPORT
from row_facts import with_facts
from scripted_sides import Sides
from scripted_workers import LocalWorkers

from attnbench import Plan
from attnbench.harness.capture.file import PREFIX
from attnbench.harness.compare.gate import run as gating
from attnbench.harness.compare.gate import sides as gate_sides
from attnbench.harness.compare.gate import worker as gate_worker
from attnbench.harness.compare.gate.rounds import ROUNDS, Rounds, read_rounds, rounds_of, rounds_text
from attnbench.harness.compare.gate.rows import brief_timer, choose_rows, gate_rows, tasks
from attnbench.harness.compare.gate.run import run_gate
from attnbench.harness.compare.gate.sides import Question
from attnbench.harness.compare.terms import Limits, Terms
from attnbench.harness.measure import cores
from attnbench.harness.measure.cores import core_for
from attnbench.harness.measure.timing import Timer
from attnbench.harness.results.records import read_measurements
from attnbench.harness.results.store import MEASUREMENTS
from attnbench.harness.sequence_lengths import SequenceLengths
from attnbench.kernels.registry import Registry, registry
from attnbench.problem.spec import AttentionSpec
from attnbench.state import Cache
from attnbench.tables.environment import Environment

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def plan(name, call, case="a", **changes):
    return row(case, name, time_ms={**times(0), "call": [call] * 3}, **changes)


def test_the_fastest_accurate_plans_of_both_precisions_come_first_and_then_the_closest():
    known = results(
        plan("fa3:fp8", 1.0),
        plan("sage:fp8", 1.5),
        plan("fa3:bf16", 2.0),
        plan("sdpa-cudnn:bf16", 2.1),
        plan("sdpa-math:bf16", 9.0),
        plan("cudnn:fp8", 0.5, status="inaccurate", reason="an error of 0.3"),
        plan("emulated:fp8", 0.1, emulated=True),
        plan("fa2:bf16", 0.2, error={f"{PREFIX}file@0123#0": {"out": 0.01}}),  # of inputs that no one can draw
    )
    names = [str(each.plan) for each in choose_rows(known)]
    assert names == ["fa3:fp8", "fa3:bf16", "sdpa-cudnn:bf16", "sage:fp8"]
    assert [str(each.plan) for each in choose_rows(known, 3)] == names[:3]


@pytest.mark.parametrize(
    ("device", "recorded", "same_gpu", "prepared", "host"),
    [(CUDA, None, True, 0.0, 0.0), (CUDA, {}, True, 0.004, 0.2), (CUDA, {}, False, 0.03, 0.2)],
)
def test_two_runs_beside_the_anchor_are_taken_to_differ(device, recorded, same_gpu, prepared, host):
    (found,) = gate_rows([row()], Terms(), device, None, recorded, same_gpu=same_gpu)
    assert {cost: each.run for cost, each in found.series.items()} == {"prepared": prepared, "host": host}
    assert {cost: each.limit for cost, each in found.series.items()} == {"prepared": 0.03, "host": 1.0}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot move threads to a core")
def test_both_sides_time_on_one_core_of_a_gpus_host(monkeypatch):
    """Which is this process's own: a core apiece could differ by what else runs there."""
    timed = []

    class Started:
        def __init__(self, setting, **_):
            with monkeypatch.context() as in_its_process:
                in_its_process.setattr(cores, "_claims", Cache(lasting=True))
                timed.append(gate_worker._made(setting).core)

        def start(self):
            pass

        def close(self):
            pass

    monkeypatch.setattr(cores, "_claims", Cache(lasting=True))
    monkeypatch.setattr(gate_worker, "GateWorker", lambda _, timer: timer)
    monkeypatch.setattr(gate_sides, "Worker", Started)
    spec = AttentionSpec.make(batch=1, heads=1, seqlen_q=64, head_dim=64)
    asked = Question(0, ("a", Plan.parse("near:bf16")), spec, "normal")
    with gate_sides.Sides(CUDA, None) as sides:
        sides.start([asked])
    assert timed == [core_for(0)] * 2
    by_an_older_release = {"source": "", "device": "cuda:0", "threads": torch.get_num_threads()}
    assert gate_worker._made(by_an_older_release).core == core_for(0)


def test_on_a_cpu_a_call_is_one_cost_and_a_backward_is_for_training():
    assert (brief_timer(CPU).fewest, Timer.for_device(CPU).fewest, Timer.for_device(CUDA).fewest) == (1, 2, 4)
    (found,) = gate_rows([row()], Terms(), CPU, None, {})
    assert [(cost, each.run) for cost, each in found.series.items()] == [("call", 0.2)]
    spec = AttentionSpec.make(batch=1, heads=1, seqlen_q=16, head_dim=16, direction="training")
    (found,) = gate_rows([row(plan="fa3:bf16>fa3:bf16", spec=spec)], Terms(), CUDA, None, None)
    assert list(found.series) == ["prepared", "backward", "host"]


def test_a_row_is_looked_at_on_all_of_its_inputs_and_visited_on_the_first():
    own = SequenceLengths(layout="packed", q=(9, 1, 9, 5))
    found = with_facts(row(), lengths=own, spec=AttentionSpec.make(heads=2, head_dim=16, **own.sizes()))
    (task,) = tasks([found], registry(), CPU)
    (gated,) = gate_rows([found], Terms(), CPU, None, None)
    assert (task.case.families, task.case.lengths) == (("normal", "outlier"), own)
    assert (gated.question.family, gated.question.lengths) == ("normal", own)


@pytest.mark.parametrize(("recorded", "kept"), [({}, True), (None, False)])
def test_rounds_beside_the_anchor_are_read_again_and_others_are_not(tmp_path, recorded, kept):
    (found,) = gate_rows([row()], Terms(), CPU, None, recorded)
    for _ in range(2):
        found.renew()
        for ms in (2.0, 2.1):
            found.add({"BASE": [{"call": 1.0}] * 4, "NEW": [{"call": ms}] * 4})
    path = tmp_path / "rounds.jsonl"
    path.write_text(rounds_text(rounds_of([found])))
    expected = {(found.question.key, "call"): [[0.693147, 0.741937]] * 2} if kept else {}
    assert read_rounds(path) == expected
    assert read_rounds(tmp_path / "none") == {}


SPEC = AttentionSpec.make(batch=1, heads=2, seqlen_q=256, head_dim=64)
SPECS = {"tiny": SPEC, "shorter": SPEC.replace(seqlen_q=128, seqlen_kv=128)}
PLAN = "sdpa-flash:bf16"
SOURCE = "injected_slowdowns:slowed_registry"


def measured(case="tiny", cpu=None, **changes):
    """A row of this machine, whose times no gate looks at."""
    here = Environment.detect(torch.device("cpu"), Registry(()))
    facts = {"spec": SPECS[case], "time_ms": times(0, 3), "error": {"normal": {"out": 0.05}}, "drawn_on": "cpu"}
    return row(case, PLAN, environment=replace(here, cpu=cpu or here.cpu), **facts, **changes)


def python(folder: Path, name: str, line: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return written(tmp_path_factory.mktemp("gated") / "base", map(measured, SPECS))


def test_a_gate_looks_at_a_row_visits_both_sides_and_keeps_the_rounds(base, tmp_path, monkeypatch):
    LocalWorkers(monkeypatch)
    monkeypatch.setattr(gating, "Sides", lambda *_: Sides(lambda side, *_: float(side == "NEW")))
    folder, lines = tmp_path / "new", []
    asked = folder, Terms(limits=Limits(time=0.5)), torch.device("cpu"), Path(sys.executable), 5.0
    found = run_gate(base, *asked, cases=["shorter"], say=lines.append)
    assert [(each.key[0], each.verdict) for each in found.regression.outcomes] == [("shorter", "slower")]
    assert found.regression.exit_code == 1
    assert [row.status for row in found.new.values()] == ["ok"]
    assert list(read_measurements(folder / MEASUREMENTS)) == list(found.new.values())
    assert {(each.case, each.against) for each in found.rounds} == {("shorter", "BASE")}
    assert lines[:2] == ["BASE and NEW", "a first look at 1 rows"]


# How far visits vary, the limit, BASE's recorded generations if its environment is not there, minutes; the advice.
WIDE, NARROW, RECORDED = 0.5, 0.004, [[0.0, 0.001] * 5] * 2
ADVICE = {
    "noise": (0.9, 0.05, None, 5.0, r"about 1 more minute would settle it \(--minutes 6\)"),
    "no time": (0.0, WIDE, None, 1e-9, r"the time was over before each row had been visited: --minutes 2e-09, or .*"),
    "processes far apart": (0.0, NARROW, None, 5.0, "more time would not settle it: processes of the same code .*"),
    "runs far apart": (0.0, 0.05, RECORDED, 5.0, "beside the anchor no time would settle it: --base-python .*"),
    "no rounds of BASE": (0.0, WIDE, [], 5.0, "BASE has no rounds of an earlier gate: --base-python .*"),
}


@pytest.mark.parametrize(("noise", "limit", "recorded", "minutes", "advice"), ADVICE.values(), ids=ADVICE)
def test_a_gate_that_is_not_certain_reports_what_would_make_it_certain(
    tmp_path, monkeypatch, noise, limit, recorded, minutes, advice
):
    LocalWorkers(monkeypatch)
    sides = Sides(lambda *_: noise * sides.rng.uniform(-1, 1))
    monkeypatch.setattr(gating, "Sides", lambda *_: sides)
    base = written(tmp_path / "base", [measured()])
    if recorded:
        own = Rounds(
            case="tiny",
            plan=PLAN,
            cost="call",
            against="anchor",
            generations=recorded,
            times_ms={"BASE": [1.0], "NEW": [1.0]},
            finding="open",
        )
        (base / ROUNDS).write_text(rounds_text([own]))
    old = Path(sys.executable) if recorded is None else None
    terms = Terms(limits=Limits(time=limit))
    found = run_gate(base, tmp_path / "new", terms, torch.device("cpu"), old, minutes, say=lambda _: None)
    assert found.regression.exit_code == 4
    assert re.fullmatch(advice, found.regression.advice)


@pytest.mark.exhaustive
def test_what_takes_much_longer_is_slower_and_the_other_row_is_not(base, tmp_path, monkeypatch):
    """NEW takes longer by the share that a file gives of a spec; BASE does not start where it sees NEW's PYTHONPATH."""
    monkeypatch.setenv("PYTHONPATH", SUPPORT)
    old = python(tmp_path, "old", f'[ -z "$PYTHONPATH" ] && SLOWED= PYTHONPATH={SUPPORT} exec {sys.executable} "$@"')
    (tmp_path / "slowed.json").write_text(json.dumps({str(SPEC): {PLAN: 30.0}}))
    monkeypatch.setenv("SLOWED", str(tmp_path / "slowed.json"))
    terms, lines = Terms(limits=Limits(time=9.0)), []
    found = run_gate(base, tmp_path / "new", terms, torch.device("cpu"), old, 5.0, say=lines.append, source=SOURCE)
    verdicts = {each.key[0]: each.verdict for each in found.regression.outcomes}
    assert verdicts == {"tiny": "slower", "shorter": "same"}
    assert found.regression.exit_code == 1
    assert any("is the old one really the old one?" in line for line in lines)
    assert {(each.case, each.against) for each in found.rounds} == {(case, "BASE") for case in SPECS}


def test_an_environment_without_a_gate_is_reported_before_anything_is_measured(base, tmp_path):
    old = python(tmp_path, "old", f'exec {sys.executable} -I -S "$@"')
    run = attnbench("gate", "--base", base, "--base-python", old, "--out", tmp_path / "out")
    fails_in_one_line(run, 2, f"{old} has no attnbench with a gate")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_gated_is_refused_in_a_line(base, tmp_path):
    fails_in_one_line(attnbench("gate", "--base", base, "--case", "another"), 2, "has no case 'another'")
    fails_in_one_line(
        attnbench("gate", "--base", base, "--minutes", "1e12"), 2, "--minutes 1000000000000.0: expected at most"
    )
    emulated = written(tmp_path / "emulated", [measured(emulated=True)])
    fails_in_one_line(attnbench("gate", "--base", emulated), 2, "has no row to gate")
    far = written(tmp_path / "far", [measured(cpu="another")])
    fails_in_one_line(attnbench("gate", "--base", far), 3, "another machine", "--base-python")
    damaged = written(tmp_path / "damaged", [measured()])
    (damaged / ROUNDS).write_text('{"schema": "attnbench.rounds/1", "case": 3}\n')
    fails_in_one_line(attnbench("gate", "--base", damaged), 2, f"{ROUNDS}:1")
