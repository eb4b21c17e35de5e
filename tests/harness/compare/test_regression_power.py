"""What a comparison of real result sets shows and does not invent, on the committed rows of an H200."""

import random

import numpy as np
import pytest
from compared import COMMITTED, INFERENCE, QUICK, resampled, results, slowed
from flat import changed

from attnbench.harness.compare.regression import compare_results
from attnbench.harness.compare.terms import Limits, Terms
from attnbench.harness.compare.text import conclusion
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


@pytest.mark.parametrize("limit", [0.03, 0.1, 0.5])
def test_a_set_beside_itself_is_not_clean_where_its_rows_could_not_show_the_limit(quick, limit):
    found = compare_results(results(*quick), results(*quick), Terms(Limits(time=limit), costs=("kernel", "backward")))
    visible = [each.visible for each in found.outcomes]
    assert max(visible) > limit
    short = [each for each in found.outcomes if each.visible > limit]
    assert [each for each in found.outcomes if each.verdict == "uncertain"] == short
    assert found.exit_code == 4
    said = conclusion(found)
    assert said.startswith(
        f"not certain: {len(short)} of {len(quick)} rows could not have shown a slow-down of {limit:.0%} ("
    )
    assert "% would have been found)" in said


@pytest.mark.parametrize("count", [2, pytest.param(None, marks=pytest.mark.exhaustive)])
def test_one_sample_of_25_times_the_median_decides_nothing(quick, count):
    base = results(*quick)
    rng = random.Random(6)
    for each in quick if count is None else rng.sample(quick, count):
        cost = rng.choice(list(each.time_ms))
        samples = list(each.time_ms[cost])
        samples[rng.randrange(len(samples))] = 25 * float(np.median(samples))
        other = base | results(changed(each, time_ms=each.time_ms | {cost: samples}))
        for sides in ((base, other), (other, base)):
            assert compare_results(*sides, Terms()).counts == {"uncertain": len(quick)}
