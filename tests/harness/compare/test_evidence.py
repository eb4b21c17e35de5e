"""Statistics of gate and comparison, in simulated and recorded noise: how often they are wrong, and what they see."""

import math
import random
from collections import Counter

import numpy as np
import pytest
from compared import WIDE, results, row, slowed, times
from hypothesis import given
from hypothesis import strategies as st
from recorded_rounds import Recording, gated, recorded_rows
from row_facts import with_facts
from scipy import stats

from attnbench.harness.compare.gate.evidence import (
    FEWEST,
    Estimate,
    combined,
    of_generation,
    slower,
    suspected,
    unchanged,
    visible,
)
from attnbench.harness.compare.noise import Observed, most_run, noise_of
from attnbench.harness.compare.regression import compare_results
from attnbench.harness.compare.terms import Limits, Terms
from attnbench.harness.compare.times import ratios

RUNS = 2000
FLOOR = 0.002
some = st.lists(st.floats(-1, 1), min_size=FEWEST - 1, max_size=40)


def generations(rng, *, shift=0.0, spread=0.004, between=FLOOR, count=2, length=10):
    return [(shift + rng.normal(0, between) + rng.normal(0, spread, length)).tolist() for _ in range(count)]


def share(events):
    """The upper end of a 99.9 % interval of a chance."""
    events = list(events)
    return float(stats.beta.ppf(0.999, sum(events) + 1, max(1, len(events) - sum(events))))


@given(some, st.lists(st.floats(-50, 50), min_size=10, max_size=10))
def test_a_fifth_of_the_rounds_does_not_move_the_estimate_beyond_the_others(values, wild):
    found = of_generation([*values, *wild[: max(1, len(values) // 4)]])
    assert min(values) - 1e-12 <= found.shift <= max(values) + 1e-12


@given(st.lists(st.integers(-9, 9), max_size=FEWEST + 2, unique=True))
def test_rounds_that_differ_are_never_certain(values):
    found = of_generation(values)
    assert found is None or found.deviation > 0


@pytest.mark.parametrize("step", [0.001, 0.0], ids=["", "no spread"])
def test_processes_that_lie_apart_are_less_certain_than_their_own_rounds(step):
    near = combined([[0.0, step] * 10, [0.0, step] * 10], FLOOR)
    apart = combined([[0.0, step] * 10, [0.1, 0.1 + step] * 10], FLOOR)
    assert apart.shift == pytest.approx(0.05, abs=1e-3)
    assert apart.deviation > 0.04 > 10 * near.deviation
    assert not slower(apart, 0.03)
    assert not unchanged(apart, 0.03, confirmed=True)


@pytest.mark.parametrize(("length", "spread", "most"), [(5, 0.02, 0.08), (40, 0.1, 0.06), (40, 0.002, 0.06)])
def test_the_error_covers_the_truth(length, spread, most):
    rng = np.random.default_rng(1)
    estimates = [combined(generations(rng, spread=spread, length=length), FLOOR) for _ in range(RUNS)]
    beyond = np.mean([each.shift > each.reach(0.95) for each in estimates])
    assert 0.03 < beyond < most


def test_a_slow_down_of_the_limit_is_excluded_one_time_in_twenty_at_most():
    rng = np.random.default_rng(3)
    limit = 0.03
    assert (
        share(
            unchanged(combined(generations(rng, shift=math.log1p(limit)), FLOOR), limit, confirmed=True)
            for _ in range(RUNS)
        )
        < 0.05
    )


def test_a_limit_that_is_visible_is_decided_nineteen_times_of_twenty_and_wrongly_once_in_a_hundred():
    rng = np.random.default_rng(4)
    estimates = [combined(generations(rng), FLOOR) for _ in range(RUNS)]
    limits = [visible(each) + 1e-9 for each in estimates]
    slow = [each._replace(shift=each.shift + math.log1p(visible(each))) for each in estimates]
    assert np.mean([unchanged(*each, confirmed=True) for each in zip(estimates, limits, strict=True)]) > 0.95
    assert share(unchanged(*each, confirmed=True) for each in zip(slow, limits, strict=True)) < 0.01


def test_of_unchanged_rows_few_are_suspected_and_none_is_slower_whatever_the_limit():
    rng = np.random.default_rng(6)
    estimates = [combined(generations(rng), FLOOR) for _ in range(RUNS)]
    assert share(slower(each, 1e-6) for each in estimates) < 0.01
    assert share(suspected(each, 1e-6) for each in estimates) < 0.1


@given(st.floats(-0.2, 0.2), st.floats(1e-4, 0.2), st.floats(1, 100), st.floats(0.001, 10))
def test_no_row_is_both_slower_and_unchanged(shift, deviation, freedom, limit):
    found = Estimate(shift, deviation, freedom)
    assert not (slower(found, limit) and unchanged(found, limit, confirmed=True))
    assert suspected(found, limit) >= slower(found, limit)
    assert unchanged(found, limit, confirmed=True) >= unchanged(found, limit, confirmed=False)
    if unchanged(found, limit, confirmed=True):
        assert visible(found) <= limit


GPU = recorded_rows("nvidia-h200", ("prepared", "backward"))
CPU = recorded_rows("amd-epyc", ("call",))
LOADED = recorded_rows("amd-epyc", ("call",), "rounds-under-load")
MANY = [5, pytest.param(1000, marks=pytest.mark.exhaustive)]


def counted(rows, size, limit, device_type, runs):
    """What is found of slowed and of other rows, and in how many runs one of the latter was slower."""
    rng = random.Random(round(1e4 * size) + runs)
    slowed, others, failed = Counter(), Counter(), 0
    for _ in range(runs):
        planted = dict.fromkeys(rng.sample(range(len(rows)), len(rows) // 2), size) if size else {}
        found = gated(Recording(rows, rng, planted), limit, device_type)
        slowed.update(each for number, each in enumerate(found) if number in planted)
        mistaken = [each for number, each in enumerate(found) if number not in planted]
        others.update(mistaken)
        failed += "slower" in mistaken
    return slowed, others, failed


def interval(count, total):
    """Of 95 %, of a share."""
    return stats.binomtest(count, total).proportion_ci(method="exact")


# Of slow-downs so large at least this share is found, and of rows that are none at least the other is excluded.
ON_GPU = (GPU, 0.03, "cuda")
ON_CPU = (CPU, 0.05, "cpu")
RECORDED = {
    "GPU, unchanged": (*ON_GPU, 0.0, 0.0, 0.98), "GPU, 3 %": (*ON_GPU, 0.03, 0.95, 0.95),
    "GPU, 5 %": (*ON_GPU, 0.05, 0.99, 0.95), "GPU, 10 %": (*ON_GPU, 0.1, 0.995, 0.95),
    "CPU, unchanged": (*ON_CPU, 0.0, 0.0, 0.0), "CPU, 5 %": (*ON_CPU, 0.05, 0.6, 0.0),
    "CPU, 10 %": (*ON_CPU, 0.1, 0.95, 0.0),
    # Four programs share the two cores: rounds are 10 to 40 % apart.
    "CPU under load, unchanged": (LOADED, 0.05, "cpu", 0.0, 0.0, 0.0),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "limit", "device", "size", "least", "excluded"), RECORDED.values(), ids=RECORDED)
@pytest.mark.parametrize("runs", MANY)
def test_slow_downs_are_found_and_unchanged_runs_do_not_fail(rows, limit, device, size, least, excluded, runs):
    slowed, others, failed = counted(rows, size, limit, device, runs)
    print(size, runs, slowed, others, failed)
    assert interval(failed, runs).low <= 0.01
    assert others["same"] >= excluded * others.total()
    if size:
        assert interval(slowed["slower"], slowed.total()).high >= least
        assert interval(slowed["same"], slowed.total()).low <= (0.0 if device == "cuda" else 0.05)


ROWS = 30


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("run", [0.006, 0.02])
def test_the_deviation_of_runs_is_found_beside_that_of_visits(run, before, after):
    rng = np.random.default_rng(1)

    def visits(count):
        return np.exp(rng.normal(0, 0.003, count) + rng.normal(0, run / math.sqrt(2))).tolist()

    observed = [Observed(visits(before), visits(after)) for _ in range(5000)]
    assert noise_of("device", observed).run == pytest.approx(run, rel=0.05)


def test_more_than_three_visits_explain_no_less_of_what_runs_are_apart():
    """What changes a visit outlasts it, so that they are not independent."""
    shifts = np.exp(np.random.default_rng(2).normal(0, 0.01, 200))
    one, two, three, twelve = (
        noise_of("device", [Observed([1.0] * count, [shift] * count) for shift in shifts]).run
        for count in (1, 2, 3, 12)
    )
    assert one < two < three == twelve


@pytest.mark.parametrize(("ratio", "verdict"), [(1.0, "same"), (1.28, "slower")])
def test_what_became_of_every_row_is_found_in_each(ratio, verdict):
    """Though their usual deviation cannot be distinguished from it."""
    base = results(*(row(f"case {number}", seed=number) for number in range(ROWS)))
    new = results(*(slowed(each, ratio) for each in base.values()))
    found = compare_results(base, new, Terms(Limits(time=0.2)))
    assert {each.verdict for each in found.outcomes} == {verdict}


def test_no_deviation_is_taken_to_be_larger_than_was_ever_measured():
    assert noise_of("device", [Observed([1.0] * 3, [2.0] * 3)] * ROWS).run == most_run("device")


def test_a_graph_on_one_side_alone_makes_no_other_time_less_certain():
    base = results(*(row(f"case {number}", seed=number) for number in range(ROWS)))
    others = ["kernel", "prepared"]
    new = [with_facts(slowed(each, 0.5, others), replayed=others) for each in base.values()]
    found = compare_results(base, results(slowed(new[0], 1.15), *new[1:]), WIDE)
    assert [each.costs["call"].verdict for each in found.outcomes] == ["slower"] + ["same"] * (ROWS - 1)
    assert {each.costs[cost].verdict for each in found.outcomes for cost in others} == {"uncertain"}


def test_hosts_that_are_far_apart_make_no_time_of_the_device_less_certain():
    """Two calls of three wait for the host."""
    rng = np.random.default_rng(3)

    def measured(number, ratio):
        waits = number % 3 > 0
        call = times(number, ratio=rng.uniform(0.6, 1.4) if waits else ratio)["call"]
        return row(f"case {number}", time_ms={"call": call}, host_ms=[(0.9 if waits else 0.1) * each for each in call])

    base = results(*(measured(number, 1.0) for number in range(ROWS)))
    new = results(*(measured(number, 1.0 if number else 1.15) for number in range(ROWS)))
    found = compare_results(base, new, Terms(WIDE.limits, costs=("call",)))
    assert [each.verdict for each in found.outcomes if not each.costs["call"].host] == ["slower"] + ["same"] * 9


def test_visits_are_compared_with_those_of_the_baseline_from_about_the_same_time():
    """A clock that falls, with three visits of one plan to each of the other, the first of which was held up."""
    often = np.linspace(1.0, 1.5, 12)
    seldom = often[1::3]
    assert ratios(2 * often, seldom) == pytest.approx([2.0] * 4)
    assert ratios(seldom, 2 * often) == pytest.approx([0.5] * 4)
    often[0] *= 10
    assert ratios(2 * often, seldom) == pytest.approx([2.0] * 4, rel=0.05)
