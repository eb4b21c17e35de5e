"""What two sets of visits say of one another, and what they could have shown."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.errors import InputError
from attnbench.harness.statistics import Noise, compare, median_interval, spread

OPPOSITE = {"faster": "slower", "slower": "faster", "same": "same", "uncertain": "uncertain"}
STEADY = Noise(run=0.005, visit=0.003)  # as of the device's times on a GPU

milliseconds = st.floats(0.01, 100.0)
spreads = st.lists(st.floats(-0.2, 0.2), min_size=1, max_size=40)


def drawn(seed, count, spread=0.003):
    return np.random.default_rng(seed).lognormal(0.0, spread, count)


def runs(noise, visits, count, seed=0):
    """Pairs of runs that differ by such noise and by nothing else."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield tuple(rng.lognormal(rng.normal(0, noise.run / 2**0.5), noise.visit, visits) for _ in range(2))


def at_most(found, share):
    """Whether so many of them are as many as a share allows, but for chance in the drawing."""
    return sum(found) <= share * len(found) + 3 * (share * (1 - share) * len(found)) ** 0.5


@pytest.mark.parametrize(("visits", "family"), [(2, 1), (2, 300), (3, 300), (8, 1)])
@pytest.mark.parametrize("noise", [STEADY, Noise(run=0.0, visit=0.02)])
def test_a_slow_down_of_what_is_visible_is_found_with_95_percent(noise, visits, family):
    """In other runs than those that say what is visible, which are the same only where that is little."""
    missed, invented = [], []
    pairs = zip(runs(noise, visits, 300), runs(noise, visits, 300, seed=1), strict=True)
    for (before, after), (other, later) in pairs:
        found = compare(before, after, noise=noise, family=family)
        again = compare(other, later * (1 + found.visible), noise=noise, family=family)
        missed.append(again.verdict != "slower")
        invented.append(found.verdict in ("slower", "faster"))
        assert (found.verdict == "same") <= (found.visible <= 0.03)
    assert at_most(missed, 0.05)
    assert at_most(invented, 0.02)


def test_what_is_visible_shrinks_with_the_noise_and_grows_with_the_family():
    def visible(noise, family=1):
        return compare([1.0] * 5, [1.0] * 5, noise=noise, family=family).visible

    assert visible(Noise(0.001, 0.001)) < visible(STEADY) < visible(STEADY, 100) < visible(STEADY, 1000)
    assert visible(STEADY) < visible(Noise(0.02, 0.003)) < visible(Noise(0.02, 0.1))
    assert visible(Noise(0.0, 1e-9)) == pytest.approx(0.015, rel=0.02)  # the line, which no noise moves


@pytest.mark.parametrize(("visits", "clocks"), [(4, 1.4), (6, 1.05), (10, 1.4), (30, 1.05)])
def test_two_clocks_of_the_visits_decide_nothing(visits, clocks):
    """Each visit of either side finds one of them, as likely as not."""
    rng = np.random.default_rng(visits)
    found = [
        compare(*(rng.choice([1.0, clocks], visits) * rng.lognormal(0, 0.003, visits) for _ in range(2)), noise=STEADY)
        for _ in range(300)
    ]
    same_clock = 2 * 0.25**visits  # of each side's visits, and the other clock of the other's
    assert at_most([each.verdict in ("slower", "faster") for each in found], max(0.01, same_clock))


def test_one_clock_more_in_one_set_than_in_the_other_makes_no_difference():
    before, after = np.tile([1.0, 1.1], 50), np.tile([1.0, 1.1], 50)
    before[1], after[0] = 1.0, 1.1
    assert np.median(after) / np.median(before) > 1.09
    assert compare(before, after, noise=STEADY).verdict == "uncertain"
    few = compare([1.0] * 4 + [1.4], [1.4] * 4 + [1.0], noise=STEADY)
    assert few.verdict == "uncertain"
    assert few.visible > 1000  # which of them a later run finds is open


def test_the_spread_counts_two_clocks_of_few_visits_and_leaves_one_of_many_out():
    assert spread([1.0]) is None
    assert spread([1.0, 1.0, 1.1]) > 0.02
    assert spread([1.0, 1.0, 1.1, 1.1, 1.1]) > 0.02
    assert spread([*np.linspace(1, 1.01, 9), 25.0]) < 0.01
    many = np.random.default_rng(0).lognormal(0, 0.02, 2000)
    assert spread(many) == pytest.approx(0.02, rel=0.1)


def test_factor_is_the_size_that_is_found():
    before, after = drawn(0, 20), drawn(1, 20) * 1.1
    assert compare(before, after, factor=0.1, noise=STEADY).verdict == "slower"
    assert compare(before, after, factor=0.5, noise=STEADY).verdict == "same"
    assert compare(before, drawn(1, 20), factor=0.001, noise=STEADY).verdict == "uncertain"


def test_the_interval_holds_the_true_ratio():
    found = [compare(before, 1.2 * after, noise=STEADY) for before, after in runs(STEADY, 5, 500)]
    assert at_most([not one.interval[0] <= 1.2 <= one.interval[1] for one in found], 0.05)
    assert all(one.interval[0] < one.ratio < one.interval[1] < 1.3 for one in found)


@given(spreads, spreads, milliseconds)
def test_swapped_sets_swap_the_verdict(before, after, scale):
    old, new = scale * np.exp(before), scale * np.exp(after)
    forth, back = compare(old, new), compare(new, old)
    assert back.verdict == OPPOSITE[forth.verdict]
    assert back.ratio == pytest.approx(1 / forth.ratio)
    assert back.interval[0] == pytest.approx(1 / forth.interval[1])


@pytest.mark.parametrize("confidence", [0.4, 0.8, 0.95, 0.99])
def test_a_median_interval_is_the_narrowest_of_ranks_that_covers_so_often(confidence):
    """How many of n samples lie below the median of any distribution is binomial, of a chance of one half."""
    for count in range(1, 102):

        def beyond(rank, count=count):
            return sum(math.comb(count, below) for below in range(rank)) / 2 ** (count - 1)

        low, middle, high = median_interval(range(count, 0, -1), confidence)
        assert middle == (count + 1) / 2
        if low == 0:
            assert high == math.inf
            assert beyond(1) > 1 - confidence
        else:
            assert low + high == count + 1
            assert beyond(int(low)) <= 1 - confidence <= beyond(int(low) + 1)


@pytest.mark.parametrize("bad", [[], [1.0, 0.0], [1.0, -1.0], [1.0, np.nan], [np.inf], [[1.0, 2.0]]])
def test_what_is_no_set_of_times_and_no_size_is_refused(bad):
    with pytest.raises(InputError, match=r"^before"):
        compare(bad, [1.0])
    with pytest.raises(InputError, match=r"^after"):
        compare([1.0], bad)
    with pytest.raises(InputError, match="samples"):
        median_interval(bad)
    for factor in (0.0, -0.1, np.nan, np.inf):
        with pytest.raises(InputError, match="factor"):
            compare([1.0], [1.0], factor=factor)
