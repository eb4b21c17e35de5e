"""``attnbench submit``: one file from valid results; all reasons and no file from invalid ones."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import attnbench, fails, fails_in_one_line
from compared import written
from places import ROOT
from report_rows import failed_row
from row_facts import with_facts
from submission_rows import H200, SPECS, valid_rows, with_visits

from attnbench.tables.table import Table

ROWS = valid_rows()
H900 = replace(H200, device_name="NVIDIA H900")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a command, empty."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_valid_results_produce_a_file_named_after_the_device(here: Path, tmp_path: Path) -> None:
    run = attnbench("submit", written(tmp_path / "mine", ROWS))
    assert (run.returncode, run.stderr) == (0, "")
    assert [path.name for path in here.iterdir()] == ["nvidia-h200.json"]
    assert "36 plans at 12 shapes of NVIDIA H200; every check passed" in run.stdout
    # attnbench has a table of this GPU, so this one is offered as another's.
    assert "as results/nvidia-h200/submitted/0123456789ab.json and its rows below results/nvidia-h200/" in run.stdout
    checked = attnbench("submit", here / "nvidia-h200.json")
    assert checked.returncode == 0, checked.stderr
    assert "36 plans at 12 shapes" in checked.stdout


def test_rows_without_two_consistent_visits_are_excluded_and_counted(here: Path, tmp_path: Path) -> None:
    rows = [with_visits(row, row.median_ms(), 3 * row.median_ms()) for row in ROWS[:4]] + ROWS[4:]
    run = attnbench("submit", written(tmp_path / "mine", rows))
    assert run.returncode == 0, run.stderr
    assert "4 of 36 rows are left out" in run.stdout
    assert len(Table.load(here / "nvidia-h200.json").entries) == 32


def test_all_reasons_are_listed_and_the_old_file_is_kept(here: Path, tmp_path: Path) -> None:
    (here / "nvidia-h200.json").write_text("mine")
    rows = [with_facts(ROWS[0], error={"normal": {"out": 0.3}}), *ROWS[1:5]]
    rows.append(failed_row("fa3:fp8", "crashed", "in /home/alice/\x1b[2Jx.py", SPECS[0], environment=H200))
    broken = written(tmp_path / "broken", ROWS[5:7])
    text = (broken / "measurements.jsonl").read_text()
    (broken / "measurements.jsonl").write_text(re.sub(r'"out":[\d.e-]+', '"out":NaN', text, count=1))
    run = attnbench("submit", written(tmp_path / "mine", rows), broken)
    fails(run, 1, "attnbench: not to be shared, for 4 reasons:")
    found = [line for line in run.stderr.splitlines() if line.startswith("- ")]
    assert len(found) == 4
    for message in ("measurements.jsonl:1", "beyond 0.01", "'/home/alice'", "2 shapes with"):
        assert sum(message in reason for reason in found) == 1, message
    assert "\x1b" not in run.stderr
    assert {path.name: path.read_text() for path in here.iterdir()} == {"nvidia-h200.json": "mine"}


def test_a_gpu_needs_a_known_peak_and_its_first_table_is_proposed_as_the_shipped_one(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnbench.harness.results.peaks import PEAK_TFLOPS

    mine = written(tmp_path / "mine", [with_facts(row, environment=H900) for row in ROWS])
    fails(attnbench("submit", mine), 1, "the peak of NVIDIA H900 is not known", "harness/results/peaks.py")
    assert list(here.iterdir()) == []
    monkeypatch.setitem(PEAK_TFLOPS, "NVIDIA H900", PEAK_TFLOPS["NVIDIA H200"])
    run = attnbench("submit", mine)
    assert "with this file as attnbench/tables/nvidia-h900.json and its rows below results/nvidia-h900/" in run.stdout


def test_conformance_reports_are_checked_against_the_table(here: Path, tmp_path: Path) -> None:
    mine, reports = written(tmp_path / "mine", ROWS), tmp_path / "reports"
    reports.mkdir()
    fails(attnbench("submit", mine, "--conformance", reports), 1, "holds no report")
    committed = (ROOT / "results/nvidia-h200/conformance/fa3.md").read_text()
    (reports / "fa3.md").write_text(committed)
    run = attnbench("submit", mine, "--conformance", reports)
    assert "no conformance report has checked sdpa-flash:bf16, triton:fp8" in run.stdout, run.stderr
    (reports / "fa3.md").write_text(committed.replace("| out | passed |", "| out | **failed** |"))
    (reports / "notes.md").write_text("# Notes\n")
    run = attnbench("submit", mine, "--conformance", reports, "-o", here / "no.json")
    fails(run, 1, "fa3:bf16 failed out", "notes.md: expected a report")
    assert not (here / "no.json").exists()


def test_a_hand_edited_table_is_detected(here: Path, tmp_path: Path) -> None:
    assert attnbench("submit", written(tmp_path / "mine", ROWS)).returncode == 0
    path = here / "nvidia-h200.json"
    text = path.read_text()
    for old, new, message in (
        ('"errors": {', '"errors":  {', "is not as `attnbench submit` writes it"),
        ('"time_ms": 0.5', '"time_ms": 0.0005', "above the device's peak"),
        ('"triton:fp8": {"time_ms"', '"acme:fp8": {"time_ms"', "no backend is named 'acme'"),
        ('"platform": "', '"platform": "/home/alice ', "platform holds '/home/alice'"),
        ('"normal": 0.0', '"normal": NaN, "x": 0.0', "NaN is no number"),
        ("]}", "", "expected JSON"),
    ):
        assert old in text
        path.write_text(text.replace(old, new))
        fails(attnbench("submit", path), 1, message)


def test_misuse_and_unwritable_paths_are_reported(here: Path, tmp_path: Path) -> None:
    mine = written(tmp_path / "mine", ROWS)
    (here / "file").touch()
    fails_in_one_line(attnbench("submit", mine, "-o", here / "file" / "x.json"), 1, "cannot be written")
    fails(attnbench("submit", written(tmp_path / "none", [])), 1, "there is no measurement")
    empty = tmp_path / "empty"
    empty.mkdir()
    fails(attnbench("submit", mine, empty), 1, "empty/measurements.jsonl")
    table = ROOT / "attnbench" / "tables" / "nvidia-h200.json"
    fails_in_one_line(attnbench("submit", table, mine), 2, "either one table")
    fails_in_one_line(attnbench("submit", table, "-o", here / "x.json"), 2, "either one table")
    assert [path.name for path in here.iterdir()] == ["file"]
