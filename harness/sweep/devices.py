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
from .interleave import Samples
from .rows import slower_row, unmeasured_row

__all__ = ["DeviceSweeps", "Task"]

_FIRST = 12  # cases that are measured before the rest of a longer sweep is compiled


@dataclass(frozen=True)
class Task:
    """A plan to measure on a case (status ``ok``), or to record as ``unavailable``, ``refused`` or ``slower`` with the
    reasons.

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


_Waiting = deque[tuple[Case, list[Task]]]


class DeviceSweeps:
    """One sweep for each setup.  Leaving the context ends whatever is running."""

    def __init__(self, setups: Sequence[DeviceSetup]) -> None:
        self.seconds = 0.0
        self._setups = setups
        self._sweeps: list[DeviceSweep] = []
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()
        self._parts: SimpleQueue[_Waiting | None] = SimpleQueue()
        self._happened: SimpleQueue[PhaseStarted | Measurement | BaseException | None] = SimpleQueue()

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
        """Yield the events of all devices in order of time.  Raises whatever a device's sweep raises.

        The first few cases are compiled and measured before the others are compiled, so that an interrupted sweep has
        measured something.
        """
        cases = [(case, list(group)) for case, group in groupby(tasks, key=lambda task: task.case)]
        self._sweeps = [DeviceSweep(setup) for setup in self._setups[: max(1, len(cases))]]
        plans = [task.plan for task in tasks if task.runs]
        start = time.perf_counter()
        # The processes import what they need while others compile.
        self._threads = [threading.Thread(target=self._serve, args=(sweep, plans)) for sweep in self._sweeps]
        for thread in self._threads:
            thread.start()
        first = _FIRST if len(cases) > 2 * _FIRST else len(cases)
        for part in filter(None, (cases[:first], cases[first:])):
            yield from self._compiled(part)
            yield from self._shared(deque(part))
        self._end()
        self.seconds = (time.perf_counter() - start) * len(self._sweeps)

    def _compiled(self, cases: Sequence[tuple[Case, list[Task]]]) -> Iterator[PhaseStarted]:
        start = time.perf_counter()
        first_runs = FirstRuns(
            [(case, [task.plan for task in own if task.runs]) for case, own in cases], self._setups[0]
        )
        if first_runs.needed:
            yield PhaseStarted("compiling")
            first_ms = first_runs.run()
            for sweep in self._sweeps:
                sweep.first_ms = {**sweep.first_ms, **first_ms}
                sweep.spent["compiling"] += time.perf_counter() - start

    def _shared(self, waiting: _Waiting) -> Iterator[PhaseStarted | Measurement]:
        """The events of measuring these cases, of which each device takes the next when it is free."""
        for _ in self._sweeps:
            self._parts.put(waiting)
        working = len(self._sweeps)
        while working:
            event = self._happened.get()
            if event is None:
                working -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                yield event

    def _serve(self, sweep: DeviceSweep, plans: Sequence[Plan]) -> None:
        """Measure parts of the sweep, from a thread that outlives its processes; one None for each part."""
        try:
            with sweep:
                sweep.start(plans)
                while (waiting := self._parts.get()) is not None:
                    self._work(sweep, waiting)
                    self._happened.put(None)
        except StoppedError:
            self._happened.put(None)
        except BaseException as error:  # carried to the thread that waits for rows
            self._happened.put(error)

    def _work(self, sweep: DeviceSweep, waiting: _Waiting) -> None:
        while waiting and not self._stopped.is_set():
            try:
                case, tasks = waiting.popleft()
            except IndexError:  # another device was faster
                break
            for task in tasks:
                if not task.runs:
                    self._happened.put(_not_run(task, sweep.setup))
            running = [task for task in tasks if task.runs]
            required = [task.plan for task in running if task.required]
            for event in sweep.measure(case, [task.plan for task in running], required):
                self._happened.put(event)

    def _end(self) -> None:
        for _ in self._threads:
            self._parts.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> DeviceSweeps:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for sweep in self._sweeps:
            sweep.stop()
        self._end()


def _not_run(task: Task, setup: DeviceSetup) -> Measurement:
    if task.status == "slower":
        return slower_row(task.case, task.plan, "; ".join(task.reasons), Samples(), None, setup)
    return unmeasured_row(task.case, task.plan, task.status, task.reasons, setup)
