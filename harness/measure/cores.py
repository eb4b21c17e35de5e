"""Keep all threads of this process on one core while something is timed: a thread that waits there wakes at once."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attnbench.errors import OutputError
from attnbench.files.lock import FileLock
from attnbench.files.user_folders import cache_folder
from attnbench.state import Cache

__all__ = ["core_for", "on_core"]

_THREADS = Path("/proc/self/task")


def core_for(index: int) -> int | None:
    """The core for the device of this index, the same in every call; None where threads cannot be moved.

    It is one on which no other process of this user measures, as long as there are enough: sweeps that each see one GPU
    of a machine call it the first, and would all wait for one core.
    """
    if not hasattr(os, "sched_setaffinity") or not _THREADS.is_dir():
        return None
    return _claims.of(index, _claim, index)[0]


_claims: Cache[int, tuple[int, FileLock | None]] = Cache(lasting=True)  # until the process ends


def _claim(index: int) -> tuple[int, FileLock | None]:
    """A core, and the lock that keeps others from it; without one where all are taken, or locks cannot be had."""
    cores = sorted(os.sched_getaffinity(0), reverse=True)  # the first ones serve most interrupts
    first = index % len(cores)
    with suppress(OSError, OutputError):
        folder = cache_folder() / "cores"
        folder.mkdir(parents=True, exist_ok=True)
        for core in cores[first:] + cores[:first]:
            lock = FileLock(folder / f"{core}.lock")
            try:
                if lock.acquire():
                    return core, lock
            except OSError:
                lock.close()
                raise
            lock.close()
    return cores[first], None


@contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Move every thread of this process to the core, and back at the end; nothing is done for None.

    A thread that starts meanwhile is moved to the cores of the calling thread at the end.
    """
    if core is None:
        yield
        return
    usual = os.sched_getaffinity(0)
    before: dict[int, Collection[int]] = {}
    for thread in _threads():
        with suppress(OSError):  # it has ended, or the core was taken from this process
            before[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, {core})
    try:
        yield
    finally:
        for thread in _threads():
            with suppress(OSError):
                os.sched_setaffinity(thread, before.get(thread, usual))


def _threads() -> list[int]:
    return [int(each.name) for each in _THREADS.iterdir()]
