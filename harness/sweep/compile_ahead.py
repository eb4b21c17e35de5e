"""Compiling ahead: what compiles for every shape does so in many processes at once, before anything is timed.

Inductor and Triton keep what they have compiled on the disk, where the workers that measure
find it.  A sweep of sixty cases would else wait for one compiler after the other.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from attnbench.kernels.plan import Plan, backend_of

from ..cases.case import Case
from ..measure.setup import DeviceSetup
from ..measure.worker import Setting
from .worker_process import LostError, Worker

__all__ = ["FirstRuns", "usable_cores"]

_FEWEST = 4  # first runs; fewer are through before more processes have started
_MOST_PROCESSES = 12  # each holds a context of the device, half a GB


class FirstRuns:
    """The first runs of a sweep's compiling backends on one GPU, several at a time.

    ``first_ms`` is how long each took, by the case's name and plan: its run in the worker that
    measures finds the compiler's work done.  A run that fails here fails there again, and is a row.
    """

    def __init__(self, work: Sequence[tuple[Case, Sequence[Plan]]], setup: DeviceSetup) -> None:
        self.first_ms: dict[tuple[str, Plan], float] = {}
        self._setup = setup
        self._waiting = deque(_first_runs(work, setup)) if setup.device.type == "cuda" else deque()
        count = min(_MOST_PROCESSES, usable_cores() * 3 // 4, len(self._waiting))
        if count < 2 or len(self._waiting) < _FEWEST:
            self._waiting.clear()
            count = 0
        setting = Setting(setup.source, setup.timer, 1)
        self._workers = [Worker(setting) for _ in range(count)]
        self._stopped = threading.Event()

    @property
    def needed(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._workers)

    def run(self) -> Mapping[tuple[str, Plan], float]:
        """Do it.  An exception in the calling thread, as of an interrupt, ends every process."""
        threads = [threading.Thread(target=self._work, args=(worker,)) for worker in self._workers]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self._stopped.set()
            for worker in self._workers:
                worker.kill()
            for thread in threads:
                thread.join()
        return self.first_ms

    def _work(self, worker: Worker) -> None:
        while not self._stopped.is_set():
            try:
                case, plan = self._waiting.popleft()
            except IndexError:
                break
            try:
                first_ms = worker.ask("compile", case, plan, seconds=self._setup.seconds)
            except LostError:
                continue
            self.first_ms[case.name, plan] = first_ms
        worker.close()


def usable_cores() -> int:
    """How many cores this process may use, which may be fewer than the machine has: ``taskset``, a container's set."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _first_runs(work: Sequence[tuple[Case, Sequence[Plan]]], setup: DeviceSetup) -> list[tuple[Case, Plan]]:
    """For each case the plans that have all compiling kernels between them, the one family that is needed left in it.

    A plan whose kernels all compile elsewhere is left out: pairs of two such kernels are as many as their product.
    """
    compiling = {name for name, backend in setup.registry.backends.items() if backend.compiles}
    runs = []
    for case, plans in work:
        covered: set[tuple[int, str]] = set()  # the pass, and the kernel
        for plan in plans:
            kernels = {each for each in enumerate(plan.kernels) if backend_of(each[1]) in compiling}
            if kernels - covered:
                covered |= kernels
                runs.append((replace(case, families=case.families[:1]), plan))
    return runs
