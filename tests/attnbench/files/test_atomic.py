"""Atomic replacement of files: complete or not at all after any failure; all user files are written by it."""

import multiprocessing
import os
import re
import resource
import signal
import stat
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from command_line import attnbench
from fakes import an_environment
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT
from small_training import run_of
from sweep_parts import ROWS, part

from attnbench import AttentionSpec
from attnbench.errors import OutputError
from attnbench.files.atomic import Draft, clear_drafts, replace_file
from attnbench.freezing.file import Frozen
from attnbench.guarding.breach import Breach
from attnbench.guarding.breach_file import save_tensors
from attnbench.harness.capture.recorder import capture
from attnbench.harness.report.training import write_training_report
from attnbench.harness.training.rows import write_runs
from attnbench.kernels.plan import Plan
from attnbench.tables.table import Table

SPEC = AttentionSpec.make(batch=1, heads=2, seqlen_q=64, head_dim=32, dtype="fp32")
BREACH = Breach(Plan("reference:fp32"), SPEC, "cpu", "out", 0.5, 0.1, 1e9, 0, 1)


@contextmanager
def limit_file_size(size: int):
    """Simulates a disk that is full after this many bytes in one file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=3), st.none() | st.binary(max_size=50))
def test_a_written_file_has_the_content_and_leaves_no_other_file(tmp_path_factory, pieces, old):
    path = tmp_path_factory.mktemp("draft") / "file.txt"
    if old is not None:
        path.write_bytes(old)
    with Draft(path) as draft:
        for piece in pieces:
            draft.write(piece)
        assert (path.read_bytes() if path.exists() else None) == old
    assert path.read_bytes() == b"".join(pieces)
    assert os.listdir(path.parent) == ["file.txt"]


def test_an_exception_in_the_block_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    draft = Draft(path)
    draft.write(b"new")
    with pytest.raises(KeyboardInterrupt), draft:
        raise KeyboardInterrupt
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["file"])


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "stopped"]
)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_system_call_keeps_the_old_file(tmp_path, monkeypatch, call, error):
    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, call, Mock(side_effect=error))
    with pytest.raises(OutputError if isinstance(error, OSError) else KeyboardInterrupt):
        replace_file(tmp_path / "file", b"new")
    assert ((tmp_path / "file").read_text(), os.listdir(tmp_path)) == ("old", ["file"])


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_permissions_follow_the_old_file_or_the_umask(tmp_path, mask):
    (tmp_path / "old").write_text("")
    (tmp_path / "old").chmod(0o640)
    before = os.umask(mask)
    try:
        for name in ("old", "new"):
            replace_file(tmp_path / name, b"x")
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("old", "new")}
    assert modes == {"old": 0o640, "new": 0o666 & ~mask}


def test_links_are_followed_and_kept(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "folder" / "file").write_text("old")
    (tmp_path / "link").symlink_to("folder/file")
    (tmp_path / "link to a link").symlink_to(tmp_path / "link")
    (tmp_path / "dangling").symlink_to("other/new")
    for name in ("link to a link", "dangling"):
        replace_file(tmp_path / name, name.encode())
        assert (tmp_path / name).is_symlink()
    assert (tmp_path / "folder" / "file").read_text() == "link to a link"
    assert (tmp_path / "other" / "new").read_text() == "dangling"
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OutputError, match="round cannot be written"):
        replace_file(tmp_path / "round", b"")


def test_pipes_and_devices_are_written_in_place(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    replace_file(tmp_path / "pipe", b"through the pipe")
    assert os.read(reader, 100) == b"through the pipe"
    os.close(reader)
    replace_file(Path("/dev/null"), b"gone")
    with pytest.raises(OutputError, match="/dev/full cannot be written: No space left"):
        replace_file(Path("/dev/full"), b"x")
    with pytest.raises(OutputError, match="expected a file"), Draft(Path("/dev/null")).by_name():
        pytest.fail("a library that writes by name would replace the device")


def test_a_write_error_names_the_path_and_the_reason(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path, reason in (("none/x", "No such file"), ("file/x", "Not a directory"), (".", "Is a directory")):
        with pytest.raises(OutputError, match=f"{tmp_path / path} cannot be written: {reason}"):
            Draft(tmp_path / path)
    monkeypatch.setattr(os, "access", lambda *_: False)  # to root everything is permitted
    with pytest.raises(OutputError, match="file cannot be written: Permission denied"):
        Draft(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]


def _hanging(path: Path, at: str, reached) -> None:
    def hang(*_):
        reached.set()
        time.sleep(600)

    setattr(os, at, hang)
    replace_file(path, b"new")


@pytest.mark.parametrize("at", ["write", "fsync", "replace"])
def test_a_killed_process_leaves_the_old_file_and_a_removable_draft(tmp_path, at):
    path = tmp_path / "file"
    path.write_text("old")
    context = multiprocessing.get_context("fork")
    reached = context.Event()
    writer = context.Process(target=_hanging, args=(path, at, reached))
    writer.start()
    assert reached.wait(60)
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(60)
    assert path.read_text() == "old"
    assert len(os.listdir(tmp_path)) == 2
    clear_drafts(path)
    assert os.listdir(tmp_path) == ["file"]


def _record(path: Path) -> None:
    q = torch.randn(1, 2, 64, 32)
    with capture(path):
        torch.nn.functional.scaled_dot_product_attention(q, q, q)


WRITERS = {
    "table.json": lambda path: Table.from_entries(an_environment(), []).save(path),
    "run.choices.json": lambda path: Frozen({"cpu": "x" * 200}).save(path),
    "training.jsonl": lambda path: write_runs(path, [run_of([1.0])]),
    "training.html": lambda path: write_training_report([run_of([3, 2, 1])], path.parent),
    "acts.safetensors": _record,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_writer_keeps_the_old_file_on_a_full_disk(tmp_path, name):
    path = tmp_path / name
    with limit_file_size(100), pytest.raises(OutputError, match="cannot be written"):
        WRITERS[name](path)
    assert os.listdir(tmp_path) == []
    WRITERS[name](path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert path.name in before
    with limit_file_size(100), pytest.raises(OutputError, match="cannot be written"):
        WRITERS[name](path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_tensors_saved_for_a_breach_are_complete_or_absent(tmp_path):
    tensors = {name: torch.zeros(1, 2, 64, 32) for name in "qkv"}
    with limit_file_size(100), pytest.raises(OutputError, match="cannot be written"):
        save_tensors(tmp_path, BREACH, tensors)
    assert os.listdir(tmp_path) == []
    assert [save_tensors(tmp_path, BREACH, tensors).name] == os.listdir(tmp_path)


# Whole folders are moved at once by merge and checkpoint; a store only appends.
OWN = {
    "attnbench/files/atomic.py", "attnbench/guarding/breach_file.py", "harness/capture/file.py",
    "harness/results/merge.py", "harness/training/run/checkpoint.py", "harness/results/store.py",
    "attnbench/cli/streams.py",
}  # fmt: skip
WRITES = re.compile(
    r"\b(write_text|write_bytes|save_file|mkstemp|NamedTemporaryFile)\(|\bos\.(replace|rename)\(|\.(replace|rename)\([\w.]+\)"
    r"|open\([^()]*\bmode\b|open\([^()]*\"[rbt]*[wax+]+[rbt+]*\"|savefig\((?!.*format=)"
)


def test_only_the_listed_modules_write_files():
    sources = (path for folder in ("attnbench", "harness", "backends") for path in (ROOT / folder).rglob("*.py"))
    assert {str(path.relative_to(ROOT)) for path in sources if WRITES.search(path.read_text(encoding="utf-8"))} == OWN


def test_a_report_on_a_full_disk_keeps_the_old_page(tmp_path):
    results, page = part(tmp_path / "results", ROWS), tmp_path / "page.html"
    page.write_text("the page of yesterday")
    with limit_file_size(2000):
        run = attnbench("report", results, "-o", page)
    assert (run.returncode, run.stderr) == (1, f"attnbench: {page} cannot be written: File too large\n")
    assert page.read_text() == "the page of yesterday"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["page.html", "results"]
