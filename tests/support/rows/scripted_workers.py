"""Workers for tests: one with scripted answers and no process, and a registry of kernels that damage a process."""

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

PIDS_FILE = "ATTNBENCH_TEST_PIDS_FILE"  # names the file to which a kernel appends its process ids
LONG = 1000.0


class ScriptedWorker:
    """A worker without a process: ``answer`` handles its requests; a LostError with ``died`` ends it."""

    def __init__(self, answer: Callable[..., object]) -> None:
        self.answer = answer
        self.alive, self.generation = False, 0
        self.requests: list[tuple[Any, ...]] = []

    def start(self) -> None:
        if not self.alive:
            self.alive = True
            self.generation += 1

    def ask(self, method: str, *arguments: object, seconds: float) -> Any:
        self.start()
        self.requests.append((self.generation, method, *arguments))
        try:
            return self.answer(method, *arguments)
        except LostError as lost:
            self.alive = not lost.died
            raise

    def close(self) -> None:
        self.alive = False

    def kill(self) -> None:
        self.close()


class LocalWorkers:
    """Creates workers that run in the test's process; ``fail_request`` makes matching requests raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workers: list[ScriptedWorker] = []
        self.faults: list[tuple[Exception, int, Callable[..., bool]]] = []
        self._one_at_a_time = threading.Lock()  # a process has one torch profiler
        monkeypatch.setattr(device_sweep, "Worker", self.make_worker)

    def make_worker(self, setting: Setting) -> ScriptedWorker:
        benches: dict[int, Bench] = {}

        def answer(method: str, *arguments: object) -> object:
            for number, (error, times, matches) in enumerate(self.faults):
                if times and matches(method, *arguments):
                    self.faults[number] = (error, times - 1, matches)
                    raise error
            if scripted.generation not in benches:
                benches[scripted.generation] = Bench(setting.source, setting.timer)
            with self._one_at_a_time:
                found = worker._answer(benches[scripted.generation], method, arguments)
            if found.status != "done":
                raise LostError(found.status, str(found.value), died=found.fatal)
            return found.value

        scripted = ScriptedWorker(answer)
        self.workers.append(scripted)
        return scripted

    def fail_request(self, error: Exception, *wanted: object, times: int = 1) -> None:
        self.faults.append((error, times, lambda method, *arguments: (method, *arguments)[: len(wanted)] == wanted))

    @property
    def request_counts(self) -> Counter[tuple[Any, ...]]:
        return Counter((method, *arguments[:1]) for each in self.workers for _, method, *arguments in each.requests)


def noted_pids(path: Path) -> list[int]:
    """The process ids that a kernel appended to the file, oldest first."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def is_running(pid: int) -> bool:
    """Whether the process runs: it exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < deadline, "timed out"
        time.sleep(0.01)


def note_pid(pid: int) -> None:
    with open(os.environ[PIDS_FILE], "a") as file:
        file.write(f"{pid}\n")


def _raising(error: BaseException) -> Callable[[Any], Any]:
    def act(_: Any) -> Any:
        raise error

    return act


def _printing(text: str) -> Callable[[Any], Any]:
    def act(value: Any) -> Any:
        print(text)
        return value

    return act


def _print_and_fail(_: Any) -> Any:
    print("printed by the one that failed")
    raise ValueError("no")


def _print_binary(value: Any) -> Any:
    os.write(1, bytes(range(256)) * 4 + b"\n\xff\xfe\x1b[31m\x00\n")
    return value


def _print_megabytes(value: Any) -> Any:
    for _ in range(64):
        os.write(2, b"flood " * 2**14)
    return value


def _read_stdin(value: Any) -> Any:
    assert sys.stdin.read() == ""
    return value


def _exit(value: Any) -> Any:
    print("printed before leaving")
    print("last words before leaving", file=sys.stderr)
    os._exit(7)


def _segfault(value: Any) -> Any:
    ctypes.string_at(0)
    return value


def _kill_itself(_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _start_child() -> int:
    return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LONG})"]).pid


def _hang(value: Any) -> Any:
    """Hangs with a child process and ignores every signal but SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    note_pid(os.getpid())
    note_pid(_start_child())
    time.sleep(LONG)
    return value


def _hold_the_gil(value: Any) -> Any:
    """Holds the GIL in a loop in C, so that no other thread and no signal handler runs."""
    note_pid(os.getpid())
    sum(range(10**14))
    return value


ACTS: dict[str, Callable[[Any], Any]] = {
    "fine": lambda value: value,
    "raises": _raising(RuntimeError("the first line\nthe second line")),
    "silent": _raising(KeyError()),
    "memory": _raising(MemoryError("no more")),
    "allocates": _raising(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")),
    "interrupts": _raising(KeyboardInterrupt()),
    "prints": _printing("printed by the one that went well"),
    "says-and-fails": _print_and_fail,
    "chats": _print_binary,
    "floods": _print_megabytes,
    "reads": _read_stdin,
    "leaves": _exit,
    "segfaults": _segfault,
    "dies": _kill_itself,
    "hangs": _hang,
    "locks": _hold_the_gil,
}


def faulty_registry() -> Registry:
    """A registry with a kernel ``act:bf16-NAME`` for each entry of ACTS."""
    return Registry([REFERENCE, backend(*(FakeForward(f"act:bf16-{name}", act) for name, act in ACTS.items()))])
