"""What a comparison of real result sets shows and does not invent, on the committed rows of an H200."""

import random

import numpy as np
import pytest
from compared import COMMITTED, INFERENCE, QUICK, resampled, results, slowed

from attnbench.harness.compare.regression import compare_results
from attnbench.harness.compare.terms import Terms
from attnbench.harness.results.records import read_measurements


def measured(path):
    return [each for each in read_measurements(path) if each.measured]


@pytest.fixture(scope="module")
def quick():
    return measured(QUICK)


@pytest.mark.parametrize("block", [1, 10])
@pytest.mark.parametrize("count", [2, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_one_in_a_hundred_comparisons_of_unchanged_results_fails_at_most(quick, count, block):
    """All rows that ran, of which two are compared at a time that were drawn from the same samples."""
    rng = np.random.default_rng(8)
    codes = [
        compare_results(
            *(results(*(resampled(each, rng, block) for each in quick)) for _ in range(2)), Terms()
        ).exit_code
        for _ in range(count)
    ]
    assert codes.count(1) <= count / 100
    assert set(codes) <= {1, 4}  # no sweep of so many rows shows 3 % of each


def test_two_sweeps_of_one_gpu_that_ran_the_same_code_show_nothing():
    """The kernels of `forward` and of `inference`, minutes apart."""
    one, other = (
        {(str(each.spec), each.plan): each for each in measured(COMMITTED / name / "measurements.jsonl.gz")}
        for name in ("forward", "inference")
    )
    both = sorted(one.keys() & other.keys(), key=str)
    assert len(both) > 50
    sides = [results(*(side[key].model_copy(update={"case": key[0]}) for key in both)) for side in (one, other)]
    for base, new in (sides, sides[::-1]):
        assert compare_results(base, new, Terms(costs=("kernel", "prepared", "call"))).counts == {
            "uncertain": len(both)
        }


@pytest.mark.parametrize(
    ("path", "count"),
    [(QUICK, 3), *(pytest.param(path, None, marks=pytest.mark.exhaustive) for path in (QUICK, INFERENCE))],
)
def test_any_one_row_that_takes_half_as_long_again_is_slower_and_no_other(path, count):
    rows = measured(path)
    base = results(*rows)
    for each in rows if count is None else random.Random(5).sample(rows, count):
        found = compare_results(base, base | results(slowed(each, 1.5)), Terms())
        assert [outcome.key for outcome in found.outcomes if outcome.verdict == "slower"] == [each.key]
        assert found.exit_code == 1


@pytest.mark.parametrize("count", [2, pytest.param(40, marks=pytest.mark.exhaustive)])
def test_a_row_that_takes_longer_by_what_is_visible_is_found_with_95_percent(quick, count):
    """In another run than the one that said what is visible."""
    rng, tried, found = np.random.default_rng(4), 0, 0
    for _ in range(count):
        base, new, later = (results(*(resampled(each, rng, 1) for each in quick)) for _ in range(3))
        visible = {each.key: each.visible for each in compare_results(base, new, Terms()).outcomes}
        chosen = [quick[place].key for place in rng.choice(len(quick), len(quick) // 15, replace=False)]
        changed = results(*(slowed(later[key], 1 + visible[key]) for key in chosen if visible[key] < 100))
        outcomes = compare_results(base, later | changed, Terms()).outcomes
        tried += len(changed)
        found += sum(each.verdict == "slower" for each in outcomes if each.key in changed)
    assert found >= 0.95 * tried - 3 * (0.05 * 0.95 * tried) ** 0.5
