"""Verdicts hold on recorded noise, and do what anybody would expect of them on anything else."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from attnbench.errors import InputError
from attnbench.harness.records import read_measurements
from attnbench.harness.statistics import SIGNIFICANCE, compare, median_interval

RECORDED = Path(__file__).parents[2] / "results" / "nvidia-h200" / "quick" / "measurements.jsonl"
SAMPLES = 200  # the most that a Timer takes
BLOCK = 10  # samples that stay together when noise is resampled, so that it stays as autocorrelated as it was
OPPOSITE = {"faster": "slower", "slower": "faster", "same": "same", "ambiguous": "ambiguous"}

milliseconds = st.floats(0.01, 100.0)
spreads = st.lists(st.floats(-0.2, 0.2), min_size=1, max_size=40)
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def noises():
    """Ratios to their median of every cost of every row that has at least 20 samples."""
    rows = [row for row in read_measurements(RECORDED) if row.status == "ok"]
    times = [np.array(times) for row in rows for times in row.time_ms.values() if len(times) >= 20]
    assert len(times) > 100
    return [time / np.median(time) for time in times]


def resampled(noise, rng, count=SAMPLES):
    starts = rng.integers(len(noise), size=-(-count // BLOCK))
    return noise[(starts[:, None] + np.arange(BLOCK)) % len(noise)].ravel()[:count]


def verdicts(noises, slow_down, count=1000, samples=SAMPLES):
    rng = np.random.default_rng(20)
    chosen = [noises[number % len(noises)] for number in range(count)]
    return Counter(
        compare(resampled(noise, rng, samples), resampled(noise, rng, samples) * slow_down).verdict for noise in chosen
    )


def drawn(seed, count, spread=0.01):
    return np.random.default_rng(seed).lognormal(0.0, spread, count)


def test_equal_sets_are_told_apart_once_in_a_hundred_at_most(noises):
    found = verdicts(noises, 1.0)
    assert found["faster"] + found["slower"] <= 10
    assert found["same"] >= 800


def test_a_slow_down_of_three_percent_is_found_95_times_in_a_hundred(noises):
    found = verdicts(noises, 1.03)
    assert found["slower"] >= 950
    assert found["faster"] + found["same"] <= 10


@pytest.mark.parametrize(("samples", "found"), [(20, 0.5), (50, 0.7)])
def test_fewer_samples_find_less_and_invent_little(noises, samples, found):
    equal, slower = verdicts(noises, 1.0, 500, samples), verdicts(noises, 1.03, 500, samples)
    assert equal["faster"] + equal["slower"] <= 0.02 * 500
    assert slower["slower"] >= found * 500


def test_samples_that_follow_one_another_are_not_taken_for_independent():
    def wandering(rng):
        steps = rng.normal(0, 0.01, 300)
        level = [steps[0]]
        for step in steps[1:]:
            level.append(0.9 * level[-1] + step)
        return np.exp(level[100:])

    rng = np.random.default_rng(0)
    found = [compare(wandering(rng), wandering(rng)).p_value < SIGNIFICANCE for _ in range(400)]
    assert sum(found) <= 0.05 * len(found)  # 60 % are, taken for independent


def test_independent_samples_give_the_level_that_is_promised():
    rng = np.random.default_rng(0)
    found = [compare(*rng.lognormal(0, 0.05, (2, 50))).p_value < SIGNIFICANCE for _ in range(1000)]
    assert 1 <= sum(found) <= 0.02 * len(found)


def test_the_interval_holds_the_true_ratio():
    rng = np.random.default_rng(0)
    found = [compare(rng.lognormal(0, 0.05, 40), 1.2 * rng.lognormal(0, 0.05, 60)) for _ in range(500)]
    assert sum(one.interval[0] <= 1.2 <= one.interval[1] for one in found) >= 0.98 * len(found)
    assert all(one.interval[0] < one.ratio < one.interval[1] < 1.4 for one in found)


def test_two_clocks_do_not_make_a_difference():
    """Half of each set at either clock, and one sample more at the one than at the other."""
    before, after = np.tile([1.0, 1.1], 50), np.tile([1.0, 1.1], 50)
    before[1], after[0] = 1.0, 1.1
    found = compare(before, after)
    assert np.median(after) / np.median(before) > 1.09
    assert found.ratio == 1
    assert found.verdict != "slower"


def test_a_significant_difference_too_small_to_matter_is_the_same():
    found = compare(drawn(0, 200, 0.001), drawn(1, 200, 0.001) * 1.005)
    assert found.p_value < 1e-6
    assert found.interval[0] > 1
    assert found.verdict == "same"


def test_factor_is_the_size_that_is_found():
    before, after = drawn(0, 200), drawn(1, 200) * 1.1
    assert compare(before, after, factor=0.1).verdict == "slower"
    assert compare(before, after, factor=0.5).verdict == "same"


def test_evidence_without_size_and_size_without_evidence_are_ambiguous():
    at_the_line = drawn(1, 60) * 1.0135
    assert compare(drawn(0, 60), at_the_line).p_value < SIGNIFICANCE
    assert compare(drawn(0, 60), at_the_line).verdict == "ambiguous"
    assert compare([1.0, 1.1, 1.2], [2.0, 2.1, 2.2]).verdict == "ambiguous"


def test_a_drift_through_both_sets_is_ambiguous():
    before = np.linspace(1.0, 1.1, 100)
    found = compare(before, np.linspace(1.04, 1.14, 100))
    assert found.verdict == "ambiguous"
    shuffled = np.random.default_rng(0).permutation(100)
    assert compare(before[shuffled], before[shuffled[::-1]] + 0.04).verdict == "slower"


@pytest.mark.parametrize("count", [1, 2, 6])
def test_too_few_samples_say_nothing(count):
    for ratio in (1.0, 2.0):
        found = compare([1.0] * count, [ratio] * count)
        assert found.verdict == "ambiguous"
        assert found.interval == (0, np.inf)


def test_few_samples_do_not_become_evidence_beside_many():
    assert compare([2.0, 2.1, 2.2], drawn(0, 1000)).verdict == "ambiguous"


@pytest.mark.parametrize(("after", "verdict"), [(1.0, "same"), (1.03, "slower"), (0.97, "faster"), (1.001, "same")])
def test_constant_sets(after, verdict):
    found = compare([1.0] * 10, [after] * 10)
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(after)
    assert found.interval == pytest.approx((after, after))
    assert found.p_value == 1 if after == 1 else found.p_value < SIGNIFICANCE


@given(spreads, spreads, milliseconds)
def test_swapped_sets_swap_the_verdict(before, after, scale):
    old, new = scale * np.exp(before), scale * np.exp(after)
    forth, back = compare(old, new), compare(new, old)
    assert back.verdict == OPPOSITE[forth.verdict]
    assert back.p_value == pytest.approx(forth.p_value)
    assert back.ratio == pytest.approx(1 / forth.ratio)
    assert back.interval[0] == (pytest.approx(1 / forth.interval[1]) if forth.interval[0] else 0)


@given(seeds, st.integers(1, 60), st.integers(1, 60), st.floats(0.9, 1.1), milliseconds)
def test_the_unit_does_not_matter(seed, few, many, ratio, unit):
    before, after = drawn(seed, few), ratio * drawn(seed + 1, many)
    one, other = compare(before, after), compare(unit * before, unit * after)
    assert one.verdict == other.verdict
    assert one.ratio == pytest.approx(other.ratio)
    assert one.p_value == pytest.approx(other.p_value)


@given(seeds, st.integers(7, 60), st.floats(0.001, 0.1))
def test_more_of_a_slow_down_never_turns_slower_into_anything_else(seed, count, spread):
    before, after = drawn(seed, count, spread), drawn(seed + 1, count, spread)
    found = [compare(before, after * slow_down).verdict for slow_down in np.geomspace(1, 4, 40)]
    first = found.index("slower") if "slower" in found else len(found)
    assert set(found[first:]) <= {"slower"}
    assert "same" not in found[first:]
    if count >= 10:
        assert compare(before, after * 4).verdict in ("slower", "ambiguous")


@given(seeds, st.integers(10, 60), st.integers(0, 59), st.booleans(), st.floats(0.001, 1000.0))
def test_one_outlier_never_turns_same_into_slower(seed, count, place, in_after, size):
    before, after = drawn(seed, count, 0.003), drawn(seed + 1, count, 0.003)
    assume(compare(before, after).verdict == "same")
    (after if in_after else before)[place % count] *= size
    assert compare(before, after).verdict in ("same", "ambiguous")


@given(seeds, st.integers(1, 60), st.integers(1, 60))
def test_the_answer_is_the_same_each_time(seed, few, many):
    before, after = list(drawn(seed, few)), list(drawn(seed + 1, many))
    assert compare(before, after) == compare(before, after)


@pytest.mark.parametrize("bad", [[], [1.0, 0.0], [1.0, -1.0], [1.0, np.nan], [np.inf], [[1.0, 2.0]]])
def test_what_is_no_set_of_times_is_refused(bad):
    with pytest.raises(InputError, match=r"^before"):
        compare(bad, [1.0])
    with pytest.raises(InputError, match=r"^after"):
        compare([1.0], bad)


@pytest.mark.parametrize("factor", [0.0, -0.1, np.nan, np.inf])
def test_a_factor_that_is_no_size_is_refused(factor):
    with pytest.raises(InputError, match="factor"):
        compare([1.0], [1.0], factor=factor)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("count", [8, 9, 20, 101])
@pytest.mark.parametrize("noise", ["lognormal", "exponential", "uniform"])
def test_a_median_interval_covers_as_often_as_it_says(confidence, count, noise):
    rng = np.random.default_rng(count)
    median = {"lognormal": 1.0, "exponential": np.log(2), "uniform": 0.5}[noise]
    draw = {"lognormal": lambda: rng.lognormal(0.0, 0.7, count), "exponential": lambda: rng.exponential(1.0, count)}
    drawn = [draw.get(noise, lambda: rng.uniform(0.0, 1.0, count))() for _ in range(1500)]
    held = [low <= median <= high for low, _, high in (median_interval(each, confidence) for each in drawn)]
    three_sigma = 3 * (confidence * (1 - confidence) / len(held)) ** 0.5
    assert np.mean(held) >= confidence - three_sigma
    # Ranks are whole numbers: an interval one sample narrower on either side would not do.
    if count == 101:
        assert np.mean(held) <= confidence + 0.03 + three_sigma


@given(st.lists(milliseconds, min_size=1, max_size=60), st.floats(0.5, 0.999))
def test_a_median_interval_is_made_of_samples_and_holds_their_median(samples, confidence):
    low, middle, high = median_interval(samples, confidence)
    assert low <= middle <= high
    assert middle == np.median(samples)
    assert (low in samples and high in samples) or (low, high) == (0.0, np.inf)
    assert median_interval(samples[::-1], confidence) == (low, middle, high)
    wider = median_interval(samples, 1 - (1 - confidence) / 4)
    assert wider[0] <= low
    assert wider[2] >= high


@pytest.mark.parametrize(("confidence", "least"), [(0.4, 2), (0.7, 3), (0.9, 5), (0.95, 6), (0.99, 8)])
def test_too_few_samples_have_no_median_interval(confidence, least):
    samples = [float(number + 1) for number in range(least)]
    assert median_interval(samples[:-1], confidence) == (0.0, np.median(samples[:-1]), np.inf)
    assert median_interval(samples, confidence) == (1.0, np.median(samples), float(least))


@pytest.mark.parametrize("samples", [[], [0.0], [-1.0], [1.0, np.nan], [np.inf], [[1.0, 2.0]]])
def test_no_median_interval_of_what_is_no_time(samples):
    with pytest.raises(InputError, match="samples"):
        median_interval(samples)
