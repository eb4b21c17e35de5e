"""``attnbench merge`` as a person meets it: what it prints and what it leaves."""

import json
from dataclasses import replace

import pytest
from command_line import attnbench, expect, fails_in_one_line
from planted import in_haste
from sweep_parts import HERE, parts, row

from attnbench.harness.measure.timing import Timer
from attnbench.harness.results.records import read_measurements
from attnbench.harness.results.store import MEASUREMENTS

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
