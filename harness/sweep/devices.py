"""Several devices at work on one list of cases, each in a thread, their rows in one stream."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from queue import SimpleQueue
from types import TracebackType

from attnbench.kernels.plan import Plan

from ..cases.case import Case
from ..measure.setup import Laboratory
from ..results.records import Measurement, Status
from .compile_ahead import Ahead
from .device_sweep import Doing, Line, Phase, StoppedError
from .rows import passed_over

__all__ = ["Fleet", "Task"]


@dataclass(frozen=True)
class Task:
    """A plan to be measured on a case (status ``ok``), or to be passed over (``unavailable``, ``refused``) and why."""

    case: Case
    plan: Plan
    status: Status
    reasons: tuple[str, ...]

    @property
    def runs(self) -> bool:
        """Whether it is to be measured."""
        return self.status == "ok"

    @property
    def key(self) -> tuple[str, Plan]:
        """What is measured once in a sweep."""
        return self.case.name, self.plan


class Fleet:
    """One line a laboratory.  Leaving the context ends whatever is under way."""

    def __init__(self, laboratories: Sequence[Laboratory]) -> None:
        self.seconds = 0.0
        self._laboratories = laboratories
        self._lines: list[Line] = []
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()

    @property
    def spent(self) -> dict[Phase, float]:
        """Seconds in each phase, of all devices together."""
        phases = dict.fromkeys(phase for line in self._lines for phase in line.spent)
        return {phase: sum(line.spent[phase] for line in self._lines) for phase in phases}

    @property
    def notes(self) -> list[str]:
        """What is good to know about the devices."""
        return [note for line in self._lines for note in line.notes]

    def measured(self, tasks: Sequence[Task]) -> Iterator[Doing | Measurement]:
        """What happens, as it happens; whatever a line raises is raised here."""
        waiting = deque((case, list(group)) for case, group in groupby(tasks, key=lambda task: task.case))
        happened: SimpleQueue[Doing | Measurement | BaseException | None] = SimpleQueue()
        lines = [Line(laboratory) for laboratory in self._laboratories[: max(1, len(waiting))]]
        self._lines = lines
        start = time.perf_counter()
        work = [(case, [task.plan for task in own if task.runs]) for case, own in waiting]
        ahead = Ahead(work, self._laboratories[0])
        if ahead.needed:
            yield Doing("compiling")
            first_ms = ahead.run()
            for line in lines:
                line.first_ms = first_ms
                line.spent["compiling"] += time.perf_counter() - start
        self._threads = [threading.Thread(target=self._work, args=(line, waiting, happened)) for line in lines]
        for thread in self._threads:
            thread.start()
        working = len(lines)
        while working:
            event = happened.get()
            if event is None:
                working -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                yield event
        self.seconds = (time.perf_counter() - start) * len(lines)

    def _work(
        self,
        line: Line,
        waiting: deque[tuple[Case, list[Task]]],
        happened: SimpleQueue[Doing | Measurement | BaseException | None],
    ) -> None:
        try:
            with line:
                line.start([task.plan for _, tasks in waiting for task in tasks if task.runs])
                while waiting and not self._stopped.is_set():
                    try:
                        case, tasks = waiting.popleft()
                    except IndexError:  # another device was faster
                        break
                    for task in tasks:
                        if not task.runs:
                            happened.put(passed_over(case, task.plan, task.status, task.reasons, line.laboratory))
                    for event in line.measure(case, [task.plan for task in tasks if task.runs]):
                        happened.put(event)
        except StoppedError:
            pass
        except BaseException as error:  # carried to the thread that waits for rows
            happened.put(error)
        happened.put(None)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        for line in self._lines:
            line.stop()
        for thread in self._threads:
            thread.join()
