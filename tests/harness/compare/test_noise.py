"""How far apart unchanged rows are taken to be: what all rows of a comparison tell of it, and what does not count."""

import math

import numpy as np
import pytest
from compared import WIDE, results, row, slowed, times
from row_facts import with_facts

from attnbench.harness.compare.noise import Observed, most_run, noise_of
from attnbench.harness.compare.regression import compare_results
from attnbench.harness.compare.terms import Limits, Terms
from attnbench.harness.compare.times import ratios

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
