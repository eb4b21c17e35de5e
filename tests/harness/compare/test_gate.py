"""The gate's way to a verdict, on sides whose times are scripted: what it measures again, and what it lets decide."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
from compared import results, row
from scripted_sides import Sides

from attnbench.harness.compare.gate import gate
from attnbench.harness.compare.gate.gate import Gate
from attnbench.harness.compare.gate.outcome import minutes_needed, outcomes
from attnbench.harness.compare.gate.series import LOOKS, MOST_GENERATIONS, GateRow, Series, floor_of
from attnbench.harness.compare.gate.sides import Question
from attnbench.harness.compare.terms import Limits, Terms
from attnbench.harness.sweep.worker_process import LostError
from attnbench.kernels.plan import Plan
from attnbench.problem.spec import AttentionSpec

SPEC = AttentionSpec.make(batch=1, heads=1, seqlen_q=16, head_dim=16)
PLAN = Plan("sdpa-flash:bf16")
TERMS = Terms(limits=Limits(time=0.05, host=0.5))


def rows(count=1, costs=("call",), device_type="cpu"):
    return [
        GateRow(
            Question(number, (f"case {number}", PLAN), SPEC, "normal"),
            {cost: Series(cost, 0.5 if cost == "host" else 0.05, device_type) for cost in costs},
        )
        for number in range(count)
    ]


def run(sides, gated, seconds=math.inf):
    lines = []
    Gate(sides, seconds, lines.append).run(gated)
    return lines


def judged(gated):
    """The comparison's outcome of the rows, all of which looked well at first."""
    known = results(*(row(each.question.key[0], str(PLAN)) for each in gated))
    return outcomes(known, known, gated, TERMS)


def test_an_unchanged_row_is_excluded_with_few_rounds_in_one_process():
    sides, gated = Sides(), rows(3)
    run(sides, gated)
    assert {each.series["call"].finding for each in gated} == {"same"}
    assert sides.generation == 0
    assert max(sides.visits.values()) <= 8 * (1 + LOOKS[1])
    assert sorted(sides.ended) == [0, 1, 2]
    found = judged(gated)
    assert found.exit_code == 0
    assert all(0 < each.visible < 0.05 for each in found.outcomes)


@pytest.mark.parametrize("size", [0.1, 0.045])
def test_a_slow_down_is_found_once_other_processes_show_it_too(size):
    sides, gated = Sides(lambda side, number, *_: size * (side == "NEW" and number == 1)), rows(3)
    lines = run(sides, gated)
    assert [each.series["call"].finding for each in gated] == ["same", "slower", "same"]
    assert sides.generation == 1
    assert sides.visits[0] < sides.visits[1] <= 2 * 8 * (1 + LOOKS[1])
    assert any("again" in line for line in lines)
    found = judged(gated)
    assert found.exit_code == 1
    (slow,) = [each for each in found.outcomes if each.regressed]
    assert slow.costs["call"].ratio == pytest.approx(1 + size, abs=0.01)


def test_what_takes_a_third_of_the_limit_longer_is_excluded_in_other_processes_too():
    """One pair of processes may hide the rest."""
    sides, gated = Sides(lambda side, *_: 0.017 * (side == "NEW")), rows()
    run(sides, gated)
    assert (gated[0].series["call"].finding, sides.generation) == ("same", 1)


def test_what_one_pair_of_processes_alone_shows_is_no_slow_down():
    """Another layout of memory: 10 % in the first pair, nothing in the others."""
    sides, gated = Sides(lambda side, number, cost, generation: 0.1 * (side == "NEW" and generation == 0)), rows()
    run(sides, gated)
    assert sides.generation == MOST_GENERATIONS - 1
    assert gated[0].series["call"].finding != "slower"
    assert judged(gated).exit_code != 1


def test_a_pair_of_processes_that_shows_nothing_does_not_confirm_what_another_showed():
    """6 % in the first pair; in the others 10 % less and more by turns, which has little weight beside that."""

    def longer(side, number, cost, generation):
        odd = (sides.visits[number] - 1) // 8 % 2
        return (side == "NEW") * (0.06 if generation == 0 else 0.1 if odd else -0.1)

    sides, gated = Sides(longer), rows()
    run(sides, gated)
    assert sides.generation > 0
    assert gated[0].series["call"].finding != "slower"


@pytest.mark.parametrize(("size", "rounds", "finding"), [(0.0, 7, "same"), (1.0, 6 + 3, "open")])
def test_when_time_is_over_the_rounds_that_were_made_decide(monkeypatch, size, rounds, finding):
    """Of each pair of processes the first is a warm-up; two others of a second pair confirm nothing."""
    sides, gated = Sides(lambda side, *_: size * (side == "NEW")), rows()
    monkeypatch.setattr(gate, "time", SimpleNamespace(monotonic=lambda: float(sides.visits[0])))
    run(sides, gated, seconds=8 * rounds)
    assert (sides.visits[0], gated[0].series["call"].finding) == (8 * rounds, finding)
    assert sides.generation == (finding == "open"), "no more processes are started"


@pytest.mark.parametrize("cost", ["prepared", "host"])
def test_a_side_is_its_quickest_visit_and_a_host_is_not(cost):
    """Three of four visits of NEW were held up, or one of four of BASE had a core that is twice as fast."""

    def longer(side, number, each, generation):
        visit = sides.visits[number] % 8
        return 0.5 * (side == "NEW" and visit != 2) if cost == "prepared" else -0.5 * (each == "host" and visit == 4)

    sides, gated = Sides(longer), rows(1, ("prepared", "host"), "cuda")
    run(sides, gated)
    assert gated[0].series[cost].finding == "same"


def test_a_cost_that_is_decided_is_not_visited_for_another_that_is_not():
    sides = Sides(lambda side, number, cost, _: (cost == "backward") * sides.rng.uniform(-0.9, 0.9))
    gated = rows(1, ("prepared", "backward"), "cuda")
    run(sides, gated)
    assert [each.finding for each in gated[0].series.values()] == ["same", "open"]
    assert sides.costs["prepared"] <= 8 * (1 + LOOKS[1]) < sides.costs["backward"]


@pytest.mark.parametrize(
    ("ms", "device_type", "apart"),
    [(1.0, "cuda", 0.003), (0.032, "cuda", 0.02), (0.016, "cuda", 0.04), (50, "cpu", 0.005)],
)
def test_processes_of_the_same_code_are_taken_to_be_about_as_far_apart_as_was_seen(ms, device_type, apart):
    assert apart / 2 < 1.64 * floor_of("prepared", ms, device_type) < 2 * apart


def test_when_time_is_over_what_is_open_is_not_certain_and_reports_how_much_more_it_needs():
    gated = rows(2)
    run(Sides(), gated, seconds=0.0)
    found = judged(gated)
    assert found.exit_code == 4
    assert all(each.verdict == "uncertain" and "too few rounds" in each.reasons[0] for each in found.outcomes)
    noisy = Sides(lambda *_: noisy.rng.gauss(0, 0.3))
    gated = rows(2)
    run(noisy, gated)
    assert {each.series["call"].finding for each in gated} == {"open"}
    assert set(noisy.visits.values()) == {8 * MOST_GENERATIONS * (1 + LOOKS[-1])}, "more rounds help"
    found = judged(gated)
    assert found.exit_code == 4
    assert found.outcomes[0].visible > 0.05
    assert minutes_needed(gated) > 0


def test_rows_that_wait_for_others_have_their_share_of_the_time(monkeypatch):
    """More rows than are measured side by side; a visit takes a second, and none decides anything."""
    sides, gated = Sides(lambda *_: sides.rng.uniform(0, 9)), rows(40)
    clock = SimpleNamespace(monotonic=lambda: float(sum(sides.visits.values())))
    monkeypatch.setattr(gate, "time", clock)
    run(sides, gated, seconds=40 * 80)
    first, then = (sum(sides.visits[number] for number in part) for part in (range(24), range(24, 40)))
    assert (first, then) == (pytest.approx(24 * 80, rel=0.1), pytest.approx(16 * 80, rel=0.1))
    assert first + then <= 40 * 80 + 8
    assert sum(each.seconds for each in gated) == first + then
    assert sides.begun[:2] == [24, 16]


def test_time_is_promised_where_several_pairs_of_processes_can_show_what_one_cannot():
    sides, gated = Sides(lambda *_: sides.rng.gauss(0, 0.3)), rows()
    gated[0].series["call"] = Series("call", 0.015, "cpu")
    run(sides, gated)
    assert minutes_needed(gated) > 0


def test_no_time_is_promised_where_processes_lie_too_far_apart():
    sides = Sides(base=0.005)
    gated = rows(1, ("prepared",), "cuda")
    run(sides, gated)
    assert gated[0].series["prepared"].finding == "open"
    assert sides.visits[0] < 8 * MOST_GENERATIONS * (1 + LOOKS[-1]) / 2
    assert minutes_needed(gated) is None


@pytest.mark.parametrize(("side", "verdict"), [("NEW", "failed"), ("BASE", "uncertain")])
def test_a_row_that_is_lost_costs_itself_alone(side, verdict):
    sides, gated = Sides(lost={0: (side, LostError("crashed", "signal 11", died=True))}), rows(2)
    run(sides, gated)
    found = judged(gated)
    assert [each.verdict for each in found.outcomes] == [verdict, "same"]
    assert f"in {side}: crashed: signal 11" in found.outcomes[0].reasons[0]
    assert found.exit_code == (1 if side == "NEW" else 4)


def test_a_row_that_dies_on_the_way_is_lost_too():
    def dies(side, number, cost, generation):
        if sides.visits[number] > 20 and side == "NEW":
            raise LostError("timeout", "no answer within 300 s", died=True)
        return 0.0

    sides, gated = Sides(dies), rows(1)
    run(sides, gated)
    assert judged(gated).outcomes[0].verdict == "failed"
    assert (sides.visits[0], sides.generation) == (21, 0), "it is not visited again"


def test_what_had_no_memory_beside_others_is_measured_alone():
    sides, gated = Sides(lost={1: ("NEW", LostError("oom", "out of memory", died=False))}), rows(3)
    run(sides, gated)
    assert {each.series["call"].finding for each in gated} == {"same"}
    assert (sides.begun, sides.generation) == ([3, 1], 0)
    first = Sides(lambda side, number, cost, generation: 0.1 * (side == "NEW" and number == 1 and generation == 0))
    first.lost, gated = {1: ("NEW", LostError("oom", "out of memory", died=False))}, rows(2)
    run(first, gated)
    assert gated[1].series["call"].finding != "slower", "it has been seen in one pair of processes alone"
    always = {0: ("NEW", LostError("oom", "out of memory", died=False))}
    gated = rows(1)
    run(Sides(lost=always), gated)
    assert gated[0].lost[0] == "NEW"


@pytest.mark.parametrize(
    ("host", "recorded", "kept"),
    [(0.45, None, False), (0.55, None, True), (0.9, [], False), (1.1, [], True)],
)
def test_the_host_is_gated_where_the_device_may_wait_for_it(host, recorded, kept):
    """Where BASE has no rounds of it, it was idle there, and has to take twice as much to count.

    The round after the warm-up decides; the next one takes 0.2 ms.
    """
    sides = Sides(
        lambda side, number, cost, _: ((0.2 if (sides.visits[number] - 1) // 8 == 2 else host) - 1) * (cost == "host")
    )
    gated = rows(1, ("prepared", "host"), "cuda")
    gated[0].series["host"].recorded = recorded
    run(sides, gated)
    assert ("host" in gated[0].series) == kept


@pytest.mark.parametrize(("shift", "finding"), [(0.0, "same"), (0.1, "slower")])
def test_beside_the_anchor_base_is_its_recorded_rounds(shift, finding):
    """BASE's visits are the anchor's: NEW takes twice as long as it, as BASE did, and now longer still."""
    rng = random.Random(2)
    recorded = [[math.log(2) + rng.gauss(0, 0.001) for _ in range(10)] for _ in range(2)]
    sides, gated = Sides(lambda side, *_: (1 + 2 * shift) * (side == "NEW")), rows(1, ("prepared",), "cuda")
    gated[0].series["prepared"] = Series("prepared", 0.05, "cuda", recorded, 0.004)
    run(sides, gated)
    assert gated[0].series["prepared"].finding == finding
    assert judged(gated).outcomes[0].costs["prepared"].ratio == pytest.approx(1 + shift, abs=0.01)


@pytest.mark.parametrize(
    ("new", "base", "apart", "rounds"),
    [(0.02, 0.001, 0.0, (5, 40)), (0.001, 0.02, 0.0, (40, 5)), (0.001, 0.001, 0.02, (40, 40))],
    ids=["NEW", "BASE", "runs"],
)
def test_beside_the_anchor_the_error_covers_the_truth(new, base, apart, rounds):
    """Whichever varies most: NEW's few rounds, BASE's, or what lies between the two runs."""
    rng = np.random.default_rng(5)

    def estimate():
        found = Series("prepared", 0.05, "cuda", [rng.normal(rng.normal(0, 0.002), base, rounds[1]).tolist()], apart)
        shift = math.exp(rng.normal(0, math.hypot(0.002, apart)))
        found.renew()
        for each in rng.lognormal(0, new, rounds[0]):
            found.add({"BASE": [100.0], "NEW": [100.0 * shift * each]})
        return found.estimate

    estimates = [estimate() for _ in range(1000)]
    assert 0.01 < np.mean([each.shift > each.reach(0.95) for each in estimates]) < 0.08


@pytest.mark.parametrize("costs", [("prepared",), ("prepared", "backward")])
def test_beside_the_anchor_a_row_without_recorded_rounds_of_one_of_its_costs_is_not_certain(costs):
    sides, gated = Sides(), rows(1, costs, "cuda")
    *others, missing = gated[0].series.values()
    gated[0].series[missing.cost] = lacking = Series(missing.cost, 0.05, "cuda", [], 0.004)
    run(sides, gated)
    assert len(lacking.generations) == 2, "a base for a later gate, and no more"
    assert sides.visits[0] <= 2 * 8 * (1 + LOOKS[2])
    assert all(each.finding == "same" for each in others)
    found = judged(gated)
    assert found.exit_code == 4
    assert found.outcomes[0].reasons[-1] == f"BASE has no rounds of {missing.cost}"
