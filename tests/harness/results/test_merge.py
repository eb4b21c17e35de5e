"""What the parts hold is what the merged folder holds, or the merge is refused with the places that contradict it."""

import json
import os
from dataclasses import replace
from datetime import timedelta

import pytest
from command_line import attnbench, expect, fails_in_one_line
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import in_haste
from sweep_parts import HERE, PLANS, ROWS, WHEN, assert_merge_refused, part, parts, row, spec

from attnbench.errors import MalformedFileError, MisuseError, OutputError
from attnbench.harness.measure.timing import Timer
from attnbench.harness.results.condense import condense
from attnbench.harness.results.merge import merge
from attnbench.harness.results.records import read_measurements
from attnbench.harness.results.store import MEASUREMENTS, Store
from attnbench.harness.sequence_lengths import SequenceLengths
from attnbench.problem.spec import AttentionSpec
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


def test_numbered_parts_come_first_and_in_order(tmp_path):
    sources = parts(tmp_path, *([row(number)] for number in range(12)))
    other = tmp_path / "aaa.jsonl"
    other.write_text(row(20).to_line() + "\n")
    merged = merge(tmp_path / "out", [other, *reversed(sources)])
    assert [each.case for each in merged.rows] == [f"case {number}" for number in [*range(12), 20]]


def test_a_part_counts_once_however_often_it_is_named(tmp_path):
    first, second = parts(tmp_path / "parts", ROWS[:5], ROWS[5:])
    (tmp_path / "link").symlink_to(first)
    merged = merge(tmp_path / "out", [first, tmp_path / "link", tmp_path / "parts", second / MEASUREMENTS])
    assert merged.rows == ROWS
    assert merged.repeated == 0


def test_a_rank_without_cases_is_no_missing_part(tmp_path):
    assert merge(tmp_path / "out", parts(tmp_path, ROWS, [], [])).rows == ROWS
    assert_merge_refused(MisuseError, "no measurement", tmp_path / "none", parts(tmp_path / "empty", [], []))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (row(1), row(1, time_ms={"call": [9.0]}), "measured twice, with another time_ms;"),
        (row(1), row(1, started=WHEN + timedelta(seconds=1)), "measured twice, with another started;"),
        (row(1), row(1, status="crashed"), "its status is ok, then crashed"),
        (row(1, status="unavailable"), row(1, status="refused"), "its status is unavailable, then refused"),
        (row(1, status="refused"), row(1, status="refused", reason="another"), "it has another reason;"),
    ],
)
def test_two_rows_that_contradict_each_other(tmp_path, first, second, message):
    sources = parts(tmp_path, [row(0), first], [second, row(2)])
    with pytest.raises(MisuseError) as caught:
        merge(tmp_path / "out", sources, partial=True)
    for each in ("'case 1'", str(PLANS[0]), "part-0000-of-0002, line 2", "part-0001-of-0002, line 1", message):
        assert each in str(caught.value)
    assert not (tmp_path / "out").exists()


DRAWN = [SequenceLengths(layout="packed", q=q) for q in ((5, 3), (3, 5))]
PACKED = AttentionSpec.make(heads=2, head_dim=16, **DRAWN[0].sizes())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(0), row(1, PLANS[1], case="case 0")], f"'case 0' is {spec(0)} in {{}}, but {spec(1)} in "),
        ([row(0), row(0, PLANS[1], error={"outlier": {"out": 0.05}})],
         "'case 0' are on normal in {}, but on outlier in "),
        ([row(0, spec=PACKED, lengths=each) for each in DRAWN], "'case 0' have other lengths in {} than in "),
    ],
    ids=["another spec", "other input families", "other lengths"],
)  # fmt: skip
def test_a_case_that_is_another_elsewhere(tmp_path, rows, message):
    places = [f".*part-000{number}-of-0002, line 1" for number in range(2)]
    sources = parts(tmp_path, *([each] for each in rows))
    assert_merge_refused(MisuseError, message.format(places[0]) + places[1], tmp_path / "out", sources, partial=True)


def test_a_refusal_is_the_same_on_every_node_at_any_time(tmp_path):
    elsewhere = replace(HERE, platform="Linux on another node")
    again = row(0, status="refused", started=WHEN + timedelta(hours=1), environment=elsewhere)
    merged = merge(tmp_path / "out", parts(tmp_path, [row(0, status="refused")], [again]))
    assert merged.rows == [row(0, status="refused")]
    assert merged.repeated == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{}, {"device_name": "another GPU"}], "device_name was a GPU, is another GPU"),
        ([{}, {"backends": {"fa3": "2.0"}}], "the backend fa3 was 1.0, is 2.0"),
        ([{"backends": {"te": "1"}}, {}, {"backends": {"te": "2"}}], "the backend te was 1, is 2"),
        ([{}, {"power_cap_w": 700}, {"power_cap_w": 600}], "power_cap_w was 700, is 600"),
    ],
    ids=["device", "backend", "backend that the second part does not name", "limit that the first does not name"],
)
def test_unlike_machines_are_refused_in_one_part_or_in_several(tmp_path, changes, message):
    rows = [row(number, environment=replace(HERE, **change)) for number, change in enumerate(changes)]
    last = f"part-000{len(rows) - 1}-of-000{len(rows)}.*"
    assert_merge_refused(MisuseError, last + message, tmp_path / "out", parts(tmp_path, *([each] for each in rows)))
    assert_merge_refused(MisuseError, message, tmp_path / "out", parts(tmp_path / "one", rows))


def test_another_node_of_the_kind_is_noted_and_the_table_knows_every_backend(tmp_path):
    other = replace(HERE, platform="Linux on another node", backends={"te": "2"})
    sources = parts(tmp_path, [row(0)], [row(1, environment=other)])
    merged = merge(tmp_path / "out", sources)
    assert f"{sources[1]}: platform was Linux, is Linux on another node" in merged.notes
    assert Table.load(tmp_path / "out" / "table.json").environment.backends == {"fa3": "1.0", "te": "2"}


def test_missing_parts_are_named_and_a_partial_result_is_marked(tmp_path):
    sources = parts(tmp_path, [row(0)], [row(1)], [row(2)], [row(3)])
    message = "part-0001-of-0004, part-0003-of-0004 are missing.*--partial"
    assert_merge_refused(MisuseError, message, tmp_path / "out", [sources[0], sources[2]])
    merged = merge(tmp_path / "out", [sources[0], sources[2]], partial=True)
    assert merged.rows == [row(0), row(2)]
    assert merged.gaps == ["part-0001-of-0004, part-0003-of-0004 are missing"]
    assert not (tmp_path / "out" / "table.json").exists()
    assert_merge_refused(MisuseError, "out is unfinished", tmp_path / "again", [tmp_path / "out"])
    assert len(merge(tmp_path / "again", [tmp_path / "out", sources[1], sources[3]], partial=True).rows) == 4


def test_parts_of_two_sweeps_do_not_stand_in_for_each_other(tmp_path):
    first = parts(tmp_path / "first", [row(0)], [row(1)])
    second = parts(tmp_path / "second", [row(2)], [row(3)])
    assert len(merge(tmp_path / "out", first + second).rows) == 4
    assert_merge_refused(MisuseError, "part-0001-of-0002 is missing", tmp_path / "none", [first[0], *second])
    third = parts(tmp_path / "third", [row(4)], [row(5)], [row(6)])
    assert_merge_refused(MisuseError, "part-0002-of-0003 is missing", tmp_path / "none", [*first, *third[:2]])


def test_a_part_that_is_none(tmp_path):
    assert_merge_refused(MisuseError, "no part 2 of 2", tmp_path / "out", [part(tmp_path / "part-0002-of-0002", ROWS)])
    (tmp_path / "parts" / "part-0000-of-0002").mkdir(parents=True)
    part(tmp_path / "parts" / "part-0001-of-0002", ROWS)
    assert_merge_refused(
        MisuseError, f"part-0000-of-0002 holds no {MEASUREMENTS} yet", tmp_path / "out", [tmp_path / "parts"]
    )
    assert merge(tmp_path / "out", [tmp_path / "parts"], partial=True).rows == ROWS
    assert merge(tmp_path / "again", list((tmp_path / "parts").iterdir()), partial=True).rows == ROWS


def test_a_sweep_that_was_stopped_is_unfinished(tmp_path):
    stopped = part(tmp_path / "stopped", ROWS[:5], finished=False)
    assert_merge_refused(
        MisuseError, f"{stopped} is unfinished, its sweep wrote no table.json", tmp_path / "out", [stopped]
    )
    assert_merge_refused(MisuseError, "is unfinished", tmp_path / "out", [stopped / MEASUREMENTS])
    Table.from_entries(HERE, condense(ROWS[:3])).save(stopped / "table.json")  # it ended once, and went on to more
    assert_merge_refused(MisuseError, "is unfinished, its table.json is of other rows", tmp_path / "out", [stopped])
    assert merge(tmp_path / "out", [stopped], partial=True).rows == ROWS[:5]


def test_a_part_that_is_being_written_waits(tmp_path):
    sources = parts(tmp_path, ROWS[:6], ROWS[6:])
    with Store(sources[1], HERE, resume=True):
        for options in ({}, {"partial": True}):
            assert_merge_refused(MisuseError, f"still writing {sources[1]}", tmp_path / "out", sources, **options)
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


def test_sources_that_are_none(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bad.jsonl").write_text(f"{row(0).to_line()}\n{{}}\n")
    damaged = part(tmp_path / "damaged", ROWS)
    (damaged / "table.json").write_text("{")
    for name, kind, message in [
        ("none", MalformedFileError, "none: cannot be read: No such file"),
        ("loop", MalformedFileError, "cannot be read: Too many levels of symbolic links"),
        ("empty", MisuseError, f"holds neither {MEASUREMENTS} nor folders called like part-0000-of-0002"),
        ("pipe", MalformedFileError, "pipe: expected a file"),
        ("bad.jsonl", MalformedFileError, "bad.jsonl:2: expected"),
        ("damaged", MalformedFileError, "table.json:1: expected JSON"),
    ]:
        for partial in (False, True):
            with pytest.raises(kind, match=message):
                merge(tmp_path / "out", [tmp_path / name], partial=partial)
            assert not (tmp_path / "out").exists()


def test_results_beside_parts_are_ambiguous(tmp_path):
    parts(tmp_path / "both", ROWS)
    part(tmp_path / "both", ROWS)
    assert_merge_refused(
        MisuseError, "results of its own beside those of part-0000-of-0001", tmp_path / "out", [tmp_path / "both"]
    )
    assert merge(tmp_path / "out", [tmp_path / "both" / MEASUREMENTS]).rows == ROWS


def test_places_that_are_none(tmp_path, monkeypatch):
    folder = part(tmp_path / "part", ROWS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert_merge_refused(MisuseError, "not empty", folder, [folder])
    assert_merge_refused(MisuseError, "no folder", folder / MEASUREMENTS, [folder])
    assert_merge_refused(MisuseError, "no folder", tmp_path / "loop", [folder])
    with pytest.raises(OutputError, match="cannot be written: Not a directory"):
        merge(folder / MEASUREMENTS / "out", [folder])
    monkeypatch.chdir(tmp_path / "empty")
    assert_merge_refused(MisuseError, "the folder you are in", tmp_path / "empty", [folder])
    monkeypatch.chdir(tmp_path)
    assert merge(tmp_path / "empty", [folder]).rows == ROWS


STEERS = "\x1b[31mLinux"  # what would colour a terminal


@pytest.fixture
def run(tmp_path):
    """A folder as the two ranks of a sweep leave it, the second on another node."""
    nodes = {"Linux": range(3), STEERS: (3, 2)}
    parts(tmp_path / "run", *(
        [row(number, status="refused", environment=replace(HERE, platform=platform)) for number in numbers]
        for platform, numbers in nodes.items()
    ))  # fmt: skip
    return tmp_path / "run"


def test_json_lists_what_was_joined(run, tmp_path, own_cache):
    done = expect("merge", tmp_path / "out", run, "--format", "json")
    rows = list(read_measurements(tmp_path / "out" / MEASUREMENTS))
    assert [each.case for each in rows] == ["case 0", "case 1", "case 2", "case 3"]
    document = json.loads(done.stdout)
    assert document["folder"] == str(tmp_path / "out")
    assert (document["rows"], document["repeated"], document["gaps"]) == (4, 1, [])
    assert document["parts"] == [
        {"part": str(run / "part-0000-of-0002"), "rows": 3, "measured": 0, "gap": None},
        {"part": str(run / "part-0001-of-0002"), "rows": 2, "measured": 0, "gap": None},
    ]
    assert document["notes"] == [f"{run / 'part-0001-of-0002'}: platform was Linux, is  [31mLinux"]
    assert f"0 of 4 rows measured, all in {tmp_path / 'out'}" in done.stderr
    assert list(own_cache.rglob("*.json")) == []  # nobody's own table has changed


@pytest.mark.parametrize("format", ["table", "markdown"])
def test_a_person_reads_parts_and_notes_and_no_file_steers_the_terminal(run, tmp_path, format):
    output = expect("merge", tmp_path / "out", *sorted(run.iterdir()), "--format", format).stdout
    assert str(run / "part-0001-of-0002") in output
    assert "with the same content: 1" in output
    assert "platform was Linux, is  [31mLinux" in output
    assert "\x1b" not in output


def test_a_missing_part_is_refused_or_named(run, tmp_path):
    one = run / "part-0001-of-0002"
    fails_in_one_line(attnbench("merge", tmp_path / "out", one), 2, "part-0000-of-0002 is missing")
    done = expect("merge", tmp_path / "out", one, "--partial")
    assert "part-0000-of-0002 is missing" in done.stdout
    assert f"incomplete; `attnbench sweep --resume --out {tmp_path / 'out'}`" in done.stderr


def test_a_partial_result_is_completed_by_a_sweep(tmp_path, monkeypatch, local_workers):
    """The part of a rank that was lost is measured again by one process."""
    monkeypatch.setattr(Timer, "for_device", in_haste)
    shapes = "- {{batch: 1, heads: 1, seqlen_q: {}, head_dim: 64}}\n"
    (tmp_path / "part.yaml").write_text(shapes.format(64))
    (tmp_path / "all.yaml").write_text(shapes.format("[64, 96]"))
    sweep = ("sweep", "--device", "cpu", "--backends", "sdpa-math", "--format", "json")
    part = tmp_path / "part-0000-of-0002"
    expect(*sweep, "--preset", tmp_path / "part.yaml", "--out", part)
    expect("merge", tmp_path / "out", part, "--partial")
    done = expect(*sweep, "--preset", tmp_path / "all.yaml", "--out", tmp_path / "out", "--resume")
    rows = list(read_measurements(tmp_path / "out" / MEASUREMENTS))
    before = list(read_measurements(part / MEASUREMENTS))
    assert len(rows) == len(json.loads(done.stdout)) == 2 * len(before)
    assert rows[: len(before)] == before
    expect("merge", tmp_path / "whole", tmp_path / "out")
