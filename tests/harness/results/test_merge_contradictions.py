"""Parts that contradict each other, and parts from machines that are not alike: refused with both places."""

from dataclasses import replace
from datetime import timedelta

import pytest
from merged import HERE, PLANS, WHEN, parts, refused, row, spec

from attnbench.errors import MisuseError
from attnbench.harness.results.merge import merge
from attnbench.tables.table import Table


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (row(1), row(1, time_ms={"call": [9.0]}), "measured twice, with another time_ms;"),
        (row(1), row(1, started=WHEN + timedelta(seconds=1)), "measured twice, with another started;"),
        (row(1), row(1, status="crashed"), "its status is ok, then crashed"),
        (row(1, status="unavailable"), row(1), "its status is unavailable, then ok"),
        (row(1, status="unavailable"), row(1, status="refused"), "its status is unavailable, then refused"),
        (row(1, status="refused"), row(1, status="refused", reason="another"), "it has another reason;"),
    ],
)
def test_two_rows_that_contradict_each_other(tmp_path, first, second, said):
    sources = parts(tmp_path, [row(0), first], [second, row(2)])
    with pytest.raises(MisuseError) as caught:
        merge(tmp_path / "out", sources, partial=True)
    for each in ("'case 1'", str(PLANS[0]), "part-0000-of-0002, line 2", "part-0001-of-0002, line 1", said):
        assert each in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_case_that_is_another_spec_elsewhere(tmp_path):
    other = row(1, PLANS[1], case="case 0")
    said = f"'case 0' is {spec(0)} in .*part-0000-of-0002, line 1, but {spec(1)} in .*part-0001-of-0002, line 1"
    refused(MisuseError, said, tmp_path / "out", parts(tmp_path, [row(0)], [other]))


def test_a_case_that_was_judged_on_other_families_elsewhere(tmp_path):
    other = row(0, PLANS[1], error={"outlier": {"out": 0.05}})
    said = "errors of the case 'case 0' are on normal in .*part-0000-of-0002, line 1, but on outlier in .*part-0001-of"
    refused(MisuseError, said, tmp_path / "out", parts(tmp_path, [row(0)], [other]), partial=True)


def test_a_refusal_says_the_same_on_every_node_at_any_time(tmp_path):
    elsewhere = replace(HERE, platform="Linux on another node")
    again = row(0, status="refused", started=WHEN + timedelta(hours=1), environment=elsewhere)
    merged = merge(tmp_path / "out", parts(tmp_path, [row(0, status="refused")], [again]))
    assert merged.rows == [row(0, status="refused")]
    assert merged.repeated == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device_name": "another GPU"}, "device_name was a GPU, is another GPU"),
        ({"torch": "2.10.0"}, "torch was 2.9.0, is 2.10.0"),
        ({"backends": {"fa3": "2.0"}}, "the backend fa3 was 1.0, is 2.0"),
    ],
)
def test_unlike_machines_are_refused(tmp_path, change, said):
    other = row(1, environment=replace(HERE, **change))
    refused(MisuseError, f"part-0001-of-0002.*{said}", tmp_path / "out", parts(tmp_path, [row(0)], [other]))
    refused(MisuseError, said, tmp_path / "out", parts(tmp_path / "one", [row(0), other]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([{"backends": {"te": "1"}}, {}, {"backends": {"te": "2"}}], "the backend te was 1, is 2"),
        ([{"power_cap_w": 700}, {}, {"power_cap_w": 600}], "power_cap_w was 700, is 600"),
        ([{}, {"power_cap_w": 700}, {"power_cap_w": 600}], "power_cap_w was 700, is 600"),
    ],
)
def test_what_one_part_does_not_tell_is_compared_past_it(tmp_path, changes, said):
    rows = [row(number, environment=replace(HERE, **change)) for number, change in enumerate(changes)]
    refused(MisuseError, f"part-0002-of-0003.*{said}", tmp_path / "out", parts(tmp_path, *([each] for each in rows)))


def test_another_node_of_the_kind_is_noted_and_the_table_knows_every_backend(tmp_path):
    other = replace(HERE, platform="Linux on another node", backends={"te": "2"})
    sources = parts(tmp_path, [row(0)], [row(1, environment=other)])
    merged = merge(tmp_path / "out", sources)
    assert f"{sources[1]}: platform was Linux, is Linux on another node" in merged.notes
    assert Table.load(tmp_path / "out" / "table.json").environment.backends == {"fa3": "1.0", "te": "2"}
