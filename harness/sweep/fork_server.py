"""A process that imports torch once and is forked for each worker, which starts in milliseconds instead of seconds.

It runs no kernel, opens no device and starts no thread, so that a forked process is as good as a new one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

__all__ = ["serve"]

_IMPORTED = "attnbench.harness.measure.bench"  # and with it torch; no backend, whose import may open a device


def serve(descriptor: int, parent: int) -> None:
    """Fork for the process ``parent`` until it closes the inherited socket ``descriptor``, or dies.

    A request is three descriptors: the worker's connection, its log, and the end of a pipe for its number and, later,
    its exit code.
    """
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    importlib.import_module(_IMPORTED)
    gc.freeze()  # what is imported stays shared with the forked processes, none of which collects it
    woken, waking = socket.socketpair()
    waking.setblocking(False)
    signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written to the socket
    death = _ends_with(parent)
    reports: dict[int, Connection[int, Any]] = {}
    while True:
        ready = wait([control, woken, *death])
        if woken in ready:
            woken.recv(4096)
            _report_ends(reports)
        if control in ready:
            request, descriptors, _, _ = socket.recv_fds(control, 1, 3)
            if not request:
                return
            _fork(descriptors, [control, woken, waking, *reports.values()], reports)
        if any(each in ready for each in death):
            return


def _ends_with(process: int) -> list[int]:
    """A descriptor that is ready when the process has ended; none where the system has no such.

    The socket alone does not tell, if a process that the parent forked holds the other end.
    """
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or a sandbox
        return [os.pidfd_open(process)]
    return []


def _fork(
    descriptors: Sequence[int],
    inherited: Sequence[socket.socket | Connection[int, Any]],
    reports: dict[int, Connection[int, Any]],
) -> None:
    end, log, report = descriptors
    server = os.getpid()
    sender: Connection[int, Any] = Connection(report)
    try:
        pid = os.fork()
    except OSError as error:  # too many processes
        os.write(log, f"OSError: {error}".encode())
        sender.close()  # by which the parent knows
    else:
        if pid == 0:
            _become_worker(end, log, server, [sender, *inherited])
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # as the process does itself: whoever kills the group may come before that
        reports[pid] = sender
        with contextlib.suppress(OSError):  # the parent no longer wants to know
            sender.send(pid)
    os.close(end)
    os.close(log)


def _become_worker(
    end: int, log: int, server: int, inherited: Sequence[socket.socket | Connection[int, Any]]
) -> NoReturn:
    """Run ``main`` of the module that is the first message, in a group of its own."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in inherited:
            each.close()
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        os.close(log)
        connection: Connection[Any, Any]
        with Connection(os.dup(end)) as connection:
            module, sys.path[:], environ = connection.recv()
        os.environ.clear()
        os.environ.update(environ)
        importlib.invalidate_caches()  # files may have been written since the server looked
        importlib.import_module(module).main(end, server)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _report_ends(reports: dict[int, Connection[int, Any]]) -> None:
    for pid in list(reports):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with reports.pop(pid) as sender, contextlib.suppress(OSError):  # the parent no longer wants to know
                sender.send(os.waitstatus_to_exitcode(status))
