"""The gate with real processes of two environments on this machine, of which NEW's kernels are slowed on purpose."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import attnbench, fails_in_one_line
from compared import row, times, written
from places import SUPPORT
from scripted_sides import Sides
from scripted_workers import LocalWorkers

from attnbench.harness.compare.gate import run as gating
from attnbench.harness.compare.gate.rounds import ROUNDS, Rounds, rounds_text
from attnbench.harness.compare.gate.run import run_gate
from attnbench.harness.compare.terms import Limits, Terms
from attnbench.harness.results.records import read_measurements
from attnbench.harness.results.store import MEASUREMENTS
from attnbench.kernels.registry import Registry
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.environment import Environment

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
