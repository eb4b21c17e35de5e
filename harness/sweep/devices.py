"""Several devices that share one list of cases, a thread for each; their rows arrive in one stream."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from queue import SimpleQueue

from attnbench.kernels.capabilities import Device
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry

from ..cases.case import Case
from ..measure.setup import DeviceSetup
from ..results.records import Measurement, Status
from .compile_ahead import FirstRuns
from .device_sweep import DeviceSweep, Phase, PhaseStarted, StoppedError
from .rows import unmeasured_row

__all__ = ["DeviceSweeps", "Task"]


@dataclass(frozen=True)
class Task:
    """A plan to measure on a case (status ``ok``), or to record as ``unavailable`` or ``refused`` with the reasons.

    A ``required`` plan is measured in full even where it loses a race.
    """

    case: Case
    plan: Plan
    status: Status
    reasons: tuple[str, ...]
    required: bool = False

    @classmethod
    def of(cls, case: Case, plan: Plan, registry: Registry, device: Device) -> Task:
        """The task, with the status that the registry gives it."""
        status, reasons = registry.reasons(plan, case.spec, device)
        known: Status = "ok" if status == "ok" else "unavailable" if status == "unavailable" else "refused"
        return cls(case, plan, known, tuple(reasons))

    @property
    def runs(self) -> bool:
        """Whether it is to be measured."""
        return self.status == "ok"

    @property
    def key(self) -> tuple[str, Plan]:
        """The case and plan; each pair is measured once in a sweep."""
        return self.case.name, self.plan


class DeviceSweeps:
    """One sweep for each setup.  Leaving the context ends whatever is running."""

    def __init__(self, setups: Sequence[DeviceSetup]) -> None:
        self.seconds = 0.0
        self._setups = setups
        self._sweeps: list[DeviceSweep] = []
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()

    @property
    def spent(self) -> dict[Phase, float]:
        """Seconds in each phase, summed over all devices."""
        phases = dict.fromkeys(phase for sweep in self._sweeps for phase in sweep.spent)
        return {phase: sum(sweep.spent[phase] for sweep in self._sweeps) for phase in phases}

    @property
    def notes(self) -> list[str]:
        """Remarks about the devices for the user."""
        return [note for sweep in self._sweeps for note in sweep.notes]

    def measured(self, tasks: Sequence[Task]) -> Iterator[PhaseStarted | Measurement]:
        """Yield the events of all devices in order of time.  Raises whatever a device's sweep raises."""
        waiting = deque((case, list(group)) for case, group in groupby(tasks, key=lambda task: task.case))
        happened: SimpleQueue[PhaseStarted | Measurement | BaseException | None] = SimpleQueue()
        sweeps = [DeviceSweep(setup) for setup in self._setups[: max(1, len(waiting))]]
        self._sweeps = sweeps
        start = time.perf_counter()
        work = [(case, [task.plan for task in own if task.runs]) for case, own in waiting]
        first_runs = FirstRuns(work, self._setups[0])
        if first_runs.needed:
            yield PhaseStarted("compiling")
            first_ms = first_runs.run()
            for sweep in sweeps:
                sweep.first_ms = first_ms
                sweep.spent["compiling"] += time.perf_counter() - start
        self._threads = [threading.Thread(target=self._work, args=(sweep, waiting, happened)) for sweep in sweeps]
        for thread in self._threads:
            thread.start()
        working = len(sweeps)
        while working:
            event = happened.get()
            if event is None:
                working -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                yield event
        self.seconds = (time.perf_counter() - start) * len(sweeps)

    def _work(
        self,
        sweep: DeviceSweep,
        waiting: deque[tuple[Case, list[Task]]],
        happened: SimpleQueue[PhaseStarted | Measurement | BaseException | None],
    ) -> None:
        try:
            with sweep:
                sweep.start([task.plan for _, tasks in waiting for task in tasks if task.runs])
                while waiting and not self._stopped.is_set():
                    try:
                        case, tasks = waiting.popleft()
                    except IndexError:  # another device was faster
                        break
                    for task in tasks:
                        if not task.runs:
                            happened.put(unmeasured_row(case, task.plan, task.status, task.reasons, sweep.setup))
                    running = [task for task in tasks if task.runs]
                    required = [task.plan for task in running if task.required]
                    for event in sweep.measure(case, [task.plan for task in running], required):
                        happened.put(event)
        except StoppedError:
            pass
        except BaseException as error:  # carried to the thread that waits for rows
            happened.put(error)
        happened.put(None)

    def __enter__(self) -> DeviceSweeps:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for sweep in self._sweeps:
            sweep.stop()
        for thread in self._threads:
            thread.join()
