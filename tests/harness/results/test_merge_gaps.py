"""Parts that are missing, unfinished, torn or still being written: refused by name, or merged as far as they go."""

import pytest
from merged import HERE, ROWS, part, parts, refused, row

from attnbench.errors import MisuseError
from attnbench.harness.results.condense import condense
from attnbench.harness.results.merge import merge
from attnbench.harness.results.records import read_measurements
from attnbench.harness.results.store import MEASUREMENTS, Store
from attnbench.tables.table import Table


def test_missing_parts_are_named_and_a_partial_result_is_marked(tmp_path):
    sources = parts(tmp_path, [row(0)], [row(1)], [row(2)], [row(3)])
    said = "part-0001-of-0004, part-0003-of-0004 are missing.*--partial"
    refused(MisuseError, said, tmp_path / "out", [sources[0], sources[2]])
    merged = merge(tmp_path / "out", [sources[0], sources[2]], partial=True)
    assert merged.rows == [row(0), row(2)]
    assert merged.gaps == ["part-0001-of-0004, part-0003-of-0004 are missing"]
    assert not (tmp_path / "out" / "table.json").exists()
    refused(MisuseError, "out is unfinished", tmp_path / "again", [tmp_path / "out"])
    assert len(merge(tmp_path / "again", [tmp_path / "out", sources[1], sources[3]], partial=True).rows) == 4


def test_parts_of_two_sweeps_do_not_stand_in_for_each_other(tmp_path):
    first = parts(tmp_path / "first", [row(0)], [row(1)])
    second = parts(tmp_path / "second", [row(2)], [row(3)])
    assert len(merge(tmp_path / "out", first + second).rows) == 4
    refused(MisuseError, "part-0001-of-0002 is missing", tmp_path / "none", [first[0], *second])
    third = parts(tmp_path / "third", [row(4)], [row(5)], [row(6)])
    refused(MisuseError, "part-0002-of-0003 is missing", tmp_path / "none", [*first, *third[:2]])


def test_a_part_that_is_none(tmp_path):
    refused(MisuseError, "no part 2 of 2", tmp_path / "out", [part(tmp_path / "part-0002-of-0002", ROWS)])
    (tmp_path / "parts" / "part-0000-of-0002").mkdir(parents=True)
    part(tmp_path / "parts" / "part-0001-of-0002", ROWS)
    refused(MisuseError, f"part-0000-of-0002 holds no {MEASUREMENTS} yet", tmp_path / "out", [tmp_path / "parts"])
    assert merge(tmp_path / "out", [tmp_path / "parts"], partial=True).rows == ROWS
    assert merge(tmp_path / "again", list((tmp_path / "parts").iterdir()), partial=True).rows == ROWS


def test_a_sweep_that_was_stopped_is_unfinished(tmp_path):
    stopped = part(tmp_path / "stopped", ROWS[:5], finished=False)
    refused(MisuseError, f"{stopped} is unfinished, its sweep wrote no table.json", tmp_path / "out", [stopped])
    refused(MisuseError, "is unfinished", tmp_path / "out", [stopped / MEASUREMENTS])
    Table.from_entries(HERE, condense(ROWS[:3])).save(stopped / "table.json")  # it ended once, and went on to more
    refused(MisuseError, "is unfinished, its table.json is of other rows", tmp_path / "out", [stopped])
    assert merge(tmp_path / "out", [stopped], partial=True).rows == ROWS[:5]


def test_a_part_that_is_being_written_waits(tmp_path):
    sources = parts(tmp_path, ROWS[:6], ROWS[6:])
    with Store(sources[1], HERE, resume=True):
        for options in ({}, {"partial": True}):
            refused(MisuseError, f"still writing {sources[1]}", tmp_path / "out", sources, **options)
    assert merge(tmp_path / "out", sources).rows == ROWS


def test_nothing_is_written_while_parts_are_read_and_anything_may_be_afterwards(tmp_path, monkeypatch):
    first, second = parts(tmp_path, ROWS[:6], ROWS[6:])
    files = []

    def reading(path, *rest):
        with pytest.raises(MisuseError, match="another sweep"):
            Store(first, HERE, resume=True)
        files.append(path)
        if len(files) == 1:
            merge(tmp_path / "other", [first, second])  # two that only read do not disturb each other
        return read_measurements(path, *rest)

    monkeypatch.setattr("attnbench.harness.results.merge.read_measurements", reading)
    merge(tmp_path / "out", [first, second])
    with Store(first, HERE, resume=True) as store:
        assert store.rows == ROWS[:6]
