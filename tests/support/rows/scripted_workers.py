"""Workers for tests: one without a process, whose answers are chosen, and a registry of kernels that do harm in one."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from planted import FakeForward, backend

from attnbench.backends.reference import BACKEND as REFERENCE
from attnbench.harness.measure import worker
from attnbench.harness.measure.bench import Bench
from attnbench.harness.measure.worker import Setting
from attnbench.harness.sweep import device_sweep
from attnbench.harness.sweep.worker_process import LostError
from attnbench.kernels.registry import Registry

NOTED = "ATTNBENCH_TEST_NOTED"  # the file in which a kernel notes the processes that it is and makes
LONG = 1000.0


class Station:
    """A worker that lives in the test.  ``answer`` is asked in its stead; a LostError that ``died`` ends it."""

    def __init__(self, answer: Callable[..., object]) -> None:
        self.answer = answer
        self.alive, self.generation = False, 0
        self.asked: list[tuple[Any, ...]] = []

    def start(self) -> None:
        if not self.alive:
            self.alive = True
            self.generation += 1

    def ask(self, method: str, *arguments: object, seconds: float) -> Any:
        self.start()
        self.asked.append((self.generation, method, *arguments))
        try:
            return self.answer(method, *arguments)
        except LostError as lost:
            self.alive = not lost.died
            raise

    def close(self) -> None:
        self.alive = False

    def kill(self) -> None:
        self.close()


class Shop:
    """Makes workers that share a process with the test, and breaks the requests that it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stations: list[Station] = []
        self.faults: list[tuple[Exception, int, Callable[..., bool]]] = []
        self._one_at_a_time = threading.Lock()  # torch's profiler is one of a process
        monkeypatch.setattr(device_sweep, "Worker", self.made)

    def made(self, setting: Setting) -> Station:
        benches: dict[int, Bench] = {}

        def answer(method: str, *arguments: object) -> object:
            for number, (error, times, is_meant) in enumerate(self.faults):
                if times and is_meant(method, *arguments):
                    self.faults[number] = (error, times - 1, is_meant)
                    raise error
            if station.generation not in benches:
                benches[station.generation] = Bench(setting.source, setting.timer)
            with self._one_at_a_time:
                found = worker._answer(benches[station.generation], method, arguments)
            if found.status != "done":
                raise LostError(found.status, str(found.value), died=found.fatal)
            return found.value

        station = Station(answer)
        self.stations.append(station)
        return station

    def breaks(self, error: Exception, *wanted: object, times: int = 1) -> None:
        self.faults.append((error, times, lambda method, *arguments: (method, *arguments)[: len(wanted)] == wanted))

    @property
    def asked(self) -> Counter[tuple[Any, ...]]:
        return Counter((method, *arguments[:1]) for station in self.stations for _, method, *arguments in station.asked)


def noted(path: Path) -> list[int]:
    """The processes that a kernel noted there, oldest first."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def runs(pid: int) -> bool:
    """Whether the process runs: neither gone, nor dead and waiting for its parent to notice."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(is_so: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.perf_counter() + seconds
    while not is_so():
        assert time.perf_counter() < deadline, "waited in vain"
        time.sleep(0.01)


def note(pid: int) -> None:
    with open(os.environ[NOTED], "a") as file:
        file.write(f"{pid}\n")


def _raises(error: BaseException) -> Callable[[Any], Any]:
    def act(_: Any) -> Any:
        raise error

    return act


def _prints(text: str) -> Callable[[Any], Any]:
    def act(value: Any) -> Any:
        print(text)
        return value

    return act


def _prints_and_fails(_: Any) -> Any:
    print("said by the one that failed")
    raise ValueError("no")


def _chats(value: Any) -> Any:
    os.write(1, bytes(range(256)) * 4 + b"\n\xff\xfe\x1b[31m\x00\n")
    return value


def _floods(value: Any) -> Any:
    for _ in range(64):
        os.write(2, b"flood " * 2**14)
    return value


def _reads_stdin(value: Any) -> Any:
    assert sys.stdin.read() == ""
    return value


def _leaves(value: Any) -> Any:
    print("printed before leaving")
    print("last words before leaving", file=sys.stderr)
    os._exit(7)


def _segfaults(value: Any) -> Any:
    ctypes.string_at(0)
    return value


def _dies(_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _child() -> int:
    return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LONG})"]).pid


def _hangs(value: Any) -> Any:
    """With a child, and deaf to everything but SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    note(os.getpid())
    note(_child())
    time.sleep(LONG)
    return value


def _holds_the_lock(value: Any) -> Any:
    """A loop in C, in which no other thread of the interpreter and no handler of a signal gets its turn."""
    note(os.getpid())
    sum(range(10**14))
    return value


ACTS: dict[str, Callable[[Any], Any]] = {
    "fine": lambda value: value,
    "raises": _raises(RuntimeError("the first line\nthe second line")),
    "silent": _raises(KeyError()),
    "memory": _raises(MemoryError("no more")),
    "allocates": _raises(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")),
    "interrupts": _raises(KeyboardInterrupt()),
    "prints": _prints("said by the one that went well"),
    "says-and-fails": _prints_and_fails,
    "chats": _chats,
    "floods": _floods,
    "reads": _reads_stdin,
    "leaves": _leaves,
    "segfaults": _segfaults,
    "dies": _dies,
    "hangs": _hangs,
    "locks": _holds_the_lock,
}


def harmful() -> Registry:
    """A kernel ``act:bf16-NAME`` for everything in ACTS."""
    return Registry([REFERENCE, backend(*(FakeForward(f"act:bf16-{name}", act) for name, act in ACTS.items()))])
