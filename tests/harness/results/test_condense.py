"""Entries of a table from rows, and the calls in them brought to one speed of the host."""

from dataclasses import replace
from itertools import permutations
from statistics import median

import pytest
from compared import passed_over, row
from row_facts import with_facts

from attnbench.errors import MisuseError
from attnbench.harness.results.condense import condense, join_sweeps, table_of
from attnbench.harness.results.host_speed import HostSpeed


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


@pytest.mark.parametrize("worst", ["out", "dq", "dk", "dv"])
def test_a_time_is_the_median_of_the_calls_and_an_error_the_worst_but_for_that_of_the_lse(worst):
    errors = {**dict.fromkeys(("out", "dq", "dk", "dv"), 0.1), "lse": 0.9, worst: 0.2}
    calls = {"kernel": [9.0], "call": [1.0, 2.0, 3.0, 5.0, 40.0]}
    found = entry_of(with_facts(row("a"), time_ms=calls, error={"normal": errors, "outlier": {"out": 0.08}}))
    assert (found.time_ms, found.spread_ms) == (3.0, 3.0)  # the interquartile range
    assert found.errors == {"normal": 0.2, "outlier": 0.08}


def test_a_plan_that_was_never_called_takes_the_shortest_of_its_passes():
    passes = {"prepared": [2.0, 3.0], "backward": [5.0, 4.0]}
    found = entry_of(with_facts(row("a"), status="slower", reason="it lost", time_ms=passes, visits={}))
    assert (found.time_ms, found.spread_ms, found.usable) == (6.0, None, False)


def inaccurate(name, ms, check):
    return of_case(name, ms, status="inaccurate", reason="wrong", check=check)


FIRST = of_case("first", 1.0)
OTHERS = {"normal": {"out": 0.06}, "outlier": {"out": 0.01}, "sink": {"out": 0.02}}
LARGER = {"normal": 0.06, "outlier": 0.08, "sink": 0.02}
FAILED = {"time_ms": None, "errors": {}, "usable": False, "reason": "so it is"}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (FIRST, of_case("second", 2.0, error=OTHERS), {"time_ms": 2.0, "errors": LARGER}),  # the slower
        (FIRST, inaccurate("second", 0.5, "bias"), {"status": "inaccurate", "check": "bias", "time_ms": 0.5}),
        (FIRST, inaccurate("second", 0.5, "error"), {"status": "inaccurate", "check": "error", "time_ms": 0.5}),
        (inaccurate("first", 1.0, "error"), inaccurate("second", 0.5, "bias"), {"check": "bias", "usable": False}),
        *((FIRST, with_facts(passed_over(status), case="second"), {"status": status, **FAILED})
          for status in ("crashed", "oom", "timeout", "error")),
    ],
)  # fmt: skip
def test_of_two_cases_with_one_spec_the_worse_counts(first, second, expected):
    found = entry_of(first, second)
    assert {name: getattr(found, name) for name in expected} == expected


def visited(launches, power, case="a", device=0.001, plan="sdpa-flash:bf16"):
    """A row of calls whose host takes 0.1 ms where a launch takes 0.01, and goes with a power of the launch's time."""
    hosts = [0.1 * (launch / 0.01) ** power for launch in launches]
    scales = [0.01 / launch for launch in launches]
    host = [ms * scale for ms, scale in zip(hosts, scales, strict=True) for _ in range(5)]
    return with_facts(
        row(case, plan),
        time_ms={"prepared": [device], "call": [max(device, ms) for ms in host]},
        visits={"call": [5] * len(launches)},
        host_ms=host,
        host_scale=scales,
        launch_ms=list(launches),
    )


SLOWS = [0.005, 0.01, 0.02, 0.04]
SLOW_AND_ONE = [*SLOWS, 0.01]


@pytest.mark.parametrize("power", [0.8, 1.0, 1.5])
def test_the_power_is_found_and_calls_of_fast_and_slow_visits_agree(power):
    rows = [visited(SLOWS, power, case) for case in "abcdefgh"]
    speed = HostSpeed(rows)
    assert speed.power(rows[0].plan, rows[0].spec.direction) == pytest.approx(power, abs=0.02)
    assert speed.usual_ms == pytest.approx(median(SLOWS))
    calls = speed.calls(rows[0])
    assert max(calls) / min(calls) < 1.1
    assert median(calls) == pytest.approx(0.1 * (median(SLOWS) / 0.01) ** power, rel=0.1)


@pytest.mark.parametrize(("power", "taken"), [(0.0, 0.5), (4.0, 2.0)])
def test_a_power_that_no_host_has_is_not_believed(power, taken):
    rows = [visited(SLOWS, power, case) for case in "abcdefgh"]
    assert HostSpeed(rows).power(rows[0].plan, rows[0].spec.direction) == taken


def test_a_row_that_was_measured_at_the_usual_speed_names_no_scale_and_counts():
    given = with_facts(visited([0.01] * 3, 1.0), host_scale=[])
    (entry,) = condense([given])
    assert (entry.host_ms, entry.device_ms) == pytest.approx((0.1, 0.001))
    calls = HostSpeed([given, visited([0.02] * 5, 1.0, "b")]).calls(given)
    assert calls == pytest.approx([0.2] * len(calls))


@pytest.mark.parametrize(
    "given",
    [
        row("a", "sdpa-flash:bf16"),
        *(with_facts(visited(SLOWS, 1.0), **odd)
          for odd in ({"launch_ms": SLOW_AND_ONE}, {"host_scale": [1.0]}, {"host_ms": [0.1]})),
    ],
)  # fmt: skip
def test_a_row_without_the_hosts_speed_or_whose_visits_do_not_fit_together_is_as_it_was(given):
    assert HostSpeed([given]).usual_ms is None
    assert condense([given])[0].host_ms is None
    assert HostSpeed([visited(SLOWS, 1.0)]).calls(given) == given.time_ms["call"]


@pytest.mark.parametrize("device", [0.001, 9.0])
def test_a_table_holds_the_part_of_the_host_and_that_of_the_device(device):
    (entry,) = condense([visited(SLOWS, 1.0, device=device)])
    assert entry.host_ms == pytest.approx(0.1 * median(SLOWS) / 0.01)
    assert entry.device_ms == pytest.approx(device)
    assert entry.time_ms == pytest.approx(max(entry.host_ms, entry.device_ms))


def test_the_device_of_passes_that_a_late_host_made_longer_is_that_of_the_others():
    late = visited(SLOWS, 1.0)
    late = with_facts(late, time_ms={**late.time_ms, "prepared": [0.001, 0.001, 0.09, 0.09, 0.09]})
    assert condense([late])[0].device_ms == pytest.approx(0.001)


def test_a_first_look_renews_the_parts_of_a_call_with_its_time():
    given, newer = (condense([visited(SLOWS, 1.0, device=device)])[0] for device in (0.001, 9.0))
    renewed = replace(given, errors={"normal": 0.002}).renewed(replace(newer, status="slower", errors={}))
    assert (renewed.time_ms, renewed.host_ms, renewed.device_ms) == (newer.time_ms, newer.host_ms, newer.device_ms)


def test_a_table_records_for_which_speed_of_the_host_it_is():
    rows = [visited(SLOWS, 1.0), row("a", "sdpa-flash:bf16")]
    tables = join_sweeps({"all": rows}), table_of(rows[0].environment, rows)
    assert [table.launch_ms for table in tables] == [pytest.approx(median(SLOWS))] * 2
    assert join_sweeps({"old": rows[1:]}).launch_ms is table_of(rows[1].environment, rows[1:]).launch_ms is None


def test_sweeps_without_a_row_make_no_table():
    with pytest.raises(MisuseError, match="a and b holds no measurement"):
        join_sweeps({"a": [], "b": []})


def hosted(spec, plan="sdpa-flash:bf16"):
    """A row of a call that its host limited, without the host's speed."""
    given = row("old", plan)
    return with_facts(given, host_ms=list(given.time_ms["call"]), visits={}, spec=spec)


def test_calls_limited_by_an_unknown_host_are_left_out_where_enough_others_are():
    watched = [visited(SLOWS, 1.0, case) for case in "abcde"]
    old = hosted(watched[0].spec.replace(batch=7))
    other = hosted(old.spec, "sdpa-cudnn:bf16")
    table = join_sweeps({"old": [old, other], "new": watched})
    assert (old.spec, old.plan) not in table.entries
    assert (other.spec, other.plan) in table.entries  # of this plan nothing else is known
    assert (old.spec, old.plan) in join_sweeps({"old": [old], "new": watched[:4]}).entries
    device = with_facts(row("old", "sdpa-flash:bf16"), spec=old.spec)
    assert (old.spec, old.plan) in join_sweeps({"old": [device], "new": watched}).entries


def test_what_was_only_predicted_to_be_slower_is_in_no_table():
    given = row("a", "sdpa-flash:bf16")
    never = with_facts(given, status="slower", reason="predicted", time_ms={}, visits={}, host_ms=None)
    assert condense([never]) == []
