"""A worker process as its parent sees it: started, asked, waited for, ended with a reason, and replaced."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from attnbench.errors import AttnbenchError, OutputError
from attnbench.files.user_folders import cache_folder

from ..measure.worker import Answer
from ..results.records import LONGEST_REASON, Status

__all__ = ["LostError", "Worker"]

_STARTING_SECONDS = 300.0  # importing torch may take minutes from a cold disk on a busy machine
_DYING_SECONDS = 10.0  # the kernel must free a large process's memory, and the GPU's driver its allocations
_LAST_LINES = 4
_LONGEST_TAIL = 4096
_FATAL = "Fatal Python error"
# Threads that spin while they wait for each other make a CPU kernel 25 times slower as soon as another process
# needs a core.  OpenMP reads this variable when torch is loaded.
_PATIENT = {"OMP_WAIT_POLICY": "passive"}
# Not -m: that would put the current folder before everything that is installed.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]) or [place for place in sys.path if place]; "
    "from {module} import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
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
    popen: subprocess.Popen[bytes]
    connection: Connection[Any, Any]
    log: IO[bytes]
    ready: bool = False


@dataclass
class Worker:
    """One process, started by the first request, and again by the first request after its death.

    ``generation`` counts the processes, so that a client knows when the current one is new.  The system ties a process
    to the thread that started it: that thread must outlive the worker.

    ``module`` has the function ``main`` that the process runs, and ``setting`` is the first message that it receives.
    ``python`` is the interpreter of another environment, whose packages the process then uses; ``environ`` holds
    variables to set beside this process's own.
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
                os.killpg(process.popen.pid, signal.SIGKILL)

    def start(self) -> _Process:
        """Start the process without waiting for it, unless one is running.  Raises LostError."""
        if self._process is None:
            try:
                self._process = _started(self.module, self.python, self.environ)
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

    def _wait(self, process: _Process, seconds: float) -> Any:
        kills = _system_kills()
        try:
            if not process.connection.poll(seconds):
                _, said = self._end(process, 0.0)
                raise LostError("timeout", f"no answer within {seconds:g} s{said}", died=True)
            answer = Answer(*process.connection.recv())
        except (EOFError, OSError):  # OSError where it died in the middle of an answer
            code, said = self._end(process, _DYING_SECONDS)
            if code == -signal.SIGKILL and _system_kills() > kills:
                raise LostError(
                    "oom", f"the system ran out of memory and killed the process{said}", died=True
                ) from None
            raise LostError("crashed", f"the process {_ending(code)}{said}", died=True) from None
        if answer.status == "done":
            return answer.value
        reason = str(answer.value)
        if answer.fatal:
            reason += self._end(process, _DYING_SECONDS)[1]
        raise LostError(answer.status, reason, died=answer.fatal)

    def _end(self, process: _Process, grace: float) -> tuple[int | None, str]:
        """Wait ``grace`` seconds for its end, then kill it and its children: its exit code and its last output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.popen.pid, signal.SIGKILL)
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it beyond a signal
            code = process.popen.wait(_DYING_SECONDS)
        said = _last_output(process.log)
        process.connection.close()
        process.log.close()
        self._process = None
        return code, said


def _started(module: str, python: Path | None, environ: Mapping[str, str]) -> _Process:
    """Raises OSError, and leaves nothing open then."""
    # Another environment has a path of its own, without the current folder.
    places = sys.path if python is None else []
    program = _PROGRAM.format(module=module)
    with contextlib.ExitStack() as opened:
        log = opened.enter_context(tempfile.TemporaryFile())
        fcntl.fcntl(log, fcntl.F_SETFL, fcntl.fcntl(log, fcntl.F_GETFL) | os.O_APPEND)
        ours, theirs = map(opened.enter_context, socket.socketpair())
        end = theirs.fileno()
        popen = subprocess.Popen(
            # Unbuffered: otherwise its last output would be lost with it.
            [str(python or sys.executable), "-u", "-c", program, json.dumps(places), str(end), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[end],
            env={**_PATIENT, **_triton_cache(), **os.environ, **_bytecode(), **environ},
            start_new_session=True,  # the sweep handles an interrupt at the terminal
        )
        opened.pop_all()
        theirs.close()
    return _Process(popen, Connection(ours.detach()), log)


def _triton_cache() -> dict[str, str]:
    """Triton's own place for compiled kernels.

    A process in which Inductor compiles moves it elsewhere unless this is set, and then finds none of the kernels that
    another process compiled.
    """
    return {"TRITON_CACHE_DIR": str(Path(os.environ.get("TRITON_HOME", os.path.expanduser("~")), ".triton", "cache"))}


def _bytecode() -> dict[str, str]:
    """A place for what Python compiles of its sources, where nothing else keeps it.

    Images for containers set PYTHONDONTWRITEBYTECODE, and may hold no compiled torch: then each of thirty processes
    takes 4.2 seconds for 1.8 to import torch, and 7 for 3 with its compiler.
    """
    torch = find_spec("torch")
    if not sys.dont_write_bytecode or torch is None or torch.cached is None or Path(torch.cached).exists():
        return {}
    with contextlib.suppress(OutputError):
        return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache_folder() / "bytecode")}
    return {}


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
