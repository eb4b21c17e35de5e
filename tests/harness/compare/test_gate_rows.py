"""Which rows a gate takes, how far apart it takes two runs to be, and its rounds as a later gate's base."""

import os

import pytest
import torch
from compared import results, row, times
from row_facts import with_facts

from attnbench import Plan
from attnbench.harness.capture.file import PREFIX
from attnbench.harness.compare.gate import sides as gate_sides
from attnbench.harness.compare.gate import worker as gate_worker
from attnbench.harness.compare.gate.rounds import read_rounds, rounds_of, rounds_text
from attnbench.harness.compare.gate.rows import brief_timer, choose_rows, gate_rows, tasks
from attnbench.harness.compare.gate.sides import Question
from attnbench.harness.compare.terms import Terms
from attnbench.harness.measure import cores
from attnbench.harness.measure.cores import core_for
from attnbench.harness.measure.timing import Timer
from attnbench.harness.sequence_lengths import SequenceLengths
from attnbench.kernels.registry import registry
from attnbench.problem.spec import AttentionSpec
from attnbench.state import Cache

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
