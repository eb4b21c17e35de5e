"""Entries of a table from rows: what a choice will know of a plan at a spec, whichever rows it comes from."""

from itertools import permutations

import pytest
from compared import passed_over, row
from row_facts import with_facts

from attnbench.harness.results.condense import condense


def entry_of(*rows):
    """The one entry of these rows, whatever their order."""
    (found,) = {str(entry): entry for order in permutations(rows) for entry in condense(order)}.values()
    return found


def of_case(name, ms=1.0, **changes):
    """A row of another case with the spec of ``a``, such as the captured calls of another layer."""
    made = with_facts(
        row("a"), case=name, time_ms={"kernel": [ms / 2], "call": [ms]}, visits={"kernel": [1], "call": [1]}
    )
    return with_facts(made, **changes)


def test_a_time_is_the_median_of_the_calls_beside_their_interquartile_range():
    found = entry_of(with_facts(row("a"), time_ms={"kernel": [9.0], "call": [1.0, 2.0, 3.0, 5.0, 40.0]}))
    assert (found.time_ms, found.spread_ms) == (3.0, 3.0)
    assert found.errors == {"normal": 0.05, "outlier": 0.08}  # without that of the LSE


def test_a_plan_that_was_never_called_takes_the_shortest_of_its_passes():
    passes = {"prepared": [2.0, 3.0], "backward": [5.0, 4.0]}
    found = entry_of(with_facts(row("a"), status="slower", reason="it lost", time_ms=passes, visits={}))
    assert (found.time_ms, found.spread_ms, found.usable) == (6.0, None, False)


def test_of_two_cases_with_one_spec_the_slower_counts_with_the_larger_errors():
    other = {"normal": {"out": 0.06}, "outlier": {"out": 0.01}, "sink": {"out": 0.02}}
    found = entry_of(of_case("first", 1.0), of_case("second", 2.0, error=other))
    assert found.time_ms == 2.0
    assert found.errors == {"normal": 0.06, "outlier": 0.08, "sink": 0.02}


def inaccurate(name, ms, check):
    return of_case(name, ms, status="inaccurate", reason="wrong", check=check)


@pytest.mark.parametrize("check", ["bias", "error"])
def test_of_two_cases_with_one_spec_the_inaccurate_counts_however_fast(check):
    found = entry_of(of_case("first", 1.0), inaccurate("second", 0.5, check))
    assert (found.status, found.check, found.time_ms) == ("inaccurate", check, 0.5)


def test_of_two_inaccurate_cases_with_one_spec_the_one_counts_that_no_budget_allows():
    found = entry_of(inaccurate("first", 1.0, "error"), inaccurate("second", 0.5, "bias"))
    assert (found.check, found.usable) == ("bias", False)


@pytest.mark.parametrize("status", ["crashed", "oom", "timeout", "error"])
def test_of_two_cases_with_one_spec_the_one_that_failed_counts(status):
    failed = with_facts(passed_over(status, "a"), case="second")
    found = entry_of(of_case("first", 1.0), failed)
    assert (found.status, found.time_ms, found.errors, found.usable) == (status, None, {}, False)
    assert found.reason == failed.reason
