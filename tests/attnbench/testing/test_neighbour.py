"""The neighbour process on a device: it runs during the block, ends with its parent, or a reason is given."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conforming import Backward, Forward
from scripted_workers import wait_until

from attnbench import AttentionSpec, Mask, Plan
from attnbench.backends.reference import BACKEND as REFERENCE
from attnbench.kernels.contract import Availability, Backend, Operands, Result
from attnbench.kernels.registry import Registry
from attnbench.testing.conformance import conduct
from attnbench.testing.conformance.subject import Subject
from attnbench.testing.neighbour import neighbour

CPU = torch.device("cpu")
SPEC = AttentionSpec.make(batch=1, heads=2, seqlen_q=9, head_dim=8, dtype="fp32", mask=Mask(right=0))
# Prints the number of its neighbour and waits.
ASKING = """
import os, sys, time, torch
from attnbench.testing.neighbour import neighbour
before = set(os.listdir("/proc"))
with neighbour(torch.device("cpu")):
    for each in set(os.listdir("/proc")) - before:
        try:
            if each.isdigit() and int(open(f"/proc/{each}/stat").read().rpartition(")")[2].split()[1]) == os.getpid():
                print(each, flush=True)
        except OSError:
            pass
    time.sleep(600)
"""
linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc for processes")


def fields_of(process: int | str) -> list[str] | None:
    """The fields of /proc/[pid]/stat after the name: state, parent, ...; None if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields


def seconds_of(process: int) -> float:
    """The processor time of a process."""
    fields = fields_of(process)
    assert fields is not None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children() -> set[int]:
    processes = {int(each): fields_of(each) for each in os.listdir("/proc") if each.isdigit()}
    return {each for each, fields in processes.items() if fields is not None and int(fields[1]) == os.getpid()}


@pytest.mark.exhaustive
@linux
def test_the_neighbour_works_until_the_end_and_imports_nothing_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('another torch')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    before = children()
    with neighbour(CPU):
        (process,) = children() - before
        had = seconds_of(process)
        wait_until(lambda: seconds_of(process) > had)
    assert children() <= before


@linux
def test_the_neighbour_ends_when_its_parent_is_killed() -> None:
    """The parent is killed, so that it cannot stop the neighbour."""
    with subprocess.Popen([sys.executable, "-c", ASKING], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        process = int(asking.stdout.readline())
        assert fields_of(process) is not None
        asking.send_signal(signal.SIGKILL)
        asking.wait()
    wait_until(lambda: fields_of(process) is None)


def check_beside_neighbour(
    forward: Forward, monkeypatch: pytest.MonkeyPatch, direction: str = "forward"
) -> tuple[str | None, str]:
    """The result and the note of the conformance check with a neighbour."""
    monkeypatch.setattr(conduct, "_SHARING_SECONDS", 0.2)
    backend = Backend("mine", "a test's", lambda: Availability(version="1"), (forward, Backward()))
    plan = Plan(forward.name, Backward.name if direction == "training" else None)
    subject = Subject(plan, CPU, Registry([REFERENCE, backend]))
    found = conduct.check_shared_gpu(subject, SPEC.replace(direction=direction))
    return found, "; ".join(subject.notes.get("shared GPU", []))


@linux
@pytest.mark.parametrize("direction", ["training", pytest.param("forward", marks=pytest.mark.exhaustive)])
def test_a_kernel_unaffected_by_a_neighbour_passes(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, noted = check_beside_neighbour(Forward(), monkeypatch, direction)
    assert found is None
    assert int(noted.removesuffix(" calls beside another process")) >= 16


def test_a_kernel_that_is_wrong_beside_a_neighbour_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong call of many is found only if each is checked."""

    class WrongBesideNeighbour(Forward):
        calls = 0

        def run(self, operands: Operands) -> Result:
            out, lse, _ = super().run(operands)
            self.calls += bool(beside)
            return Result(out * 2 if self.calls == 5 else out, lse)

    @contextmanager
    def pretend_neighbour(device: torch.device) -> Iterator[None]:
        beside.append(device)
        yield
        beside.clear()

    beside: list[torch.device] = []
    monkeypatch.setattr(conduct, "neighbour", pretend_neighbour)
    found, _ = check_beside_neighbour(WrongBesideNeighbour(), monkeypatch)
    assert found is not None
    assert found.startswith("beside another process on the GPU, in one of 16 calls, out is off by 1")


@linux
def test_a_device_that_excludes_another_process_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    monkeypatch.setattr(conduct, "neighbour", lambda device: neighbour(torch.device("meta")))
    found, noted = check_beside_neighbour(Forward(), monkeypatch)
    assert found is None
    assert noted.startswith("not asked: another process cannot work on meta: ")
    assert children() <= before
