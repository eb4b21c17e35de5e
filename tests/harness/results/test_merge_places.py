"""Where a merge reads and where it writes: what is no result or no place, and a folder that is whole or not there."""

import os

import pytest
from merged import ROWS, part, parts, refused, row

from attnbench.errors import MalformedFileError, MisuseError, OutputError
from attnbench.harness.results.merge import merge
from attnbench.harness.results.store import MEASUREMENTS


def test_sources_that_are_none(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd" / MEASUREMENTS).mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bad.jsonl").write_text(row(0).to_line() + "\n{}\n" + row(1).to_line() + "\n")
    with (tmp_path / "huge.jsonl").open("wb") as huge:
        huge.truncate(2**28 + 1)
    (tmp_path / "long.jsonl").write_text("x" * (2**21 + 1))
    damaged = part(tmp_path / "damaged", ROWS)
    (damaged / "table.json").write_text("{")
    for name, kind, said in [
        ("none", MalformedFileError, "none: cannot be read: No such file"),
        ("loop", MalformedFileError, "cannot be read: Too many levels of symbolic links"),
        ("empty", MisuseError, f"holds neither {MEASUREMENTS} nor folders called like part-0000-of-0002"),
        ("odd", MalformedFileError, f"odd/{MEASUREMENTS}: expected a file"),
        ("pipe", MalformedFileError, "pipe: expected a file"),
        ("bad.jsonl", MalformedFileError, "bad.jsonl:2: expected"),
        ("huge.jsonl", MalformedFileError, "at most 268435456 bytes"),
        ("long.jsonl", MalformedFileError, "long.jsonl:1: expected"),
        ("damaged", MalformedFileError, "table.json:1: expected JSON"),
    ]:
        for partial in (False, True):
            with pytest.raises(kind, match=said):
                merge(tmp_path / "out", [tmp_path / name], partial=partial)
            assert not (tmp_path / "out").exists()


def test_results_beside_parts_are_ambiguous(tmp_path):
    parts(tmp_path / "both", ROWS)
    part(tmp_path / "both", ROWS)
    refused(MisuseError, "results of its own beside those of part-0000-of-0001", tmp_path / "out", [tmp_path / "both"])
    assert merge(tmp_path / "out", [tmp_path / "both" / MEASUREMENTS]).rows == ROWS


def test_places_that_are_none(tmp_path, monkeypatch):
    folder = part(tmp_path / "part", ROWS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(MisuseError, "not empty", folder, [folder])
    refused(MisuseError, "no folder", folder / MEASUREMENTS, [folder])
    refused(MisuseError, "no folder", tmp_path / "loop", [folder])
    with pytest.raises(OutputError, match="cannot be written: Not a directory"):
        merge(folder / MEASUREMENTS / "out", [folder])
    monkeypatch.chdir(tmp_path / "empty")
    refused(MisuseError, "the folder you are in", tmp_path / "empty", [folder])
    monkeypatch.chdir(tmp_path)
    assert merge(tmp_path / "empty", [folder]).rows == ROWS
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert merge(tmp_path / "link", [folder]).rows == ROWS
    assert (tmp_path / "elsewhere" / MEASUREMENTS).exists()
