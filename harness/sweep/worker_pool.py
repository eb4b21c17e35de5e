"""Requests shared out among worker processes on one GPU, each of which serves one after the other."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from .worker_process import Worker

__all__ = ["process_count", "share_out", "usable_cores"]

_FEWEST = 4  # requests; fewer are through before more processes have started
_BYTES = 2 * 2**30  # of the device's memory for each process: its context is half a GB, and a case may need more

Request = TypeVar("Request")


def process_count(requests: int, memory_bytes: int | None) -> int:
    """How many processes pay for so many requests on a device of this memory; 0 where this process alone is better."""
    count = min((memory_bytes or _BYTES) // _BYTES, usable_cores(), requests)
    return count if count > 1 and requests >= _FEWEST else 0


def share_out(waiting: deque[Request], workers: Sequence[Worker], serve: Callable[[Worker, Request], None]) -> None:
    """Have each worker ``serve`` requests, in a thread of its own, until none is waiting; then end it.

    An exception in the calling thread, such as an interrupt, ends every process.
    """
    stopped = threading.Event()

    def work(worker: Worker) -> None:
        while not stopped.is_set():
            try:
                request = waiting.popleft()
            except IndexError:
                break
            serve(worker, request)
        worker.close()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stopped.set()
        for worker in workers:
            worker.kill()
        for thread in threads:
            thread.join()


def usable_cores() -> int:
    """How many cores this process may use: fewer than the machine has under ``taskset`` or in a container."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
