"""No row is lost, none is half there, and two sweeps never write one folder."""

import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planted import healthy

from attnbench.environment import Environment
from attnbench.errors import MalformedFileError, MisuseError, OutputError
from attnbench.harness.cases import Case
from attnbench.harness.measure import Laboratory, passed_over
from attnbench.harness.records import read_measurements
from attnbench.harness.store import MEASUREMENTS, Store
from attnbench.harness.timing import Timer
from attnbench.plan import Plan
from attnbench.spec import AttentionSpec

CPU = torch.device("cpu")
REGISTRY = healthy()
HERE = Environment.detect(CPU, REGISTRY)
LAB = Laboratory(CPU, REGISTRY, HERE, Timer.for_device(CPU))
SPEC = AttentionSpec.make(batch=1, heads=2, seqlen_q=8, head_dim=16)
SUPPORT = Path(__file__).parents[1] / "support"

SWEEP = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import torch
from pathlib import Path
from planted import healthy
from attnbench.environment import Environment
from attnbench.harness.cases import Case
from attnbench.harness.measure import Laboratory
from attnbench.harness.store import Store
from attnbench.harness.sweep import run_sweep, tasks_of
from attnbench.harness.timing import Timer
from attnbench.spec import AttentionSpec

device, registry = torch.device("cpu"), healthy(delay=0.01)
environment = Environment.detect(device, registry)
laboratory = Laboratory(device, registry, environment, Timer(device, 0.0, 0.0, 1.0, least=2))
cases = [Case(f"case {{n}}", AttentionSpec.make(batch=1, heads=1, seqlen_q=8 + n, head_dim=8)) for n in range(12)]
with Store(Path(sys.argv[1]), environment, resume=True) as store:
    for event in run_sweep(tasks_of(cases, registry, device, "fp8"), laboratory, store):
        print("event", flush=True)
"""


def row(number: int):
    return passed_over(Case(f"case {number}", SPEC), Plan("absent:fp8"), "unavailable", ["it is not there"], LAB)


def test_rows_come_back_in_order(tmp_path):
    with Store(tmp_path / "new" / "folder", HERE) as store:
        for number in range(3):
            store.append(row(number))
    with Store(tmp_path / "new" / "folder", HERE, resume=True) as store:
        assert [each.case for each in store.rows] == ["case 0", "case 1", "case 2"]
        assert set(store.done) == {(f"case {number}", Plan("absent:fp8")) for number in range(3)}
        assert store.notes == []


def test_results_are_not_written_over(tmp_path):
    with Store(tmp_path, HERE) as store:
        store.append(row(0))
    before = (tmp_path / MEASUREMENTS).read_bytes()
    with pytest.raises(MisuseError, match="--resume"):
        Store(tmp_path, HERE)
    assert (tmp_path / MEASUREMENTS).read_bytes() == before


def test_a_folder_without_results_is_as_good_as_a_new_one(tmp_path):
    with Store(tmp_path, HERE, resume=True) as store:
        assert store.rows == []
    with Store(tmp_path, HERE) as store:
        store.append(row(0))


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_torn_last_line_is_cut_off_and_said(tmp_path, kept):
    with Store(tmp_path, HERE) as store:
        store.append(row(0))
    whole = (tmp_path / MEASUREMENTS).read_bytes()
    torn = row(1).to_line().encode()[:kept]
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


def test_another_environment_is_refused_and_a_softly_different_one_is_said(tmp_path):
    with Store(tmp_path, HERE) as store:
        store.append(row(0))
    with pytest.raises(MisuseError, match=r"torch was .*, is 1\.0.*--out"):
        Store(tmp_path, replace(HERE, torch="1.0"), resume=True)
    with Store(tmp_path, replace(HERE, python="3.99"), resume=True) as store:
        assert store.notes == [f"python was {HERE.python}, is 3.99"]


def test_two_sweeps_cannot_write_one_folder(tmp_path):
    with Store(tmp_path, HERE), pytest.raises(MisuseError, match="another sweep"):
        Store(tmp_path, HERE, resume=True)
    with Store(tmp_path, HERE, resume=True):
        pass


def test_a_place_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        Store(tmp_path / "file" / "results", HERE)
    (tmp_path / MEASUREMENTS).mkdir()
    with pytest.raises(OutputError, match="cannot be written"):
        Store(tmp_path, HERE, resume=True)


@pytest.mark.parametrize("room", [0, 1, 500])
def test_a_full_disk_loses_nothing_and_leaves_nothing_half_written(tmp_path, room):
    with Store(tmp_path, HERE) as store:
        store.append(row(0))
        size = store.path.stat().st_size
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, before[1]))
        try:
            with pytest.raises(OutputError, match="1 rows before are safe"):
                store.append(row(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert store.path.stat().st_size == size
        store.append(row(1))
    assert [each.case for each in read_measurements(tmp_path / MEASUREMENTS)] == ["case 0", "case 1"]


def test_a_sweep_killed_at_any_moment_goes_on_without_loss_or_repeat(tmp_path):
    for events in (1, 9, 30):
        process = subprocess.Popen([sys.executable, "-c", SWEEP, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(events):
            assert process.stdout.readline() == b"event\n"
        time.sleep(0.002 * events)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        with (tmp_path / MEASUREMENTS).open("ab") as file:
            file.write(b'{"schema":"attnbench.mea')  # the worst that a kill inside a write can leave
    subprocess.run([sys.executable, "-c", SWEEP, str(tmp_path)], check=True, stdout=subprocess.DEVNULL)
    rows = [(each.case, str(each.plan)) for each in read_measurements(tmp_path / MEASUREMENTS)]
    expected = [(f"case {number}", str(plan)) for number in range(12) for plan in REGISTRY.plans(SPEC)]
    assert rows == expected
