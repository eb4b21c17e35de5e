"""What the gate's statistics promise, held by simulation: how often they are wrong, and what they would have seen."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
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
