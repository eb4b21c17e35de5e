"""No row is lost, none is half there, and two sweeps never write one folder."""

import gzip
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from patience import PATIENCE
from places import SUPPORT
from planted import setup

from attnbench.errors import MalformedFileError, MisuseError, OutputError
from attnbench.harness.cases.case import Case
from attnbench.harness.results.records import read_measurements
from attnbench.harness.results.store import MEASUREMENTS, Store
from attnbench.harness.sweep.rows import unmeasured_row
from attnbench.harness.sweep.run import run_sweep, tasks_of
from attnbench.kernels.plan import Plan
from attnbench.problem.spec import AttentionSpec
from examples import examples

LAB = setup()
HERE = LAB.environment
SPEC = AttentionSpec.make(batch=1, heads=2, seqlen_q=8, head_dim=16)

SWEEP = "import sys; from pathlib import Path; from test_store import sweep; sweep(Path(sys.argv[1]), 'planted:slow')"


def sweep(folder: Path, source: str = "planted:healthy") -> None:
    """A sweep into the folder, in this process or in one that is killed."""
    lab = setup(source)
    cases = [Case(f"case {n}", AttentionSpec.make(batch=1, heads=1, seqlen_q=8 + n, head_dim=8)) for n in range(3)]
    with Store(folder, lab.environment, resume=True) as store:
        for _ in run_sweep(tasks_of(cases, lab.registry, lab.device, "fp8", ["wide", "picky"]), [lab], store):
            pass


def row(number: int):
    return unmeasured_row(Case(f"case {number}", SPEC), Plan("absent:fp8"), "unavailable", ["it is not there"], LAB)


def test_compressed_results_are_kept_and_nothing_is_added(tmp_path):
    with Store(tmp_path, HERE) as store:
        store.append(row(1))
    packed = tmp_path / f"{MEASUREMENTS}.gz"
    packed.write_bytes(gzip.compress((tmp_path / MEASUREMENTS).read_bytes()))
    (tmp_path / MEASUREMENTS).unlink()
    for resume in (True, False):
        with pytest.raises(MisuseError, match="compressed"):
            Store(tmp_path, HERE, resume=resume)
    assert list(tmp_path.glob("*.jsonl")) == []


def test_a_torn_last_line_is_cut_off_and_reported(tmp_path):
    with Store(tmp_path, HERE) as store:
        store.append(row(0))
    whole = (tmp_path / MEASUREMENTS).read_bytes()
    torn = row(1).to_line().encode()[:20]
    (tmp_path / MEASUREMENTS).write_bytes(whole + torn)
    with Store(tmp_path, HERE, resume=True) as store:
        assert [each.case for each in store.rows] == ["case 0"]
        assert str(len(torn)) in store.notes[0]
        store.append(row(1))
    assert len(list(read_measurements(tmp_path / MEASUREMENTS))) == 2


@pytest.mark.parametrize("make", [lambda line: "garbage\n", lambda line: line + line])
def test_a_folder_with_anything_else_is_left_alone(tmp_path, make):
    content = row(0).to_line() + "\n" + make(row(1).to_line() + "\n")
    (tmp_path / MEASUREMENTS).write_text(content)
    with pytest.raises(MalformedFileError) as caught:
        Store(tmp_path, HERE, resume=True)
    assert caught.value.line in (2, 3)
    assert (tmp_path / MEASUREMENTS).read_text() == content


def test_another_environment_is_refused_and_a_softly_different_one_is_reported(tmp_path):
    with Store(tmp_path, HERE) as store:
        store.append(row(0))
    with pytest.raises(MisuseError, match=r"torch was .*, is 1\.0.*--out"):
        Store(tmp_path, replace(HERE, torch="1.0"), resume=True)
    with Store(tmp_path, replace(HERE, python="3.99"), resume=True) as store:
        assert store.notes == [f"python was {HERE.python}, is 3.99"]


def test_a_place_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        Store(tmp_path / "file" / "results", HERE)
    (tmp_path / MEASUREMENTS).mkdir()
    with pytest.raises(OutputError, match="cannot be written"):
        Store(tmp_path, HERE, resume=True)


@contextmanager
def longest_file(size: int) -> Iterator[None]:
    """As on a disk that is full: no file of this process can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_already_is_reported_before_anything_is_measured(tmp_path):
    with longest_file(10_000), pytest.raises(OutputError, match="File too large; name a folder on another disk"):
        Store(tmp_path, HERE)
    with Store(tmp_path, HERE) as store:
        store.append(row(0))
    assert {each.name: each.stat().st_size > 0 for each in tmp_path.iterdir()} == {".lock": False, MEASUREMENTS: True}


def test_a_full_disk_loses_nothing_and_leaves_nothing_half_written(tmp_path):
    with Store(tmp_path, HERE) as store:
        store.append(row(0))
        size = store.path.stat().st_size
        with longest_file(size + 500), pytest.raises(OutputError, match="1 rows before are safe"):
            store.append(row(1))
        assert store.path.stat().st_size == size
        store.append(row(1))
    assert [each.case for each in read_measurements(tmp_path / MEASUREMENTS)] == ["case 0", "case 1"]


def _rows(folder: Path) -> list[tuple[str, str, str]]:
    return sorted((row.case, str(row.plan), row.status) for row in read_measurements(folder / MEASUREMENTS))


def _lines(folder: Path) -> int:
    path = folder / MEASUREMENTS
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.exhaustive
def test_a_sweep_killed_at_random_moments_has_the_rows_of_an_undisturbed_one(tmp_path, local_workers):
    sweep(tmp_path / "whole")
    expected = _rows(tmp_path / "whole")
    assert len(set(expected)) == len(expected) > 5

    moments, folder, left = random.Random(3), tmp_path / "killed", []
    path = os.pathsep.join([SUPPORT, str(Path(__file__).parent)])
    for kill in range(examples(1, 20)):
        process = subprocess.Popen([sys.executable, "-c", SWEEP, str(folder)], env={**os.environ, "PYTHONPATH": path})
        deadline = time.perf_counter() + PATIENCE
        there = _lines(folder)
        enough = there + moments.randint(1, max(1, (len(expected) - there) // 2)) * (there < len(expected))
        while _lines(folder) < enough:
            assert process.poll() is None
            assert time.perf_counter() < deadline
        time.sleep(moments.uniform(0.0, 0.1))
        process.kill()
        process.wait()
        left.append(_lines(folder))
        if kill % 2 == 0 and (folder / MEASUREMENTS).exists():
            with (folder / MEASUREMENTS).open("ab") as file:
                file.write(b'{"schema":"attnbench.mea')  # the worst that a kill inside a write can leave
    assert any(0 < lines < len(expected) for lines in left)
    sweep(folder)
    assert _rows(folder) == expected
