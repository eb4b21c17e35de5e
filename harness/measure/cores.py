"""Keep all threads of this process on one core while something is timed: a thread that waits there wakes at once."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["core_for", "on_core"]

_THREADS = Path("/proc/self/task")


def core_for(index: int) -> int | None:
    """The core for the device of this index, one of its own if there are enough; None where threads cannot be moved."""
    if not hasattr(os, "sched_setaffinity") or not _THREADS.is_dir():
        return None
    cores = sorted(os.sched_getaffinity(0), reverse=True)  # the first ones serve most interrupts
    return cores[index % len(cores)]


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
