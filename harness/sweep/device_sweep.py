"""One device's part of a sweep: case by case, every backend in its own process, the candidates in turns."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Literal, TypeVar

import torch
from pydantic import ValidationError

from attnbench.kernels.plan import Plan, backend_of

from ..cases.case import Case
from ..measure.clocks import Watch
from ..measure.findings import Findings, Opened, Prepared, Visit
from ..measure.setup import DeviceSetup
from ..measure.worker import Setting
from ..results.records import Measurement
from .backend_process import BackendProcess
from .compile_ahead import usable_cores
from .interleave import Samples, interleaved
from .rows import measured, passed_over
from .worker_process import LostError, Worker

__all__ = ["DeviceSweep", "Phase", "PhaseStarted", "StoppedError"]

_T = TypeVar("_T")
Phase = Literal["compiling", "preparing", "timing", "judging"]
_PREPARING: Phase = "preparing"
_TIMING: Phase = "timing"
_JUDGING: Phase = "judging"


class StoppedError(Exception):
    """The sweep was told to end; what is under way is of no use any more."""


@dataclass(frozen=True)
class PhaseStarted:
    """What a device is at: a phase of a case, or of all of them."""

    phase: Phase
    case: Case | None = None


class DeviceSweep:
    """Measures on one device until it is stopped.  Used from one thread, which must live as long as the context.

    ``spent`` counts the seconds of each phase; what a sweep takes beyond them is its own.
    ``first_ms`` holds, by case and plan, the first runs that were made ahead, elsewhere.
    """

    def __init__(self, setup: DeviceSetup) -> None:
        self.setup = setup
        self.first_ms: Mapping[tuple[str, Plan], float] = {}
        self.spent: dict[Phase, float] = defaultdict(float)
        self.notes: list[str] = []
        self._processes: dict[str, BackendProcess] = {}
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
        """End what is under way, from any thread."""
        self._stopped.set()
        for process in list(self._processes.values()):
            process.worker.kill()

    def start(self, plans: Iterable[Plan]) -> None:
        """Let the plans' processes import what they need while nothing is timed yet."""
        for process in {self._place(plan): self._process_of(plan) for plan in plans}.values():
            with suppress(LostError):  # it is started by the first request else, whose row then says why it was not
                process.worker.start()

    def measure(self, case: Case, plans: Sequence[Plan]) -> Iterator[PhaseStarted | Measurement]:
        """The rows of a case, each as soon as it is known.  Raises StoppedError.

        A plan for which memory did not suffice beside the other candidates is measured once
        more without them.
        """
        lost = (yield from self._together(case, plans)) if plans else {}
        for plan, reason in lost.items():
            if reason.status == "oom" and len(plans) > 1:
                alone = yield from self._together(case, [plan])
                if alone:
                    yield self._failed(case, plan, alone[plan])
            else:
                yield self._failed(case, plan, reason)

    def _together(
        self, case: Case, plans: Sequence[Plan]
    ) -> Generator[PhaseStarted | Measurement, None, dict[Plan, LostError]]:
        started = datetime.now(timezone.utc)
        lost: dict[Plan, LostError] = {}
        yield PhaseStarted(_PREPARING, case)
        prepared = self._prepared(case, plans, lost)
        yield PhaseStarted(_TIMING, case)
        samples = self._timed(case, list(prepared), lost)
        yield PhaseStarted(_JUDGING, case)
        for plan, findings in self._abreast(_JUDGING, list(samples), self._judge).items():
            if isinstance(findings, LostError):
                lost[plan] = findings
                continue
            opened, first = prepared[plan]
            if (case.name, plan) in self.first_ms:
                first = replace(first, first_ms=self.first_ms[case.name, plan])
            gathered = samples[plan]
            gpu = self._watch.between(*gathered.spans)
            try:
                row = measured(case, plan, opened, first, gathered, findings, gpu, started, self.setup)
            except ValidationError as error:  # a number that no record holds costs its own row
                said = error.errors(include_url=False, include_input=False)[0]
                where = ".".join(map(str, said["loc"]))
                lost[plan] = LostError("error", f"no record holds its {where}: {said['msg']}", died=False)
            else:
                yield row
        self._abreast(_JUDGING, plans, self._close)
        return lost

    def _abreast(
        self, phase: Phase, plans: Sequence[Plan], work: Callable[[BackendProcess, Plan], _T]
    ) -> dict[Plan, _T | LostError]:
        """Work on the plans, each process's one after the other, several at a time, where nothing is timed."""
        by_seat: dict[str, list[Plan]] = {}
        for plan in plans:
            self._process_of(plan)  # made here, because the pool's threads must not make one twice
            by_seat.setdefault(self._place(plan), []).append(plan)

        def go_on(own: Sequence[Plan]) -> dict[Plan, _T | LostError]:
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
        for each in self._pool.map(go_on, by_seat.values()):
            found |= each
        self.spent[phase] += time.perf_counter() - start
        self._check()
        return {plan: found[plan] for plan in plans}

    @staticmethod
    def _judge(process: BackendProcess, plan: Plan) -> Findings:
        return process.conclude(plan)

    @staticmethod
    def _close(process: BackendProcess, plan: Plan) -> None:
        process.close()

    def _prepared(
        self, case: Case, plans: Sequence[Plan], lost: dict[Plan, LostError]
    ) -> dict[Plan, tuple[Opened, Prepared]]:
        """First runs."""

        def prepare(process: BackendProcess, plan: Plan) -> tuple[Opened, Prepared]:
            return process.open(case), process.prepare(plan)

        found = self._abreast(_PREPARING, plans, prepare)
        lost |= {plan: each for plan, each in found.items() if isinstance(each, LostError)}
        return {plan: each for plan, each in found.items() if not isinstance(each, LostError)}

    def _timed(self, case: Case, plans: Sequence[Plan], lost: dict[Plan, LostError]) -> dict[Plan, Samples]:
        def visit(plan: Plan) -> Visit | None:
            process = self._process_of(plan)
            self._check()
            try:
                visited = _credible(process.sample(plan))
            except LostError as error:
                self._check()
                lost[plan] = error
                process.drop(plan)
                return None
            self.spent[_TIMING] += visited.span[1] - visited.span[0]
            return visited

        steady = partial(self._watch.steady, time.perf_counter())
        emulated = [plan for plan in plans if self.setup.registry.emulated(plan, self.setup.device.type)]
        brief = emulated if len(emulated) < len(plans) else ()
        return interleaved(plans, visit, self.setup.timer, case.name, steady, brief)

    def _check(self) -> None:
        if self._stopped.is_set():
            raise StoppedError

    def _failed(self, case: Case, plan: Plan, lost: LostError) -> Measurement:
        return passed_over(case, plan, lost.status, [lost.reason], self.setup)

    def _process_of(self, plan: Plan) -> BackendProcess:
        place = self._place(plan)
        if place not in self._processes:
            setting = Setting(self.setup.source, self.setup.timer, torch.get_num_threads())
            self._processes[place] = BackendProcess(Worker(setting), self.setup.seconds)
        return self._processes[place]

    def _place(self, plan: Plan) -> str:
        """Whose process it is: the backend's, or where compilers make it wait the forward kernel's own."""
        backend = backend_of(plan.forward)
        return plan.forward if self.setup.registry.backends[backend].compiles else backend


def _credible(visit: Visit) -> Visit:
    """Raise LostError where a sample is no time at all, from which nothing may be concluded."""
    for cost, taken in visit.time_ms.items():
        if odd := [sample for sample in taken if not (math.isfinite(sample) and sample > 0)]:
            raise LostError("error", f"a sample of the cost {cost} took {odd[0]:g} ms", died=False)
    return visit


def _backends_at_a_time(device: torch.device) -> int:
    """While nothing is timed: compiling is work for a CPU core, and so is a CPU's own kernel."""
    return max(1, min(16, usable_cores() * 3 // 4)) if device.type == "cuda" else 1
