"""The sweep of one device: case by case, each backend in its own process, the plans timed in turns."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from statistics import median
from typing import Any, Literal, TypeVar

import torch
from pydantic import ValidationError

from attnbench.kernels.plan import Plan, backend_of

from ..cases.case import Case
from ..measure.clocks import Watch
from ..measure.findings import Opened, Prepared, Visit
from ..measure.setup import DeviceSetup
from ..measure.worker import Setting
from ..results.records import Measurement
from .backend_process import BackendProcess
from .interleave import Samples, interleave, warm
from .race import Race
from .rows import measured_row, slower_row, unmeasured_row
from .worker_pool import usable_cores
from .worker_process import LostError, Worker

__all__ = ["DeviceSweep", "Phase", "PhaseStarted", "StoppedError"]

_T = TypeVar("_T")
_BEATEN = 1.05  # times the fastest: a plan that is slower is not timed any closer in a race
Phase = Literal["compiling", "preparing", "timing", "judging"]


class StoppedError(Exception):
    """The sweep was stopped; whatever was running is discarded."""


@dataclass(frozen=True)
class PhaseStarted:
    """A device has started a phase, of one case or (``case`` None) of all."""

    phase: Phase
    case: Case | None = None


class DeviceSweep:
    """Measures on one device until it is stopped.  Used from one thread, which must outlive the context.

    ``spent`` counts the seconds of each phase.  ``first_ms`` holds, by case and plan, the first runs that were made
    ahead in other processes.
    """

    def __init__(self, setup: DeviceSetup) -> None:
        self.setup = setup
        self.first_ms: Mapping[tuple[str, Plan], float] = {}
        self.spent: dict[Phase, float] = defaultdict(float)
        self.notes: list[str] = []
        self._processes: dict[str, BackendProcess] = {}
        self._launches: list[float] = []  # milliseconds, one of each visit so far
        self._usual_ms: float | None = None  # their median when the case began: one for all plans that are compared
        self._stopped = threading.Event()
        self._watch = Watch(setup.uuid)
        self._pool = ThreadPoolExecutor(_backends_at_a_time(setup.device), thread_name_prefix=f"{setup.device}")

    def __enter__(self) -> DeviceSweep:
        self._watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.worker.close()
        self._pool.shutdown()
        self._watch.__exit__(None, None, None)
        if self._watch.note and self.setup.device.type == "cuda":
            self.notes.append(f"{self.setup.device}: {self._watch.note}")

    def stop(self) -> None:
        """End whatever is running.  May be called from any thread."""
        self._stopped.set()
        for process in list(self._processes.values()):
            process.worker.kill()

    def start(self, plans: Iterable[Plan]) -> None:
        """Start the plans' processes, so that they import what they need before anything is timed."""
        for process in {self._place(plan): self._process_of(plan) for plan in plans}.values():
            with suppress(LostError):  # the first request starts it again, and its row then has the reason
                process.worker.start()

    def measure(
        self, case: Case, plans: Sequence[Plan], required: Collection[Plan] = ()
    ) -> Iterator[PhaseStarted | Measurement]:
        """Yield the rows of a case, each as soon as it is known.  Raises StoppedError.

        In a race the ``required`` plans are measured in full, however slow they are.  A plan that ran out of memory
        beside the other plans is measured once more alone.
        """
        lost: dict[Plan, LostError] = {}
        race = None
        self._usual_ms = self._launch_ms()
        if self.setup.race and len(plans) > 1:
            lost, race = yield from self._race(case, plans, required)
        elif plans:
            lost = yield from self._together(case, plans)
        for plan, reason in lost.items():
            if reason.status == "oom" and len(plans) > 1:
                alone = yield from self._together(case, [plan]) if race is None else self._late(case, plan, race)
                if alone:
                    yield self._failed(case, plan, alone[plan])
            else:
                yield self._failed(case, plan, reason)

    def _together(
        self, case: Case, plans: Sequence[Plan]
    ) -> Generator[PhaseStarted | Measurement, None, dict[Plan, LostError]]:
        started = datetime.now(timezone.utc)
        lost: dict[Plan, LostError] = {}
        yield PhaseStarted("preparing", case)
        prepared = self._prepared(plans, lambda process, plan: (process.open(case), process.prepare(plan)), lost)
        yield PhaseStarted("timing", case)
        samples = self._time(case, list(prepared), lost)
        yield PhaseStarted("judging", case)
        yield from self._judge(case, prepared, samples, started, lost)
        self._in_parallel("judging", plans, lambda process, _: process.close())
        return lost

    def _race(
        self, case: Case, plans: Sequence[Plan], required: Collection[Plan]
    ) -> Generator[PhaseStarted | Measurement, None, tuple[dict[Plan, LostError], Race]]:
        """Look at the plans, time those that may win, judge the fastest, and go on behind those that were wrong."""
        started = datetime.now(timezone.utc)
        lost: dict[Plan, LostError] = {}
        race = Race(plans, required, self._emulated(plans))
        prepared: dict[Plan, tuple[Opened, Prepared]] = {}

        run = partial(_run, case)

        def prove(process: BackendProcess, plan: Plan) -> tuple[Opened, Prepared]:
            opened, first = prepared[plan]
            return opened, process.prove(plan, first.first_ms)

        while True:
            while unseen := race.unseen():
                yield PhaseStarted("preparing", case)
                prepared.update(self._prepared(unseen, run, lost))
                yield PhaseStarted("timing", case)
                self._look([plan for plan in unseen if plan in prepared], race, lost)
            self._look(race.doubtful(), race, lost)
            if entrants := race.entrants():
                self._drop([plan for plan in prepared if plan not in entrants])
                race.timed.update(self._time(case, entrants, lost, replay=False, beaten=_BEATEN, required=required))
            finalists = race.finalists()
            if not (entrants or finalists):
                break
            self._drop([plan for plan in prepared if plan not in finalists])
            yield PhaseStarted("judging", case)
            proved = self._prepared(finalists, prove, lost)
            accurate = set()
            for row in self._judge(case, proved, {plan: race.timed[plan] for plan in proved}, started, lost):
                if row.status == "ok":
                    accurate.add(row.plan)
                yield row
            for plan in {*finalists, *lost} - accurate:
                race.leave(plan)
        for plan, reason in race.slower().items():
            yield self._slower(case, plan, reason, race)
        self._in_parallel("judging", plans, lambda process, _: process.close())
        return lost, race

    def _late(
        self, case: Case, plan: Plan, race: Race
    ) -> Generator[PhaseStarted | Measurement, None, dict[Plan, LostError]]:
        """A plan that had no memory in the race: a look at it alone, and if it may win all that it was not given."""
        lost: dict[Plan, LostError] = {}
        yield PhaseStarted("preparing", case)
        if self._prepared([plan], partial(_run, case), lost):
            visited = self._visitor(BackendProcess.look, lost)(plan)
            if visited is not None:
                race.rejoin(plan, visited)
        if lost:
            return lost
        if plan in race.entrants():
            self._drop([plan])
            return (yield from self._together(case, [plan]))
        yield self._slower(case, plan, race.slower()[plan], race)
        self._in_parallel("judging", [plan], lambda process, _: process.close())
        return lost

    def _slower(self, case: Case, plan: Plan, reason: str, race: Race) -> Measurement:
        samples = race.known(plan)
        gpu = self._watch.between(*samples.spans) if samples.spans else None
        return slower_row(case, plan, reason, samples, gpu, self.setup)

    def _drop(self, plans: Sequence[Plan]) -> None:
        """Release plans, so that their memory serves the others."""
        self._in_parallel("preparing", plans, BackendProcess.drop)

    def _look(self, plans: Sequence[Plan], race: Race, lost: dict[Plan, LostError]) -> None:
        """Time each plan once, after the device has been warmed for the first time in a case."""
        visit = self._visitor(BackendProcess.look, lost)
        if not race.looks:
            plans = warm(plans, visit, partial(self._watch.steady, time.perf_counter()))
        for plan in plans:
            visited = visit(plan)
            if visited is not None:
                race.looks.setdefault(plan, Samples()).add(visited)
        for plan in lost:
            race.leave(plan)

    def _prepared(
        self,
        plans: Sequence[Plan],
        work: Callable[[BackendProcess, Plan], tuple[Opened, Prepared]],
        lost: dict[Plan, LostError],
    ) -> dict[Plan, tuple[Opened, Prepared]]:
        """What preparing each plan gave; those that failed are added to ``lost``."""
        found = self._in_parallel("preparing", plans, work)
        lost |= {plan: each for plan, each in found.items() if isinstance(each, LostError)}
        return {plan: each for plan, each in found.items() if not isinstance(each, LostError)}

    def _judge(
        self,
        case: Case,
        prepared: Mapping[Plan, tuple[Opened, Prepared]],
        samples: Mapping[Plan, Samples],
        started: datetime,
        lost: dict[Plan, LostError],
    ) -> Iterator[Measurement]:
        """The rows of plans that were timed; those that failed are added to ``lost``."""
        for plan, findings in self._in_parallel("judging", list(samples), BackendProcess.conclude).items():
            if isinstance(findings, LostError):
                lost[plan] = findings
                continue
            opened, first = prepared[plan]
            if (case.name, plan) in self.first_ms:
                first = replace(first, first_ms=self.first_ms[case.name, plan])
            gathered = samples[plan]
            gpu = self._watch.between(*gathered.spans)
            try:
                row = measured_row(case, plan, opened, first, gathered, findings, gpu, started, self.setup)
            except ValidationError as error:  # a number outside a record's range costs only this row
                detail = error.errors(include_url=False, include_input=False)[0]
                where = ".".join(map(str, detail["loc"]))
                lost[plan] = LostError("error", f"no record holds its {where}: {detail['msg']}", died=False)
            else:
                yield row

    def _in_parallel(
        self, phase: Phase, plans: Sequence[Plan], work: Callable[[BackendProcess, Plan], _T]
    ) -> dict[Plan, _T | LostError]:
        """Work on the plans while nothing is timed: processes in parallel, each process's plans one after the other."""
        by_process: dict[str, list[Plan]] = {}
        for plan in plans:
            self._process_of(plan)  # made here, because the pool's threads must not make one twice
            by_process.setdefault(self._place(plan), []).append(plan)

        def work_through(own: Sequence[Plan]) -> dict[Plan, _T | LostError]:
            found: dict[Plan, _T | LostError] = {}
            for plan in own:
                if self._stopped.is_set():
                    break
                try:
                    found[plan] = work(self._process_of(plan), plan)
                except LostError as error:
                    found[plan] = error
            return found

        start = time.perf_counter()
        found: dict[Plan, _T | LostError] = {}
        for each in self._pool.map(work_through, by_process.values()):
            found |= each
        self.spent[phase] += time.perf_counter() - start
        self._check()
        return {plan: found[plan] for plan in plans}

    def _time(
        self, case: Case, plans: Sequence[Plan], lost: dict[Plan, LostError], *, replay: bool = True, **how: Any
    ) -> dict[Plan, Samples]:
        steady = partial(self._watch.steady, time.perf_counter())
        emulated = self._emulated(plans)
        brief = emulated if len(emulated) < len(plans) else ()
        visit = self._visitor(partial(BackendProcess.sample, replay=replay), lost)
        return interleave(plans, visit, self.setup.timer, case.name, steady, brief, **how)

    def _visitor(
        self, take: Callable[[BackendProcess, Plan, float | None], Visit], lost: dict[Plan, LostError]
    ) -> Callable[[Plan], Visit | None]:
        """A function that takes a plan's samples, or adds the plan to ``lost`` and returns None.

        Times are given for the host as fast as it was in the median from the sweep's begin to the case's.
        """

        def visit(plan: Plan) -> Visit | None:
            process = self._process_of(plan)
            self._check()
            try:
                visited = _credible(take(process, plan, self._usual_ms or self._launch_ms()))
            except LostError as error:
                self._check()
                lost[plan] = error
                process.drop(plan)
                return None
            self.spent["timing"] += visited.span[1] - visited.span[0]
            if visited.launch_ms:
                self._launches.append(visited.launch_ms)
            return visited

        return visit

    def _launch_ms(self) -> float | None:
        """The median so far of what the host needs to start a small kernel; None on a CPU."""
        return median(self._launches) if self._launches else None

    def _emulated(self, plans: Sequence[Plan]) -> list[Plan]:
        return [plan for plan in plans if self.setup.registry.emulated(plan, self.setup.device.type)]

    def _check(self) -> None:
        if self._stopped.is_set():
            raise StoppedError

    def _failed(self, case: Case, plan: Plan, lost: LostError) -> Measurement:
        return unmeasured_row(case, plan, lost.status, [lost.reason], self.setup)

    def _process_of(self, plan: Plan) -> BackendProcess:
        place = self._place(plan)
        if place not in self._processes:
            setting = Setting(self.setup.source, self.setup.timer, torch.get_num_threads())
            self._processes[place] = BackendProcess(Worker(setting), self.setup.seconds)
        return self._processes[place]

    def _place(self, plan: Plan) -> str:
        """The name of the plan's process: its backend, or its forward kernel if the backend compiles."""
        backend = backend_of(plan.forward)
        return plan.forward if self.setup.registry.backends[backend].compiles else backend


def _run(case: Case, process: BackendProcess, plan: Plan) -> tuple[Opened, Prepared]:
    """Run the plan without a proof, which only finalists need."""
    return process.open(case), process.prepare(plan, prove=False)


def _credible(visit: Visit) -> Visit:
    """The visit.  Raises LostError if a sample is not a positive finite time."""
    for cost, taken in visit.time_ms.items():
        if odd := [sample for sample in taken if not (math.isfinite(sample) and sample > 0)]:
            raise LostError("error", f"a sample of the cost {cost} took {odd[0]:g} ms", died=False)
    return visit


def _backends_at_a_time(device: torch.device) -> int:
    """How many backends work at once while nothing is timed.

    Compiling needs a CPU core.  A CPU's kernels need all, but most of the time one is compiled, interpreted or checked;
    of more than two the memory for exact attention would be needed too often at once.
    """
    return max(1, min(16, usable_cores() * 3 // 4)) if device.type == "cuda" else min(2, usable_cores())
