"""What the parts hold is what the merged folder holds: no row lost and none twice, in the order of the parts."""

import gzip

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from merged import HERE, ROWS, parts, refused, row

from attnbench.errors import MisuseError
from attnbench.harness.results.condense import condense
from attnbench.harness.results.merge import merge
from attnbench.harness.results.records import read_measurements
from attnbench.harness.results.store import MEASUREMENTS, Store
from attnbench.tables.table import Table
from examples import examples


@settings(max_examples=examples(12, 60), deadline=None)
@given(st.data())
def test_any_split_merges_to_the_same_rows_in_whatever_order_the_parts_are_named(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("split")
    count = data.draw(st.integers(1, 4))
    owners = [data.draw(st.sets(st.integers(0, count - 1), min_size=1)) for _ in ROWS]
    split = [[each for each, owner in zip(ROWS, owners, strict=True) if index in owner] for index in range(count)]
    sources = parts(folder / "parts", *split)
    merged = merge(folder / "out", data.draw(st.permutations(sources)))
    assert sorted(each.to_line() for each in merged.rows) == sorted(each.to_line() for each in ROWS)
    assert list(read_measurements(folder / "out" / MEASUREMENTS)) == merged.rows
    assert merged.repeated == sum(map(len, split)) - len(ROWS)
    assert merged.gaps == merged.notes == []
    merge(folder / "again", [folder / "parts"])
    assert (folder / "again" / MEASUREMENTS).read_bytes() == (folder / "out" / MEASUREMENTS).read_bytes()
    assert (folder / "again" / "table.json").read_bytes() == (folder / "out" / "table.json").read_bytes()


def test_the_result_is_a_sweeps_folder(tmp_path):
    sources = parts(tmp_path, ROWS[:5], ROWS[5:])
    merged = merge(tmp_path / "a" / "new" / "folder", sources)
    assert merged.rows == ROWS
    assert Table.load(merged.folder / "table.json") == Table.from_entries(HERE, condense(ROWS))
    with Store(merged.folder, HERE, resume=True) as store:
        assert store.rows == ROWS
        assert store.notes == []
    assert merge(tmp_path / "again", [merged.folder]).rows == ROWS
    assert oct(merged.folder.stat().st_mode) == oct(sources[0].stat().st_mode)


def test_a_compressed_part_is_a_part(tmp_path):
    sources = parts(tmp_path, ROWS[:5], ROWS[5:])
    plain = sources[0] / MEASUREMENTS
    (sources[0] / f"{MEASUREMENTS}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert merge(tmp_path / "out", sources).rows == ROWS


def test_numbered_parts_come_first_and_in_order(tmp_path):
    sources = parts(tmp_path, *([row(number)] for number in range(12)))
    other = tmp_path / "aaa.jsonl"
    other.write_text(row(20).to_line() + "\n")
    merged = merge(tmp_path / "out", [other, *reversed(sources)])
    assert [each.case for each in merged.rows] == [f"case {number}" for number in [*range(12), 20]]
    (tmp_path / "second node").mkdir()
    sources[0] = sources[0].rename(tmp_path / "second node" / sources[0].name)  # copied together from two nodes
    merged = merge(tmp_path / "again", sources)
    assert [each.case for each in merged.rows] == [f"case {number}" for number in range(12)]


@pytest.mark.parametrize("name", ["", MEASUREMENTS])
def test_a_part_counts_once_however_often_it_is_named(tmp_path, name):
    first, second = parts(tmp_path / "parts", ROWS[:5], ROWS[5:])
    (tmp_path / "link").symlink_to(first)
    merged = merge(tmp_path / "out", [first, tmp_path / "link", tmp_path / "parts", second / name])
    assert merged.rows == ROWS
    assert merged.repeated == 0


def test_a_rank_without_cases_is_no_missing_part(tmp_path):
    assert merge(tmp_path / "out", parts(tmp_path, ROWS, [], [])).rows == ROWS
    refused(MisuseError, "no measurement", tmp_path / "none", parts(tmp_path / "empty", [], []))
