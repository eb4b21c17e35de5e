"""Memory that a plan takes more of than before."""

import pytest
from compared import results, row

from attnbench.harness.compare.regression import compare_results
from attnbench.harness.compare.terms import Limits, Terms, Threshold

MIB = 2**20


def outcome(before, after, terms=None):
    found = compare_results(results(row(**before)), results(row(seed=1, **after)), terms or Terms(Limits(time=0.5)))
    (one,) = found.outcomes
    return one, found.exit_code


@pytest.mark.parametrize(("name", "what"), [("memory_bytes", "its call takes"), ("retained_bytes", "its result holds")])
def test_a_fifth_more_memory_fails_and_says_how_much(name, what):
    one, code = outcome({name: 100 * MIB}, {name: 120 * MIB})
    assert (one.verdict, code) == ("larger", 1)
    assert f"{what} 120 MiB of memory, it was 100 MiB" in one.reasons[0]
    assert outcome({name: 120 * MIB}, {name: 100 * MIB})[0].verdict != "larger"


@pytest.mark.parametrize(
    ("before", "after"), [(100 * MIB, 109 * MIB), (1000, MIB), (0, 0), (None, 9 * MIB), (9 * MIB, None)]
)
def test_what_rounding_and_other_records_make_of_it_is_no_growth(before, after):
    one, code = outcome({"memory_bytes": before}, {"memory_bytes": after})
    assert (one.verdict, code) == ("same", 0)


def test_its_limit_can_be_set_for_a_plan():
    lenient = Terms(Limits(time=0.5), thresholds=(Threshold("fa3:*", memory=0.5),))
    assert outcome({"memory_bytes": 100 * MIB}, {"memory_bytes": 140 * MIB}, lenient)[0].verdict == "same"
    assert outcome({"memory_bytes": 100 * MIB}, {"memory_bytes": 160 * MIB}, lenient)[0].verdict == "larger"
