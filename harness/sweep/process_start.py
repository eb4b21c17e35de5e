"""How a worker's process is started: forked from a server that has imported torch, or by another interpreter."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from attnbench.errors import OutputError
from attnbench.files.user_folders import cache_folder

__all__ = ["Forked", "execute", "fork", "release"]

_ANSWERING_SECONDS = 10.0  # more than importing torch takes, unless the disk hangs
_ENDING_SECONDS = 10.0
_SERVER_MODULE = "attnbench.harness.sweep.fork_server"
# Threads that spin while they wait for each other make a CPU kernel 25 times slower as soon as another process
# needs a core.  OpenMP reads this variable when torch is loaded.
_PATIENT = {"OMP_WAIT_POLICY": "passive"}


class Forked:
    """A process that the server forks, used as a ``subprocess.Popen`` is."""

    def __init__(self, receiver: Connection[Any, int]) -> None:
        self._receiver = receiver
        self._numbers: list[int] = []
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Waits for the server to fork.  Raises ProcessLookupError if it has ended, or does not answer."""
        if not self._numbers:
            try:
                forked = self._read(1, _ANSWERING_SECONDS)
            except subprocess.TimeoutExpired:  # if it forks later, the process finds its connection closed
                forked = False
            if not forked:
                raise ProcessLookupError
        return self._numbers[0]

    def wait(self, timeout: float) -> int:
        """The exit code, negative for a signal; 1 if nothing was forked.  Raises subprocess.TimeoutExpired."""
        if self._read(2, timeout):
            return self._numbers[1]
        return -signal.SIGKILL if self._numbers else 1  # the system kills it when the server dies

    def _read(self, count: int, timeout: float) -> bool:
        """Whether the server has sent so many numbers."""
        with self._lock:
            while len(self._numbers) < count:
                if not self._receiver.poll(timeout):
                    raise subprocess.TimeoutExpired("fork", timeout)
                try:
                    self._numbers.append(self._receiver.recv())
                except (EOFError, OSError):  # the server has ended, or died
                    return False
            return True


def fork(user: object, module: str, connection: Connection[Any, Any], end: socket.socket, log: int) -> Forked:
    """Have ``main`` of ``module`` serve ``end`` of the connection in a new process, which prints to the file ``log``.

    Does not wait for the process.  The server, and with it the environment that torch was imported in, lives until it
    is released by every ``user``.  Raises OSError.
    """
    receiver, sender = Pipe(duplex=False)
    with sender, contextlib.ExitStack() as opened:
        opened.enter_context(receiver)
        _SERVER.request(user, [end.fileno(), log, sender.fileno()])
        connection.send((module, sys.path, _environ()))
        opened.pop_all()
    return Forked(receiver)


def release(user: object) -> None:
    """``user`` forks no more.  Without users the server ends: it would hold memory as long as the user's program."""
    _SERVER.release(user)


def execute(
    python: Path | None, function: str, descriptor: int, log: int, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Have an interpreter call ``module:function`` with an inherited descriptor and the number of this process.

    ``python`` is the interpreter of another environment, whose packages it then uses; ``environ`` holds variables to
    set beside this process's own.  Raises OSError.
    """
    # Another environment has a path of its own, without the current folder.  Not -m: that would put the current folder
    # before everything that is installed.
    places = sys.path if python is None else []
    module, _, name = function.partition(":")
    program = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]) or [place for place in sys.path if place]; "
        f"from {module} import {name}; {name}(int(sys.argv[2]), int(sys.argv[3]))"
    )
    return subprocess.Popen(
        # Unbuffered: otherwise its last output would be lost with it.
        [
            *(str(python or sys.executable), "-u", "-c", program),
            *(json.dumps(places), str(descriptor), str(os.getpid())),
        ],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[descriptor],
        env={**_environ(), **environ},
        start_new_session=True,  # the sweep handles an interrupt at the terminal
    )


class _Server:
    """The fork server of this process, started by the first request, and again by the first after its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = weakref.WeakSet[object]()
        self._owner = 0  # a process that was forked from the owner has no server yet
        self._control: socket.socket
        self._popen: subprocess.Popen[bytes]

    def request(self, user: object, descriptors: Sequence[int]) -> None:
        """Send a worker's connection, its log, and where its numbers are wanted.  Raises OSError."""
        with self._lock:
            self._users.add(user)
            if self._owner == os.getpid():
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    socket.send_fds(self._control, [b"f"], descriptors)
                    return
                self._close()
            self._start(descriptors[1])
            socket.send_fds(self._control, [b"f"], descriptors)

    def release(self, user: object) -> None:
        """End it with the last of its users."""
        with self._lock:
            self._users.discard(user)
            if not self._users and self._owner == os.getpid():
                self._close()

    def _start(self, log: int) -> None:
        """The first worker's log holds what the server prints, such as why torch cannot be imported."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._popen = execute(None, f"{_SERVER_MODULE}:serve", theirs.fileno(), log, {})
            except BaseException:
                ours.close()
                raise
        self._control, self._owner = ours, os.getpid()

    def _close(self) -> None:
        self._owner = 0
        self._control.close()
        try:
            self._popen.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:  # it still imports
            self._popen.kill()


_SERVER = _Server()


def _environ() -> dict[str, str]:
    return {**_PATIENT, **_triton_cache(), **os.environ, **_bytecode()}


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
