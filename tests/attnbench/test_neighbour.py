"""Another process at work on a device: there while it is asked for, gone with whoever asked, or said why it is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from attnbench.testing.neighbour import NeighbourError, neighbour

CPU = torch.device("cpu")
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
    """Those of /proc/[pid]/stat behind the name: state, parent, ...; None where it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields


def seconds_of(process: int) -> float:
    """Of the processor that a process had."""
    fields = fields_of(process)
    assert fields is not None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children() -> set[int]:
    processes = {int(each): fields_of(each) for each in os.listdir("/proc") if each.isdigit()}
    return {each for each, fields in processes.items() if fields is not None and int(fields[1]) == os.getpid()}


@linux
def test_it_is_at_work_until_the_end() -> None:
    before = children()
    with neighbour(CPU):
        (process,) = children() - before
        had = seconds_of(process)
        for _ in range(200):
            time.sleep(0.05)
            if seconds_of(process) > had:
                break
        assert seconds_of(process) > had
    assert children() <= before


@linux
def test_it_ends_with_whoever_asked_for_it() -> None:
    """Killed, so that nothing of its own could have told the neighbour."""
    with subprocess.Popen([sys.executable, "-c", ASKING], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        process = int(asking.stdout.readline())
        assert fields_of(process) is not None
        asking.send_signal(signal.SIGKILL)
        asking.wait()
    for _ in range(200):
        if fields_of(process) is None:
            return
        time.sleep(0.05)
    pytest.fail("it is at work for nobody")


def test_why_there_is_none_is_said_and_none_is_left() -> None:
    with pytest.raises(NeighbourError, match="another process cannot work on meta: "), neighbour(torch.device("meta")):
        pytest.fail("it opened")


@linux
def test_it_imports_nothing_from_where_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('another torch')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with neighbour(CPU):
        pass


@linux
def test_an_exception_ends_it_too() -> None:
    before = children()
    with pytest.raises(ZeroDivisionError), neighbour(CPU):
        raise ZeroDivisionError
    assert children() <= before
