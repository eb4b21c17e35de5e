"""A worker process as its parent sees it: started, asked, waited for, ended with a reason, and replaced."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from attnbench.errors import AttnbenchError

from ..measure.worker import Answer
from ..results.records import LONGEST_REASON, Status
from .process_start import Forked, execute, fork, release

__all__ = ["LostError", "Worker"]

_STARTING_SECONDS = 300.0  # importing torch may take minutes from a cold disk on a busy machine
_DYING_SECONDS = 10.0  # the kernel must free a large process's memory, and the GPU's driver its allocations
_LAST_LINES = 4
_LONGEST_TAIL = 32768  # Python names every extension module after a fatal signal and its frames
_FATAL = "Fatal Python error"
_BENCH = "attnbench.harness.measure.worker"


class LostError(AttnbenchError):
    """A request that got no value: the row's status and the reason.  ``died``: the process is gone."""

    def __init__(self, status: Status, reason: str, *, died: bool) -> None:
        # A record cannot hold text without UTF-8, such as a file name's lone surrogate.
        reason = reason[:LONGEST_REASON].encode(errors="replace").decode()
        super().__init__(reason)
        self.status, self.reason, self.died = status, reason, died


@dataclass
class _Process:
    child: Forked | subprocess.Popen[bytes]
    connection: Connection[Any, Any]
    log: IO[bytes]
    ready: bool = False


@dataclass(eq=False)
class Worker:
    """One process, started by the first request, and again by the first request after its death.

    ``generation`` counts the processes, so that a client knows when the current one is new.

    ``module`` has the function ``main`` that the process runs, and ``setting`` is the first message that it receives.
    ``python`` is the interpreter of another environment, whose packages the process then uses; ``environ`` holds
    variables to set beside this process's own.  With either the system ties the process to the thread that started it,
    which must outlive the worker.
    """

    setting: object
    generation: int = 0
    module: str = _BENCH
    python: Path | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    _process: _Process | None = field(default=None, init=False, repr=False)

    @property
    def alive(self) -> bool:
        """Whether there is a process, as far as is known."""
        return self._process is not None

    def kill(self) -> None:
        """Kill the process, from any thread; the thread that waits for it finds it dead."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.child.pid, signal.SIGKILL)

    def start(self) -> _Process:
        """Start the process without waiting for it, unless one is running.  Raises LostError."""
        if self._process is None:
            try:
                self._process = self._started()
            except OSError as error:  # no process, descriptor or space is left
                raise LostError("error", f"no process could be started: {error}", died=False) from error
            self.generation += 1
            with contextlib.suppress(OSError):  # it is dead already; reading finds out how
                self._process.connection.send(self.setting)
        return self._process

    def ask(self, method: str, *arguments: object, seconds: float) -> Any:
        """What the worker's method returns.  Raises LostError if it raises, dies, or takes longer than ``seconds``."""
        process = self.start()
        if not process.ready:
            self._wait(process, _STARTING_SECONDS)
            process.ready = True
        with contextlib.suppress(OSError):  # it has died since; reading finds out how
            process.connection.send((method, arguments))
        try:
            return self._wait(process, seconds)
        finally:
            if self._process is process:
                os.ftruncate(process.log.fileno(), 0)  # what it prints belongs to one request

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._end(self._process, 0.0)
        release(self)

    def _started(self) -> _Process:
        """Raises OSError, and leaves nothing open then."""
        with contextlib.ExitStack() as opened:
            log = opened.enter_context(tempfile.TemporaryFile())
            fcntl.fcntl(log, fcntl.F_SETFL, fcntl.fcntl(log, fcntl.F_GETFL) | os.O_APPEND)
            ours, theirs = socket.socketpair()
            connection = opened.enter_context(Connection(ours.detach()))
            with theirs:
                if self.python is None and not self.environ:
                    child: Forked | subprocess.Popen[bytes] = fork(self, self.module, connection, theirs, log.fileno())
                else:  # libraries read the variables while they are loaded
                    child = execute(self.python, f"{self.module}:main", theirs.fileno(), log.fileno(), self.environ)
            opened.pop_all()
        return _Process(child, connection, log)

    def _wait(self, process: _Process, seconds: float) -> Any:
        kills = _system_kills()
        try:
            if not process.connection.poll(seconds):
                _, output = self._end(process, 0.0)
                raise LostError("timeout", f"no answer within {seconds:g} s{output}", died=True)
            answer = Answer(*process.connection.recv())
        except (EOFError, OSError):  # OSError where it died in the middle of an answer
            code, output = self._end(process, _DYING_SECONDS)
            if code == -signal.SIGKILL and _system_kills() > kills:
                raise LostError(
                    "oom", f"the system ran out of memory and killed the process{output}", died=True
                ) from None
            raise LostError("crashed", f"the process {_ending(code)}{output}", died=True) from None
        if answer.status == "done":
            return answer.value
        reason = str(answer.value)
        if answer.fatal:
            reason += self._end(process, _DYING_SECONDS)[1]
        raise LostError(answer.status, reason, died=answer.fatal)

    def _end(self, process: _Process, grace: float) -> tuple[int | None, str]:
        """Wait ``grace`` seconds for its end, then kill it and its children: its exit code and its last output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.child.wait(grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.child.pid, signal.SIGKILL)
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it beyond a signal
            code = process.child.wait(_DYING_SECONDS)
        output = _last_output(process.log)
        process.connection.close()
        process.log.close()
        self._process = None
        return code, output


def _ending(code: int | None) -> str:
    if code is None:
        return "is hung in the system"
    if code >= 0:
        return f"ended with the exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _last_output(log: IO[bytes]) -> str:
    """The end of what a process printed, as the end of a sentence."""
    size = os.fstat(log.fileno()).st_size
    start = max(0, size - _LONGEST_TAIL)
    text = os.pread(log.fileno(), _LONGEST_TAIL, start).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Python reports a fatal signal from the innermost frame outwards, so there the first lines say most.
    faults = [number for number, line in enumerate(lines) if line.startswith(_FATAL)]
    last = lines[faults[-1] :][:_LAST_LINES] if faults else lines[-_LAST_LINES:]
    return f"; its last output: {' | '.join(last)}" if last else ""


def _system_kills() -> int:
    """How many processes the system has killed because memory ran out; 0 if it does not say."""
    try:
        facts = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in facts.splitlines() if line.startswith("oom_kill ")), 0)
