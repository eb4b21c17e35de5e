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
from ..measure.setup import Laboratory
from ..measure.worker import Setting
from ..results.records import Measurement
from .backend_process import Seat
from .compile_ahead import usable_cores
from .interleave import Samples, interleaved
from .rows import measured, passed_over
from .worker_process import LostError, Worker

__all__ = ["Doing", "Line", "Phase", "StoppedError"]

_T = TypeVar("_T")
Phase = Literal["compiling", "preparing", "timing", "judging"]
_PREPARING: Phase = "preparing"
_TIMING: Phase = "timing"
_JUDGING: Phase = "judging"


class StoppedError(Exception):
    """The sweep was told to end; what is under way is of no use any more."""


@dataclass(frozen=True)
class Doing:
    """What a device is at: a phase of a case, or of all of them."""

    phase: Phase
    case: Case | None = None


class Line:
    """Measures on one device until it is stopped.  Used from one thread, which must live as long as the context.

    ``spent`` counts the seconds of each phase; what a sweep takes beyond them is its own.
    ``first_ms`` holds, by case and plan, the first runs that were made ahead, elsewhere.
    """

    def __init__(self, laboratory: Laboratory) -> None:
        self.laboratory = laboratory
        self.first_ms: Mapping[tuple[str, Plan], float] = {}
        self.spent: dict[Phase, float] = defaultdict(float)
        self.notes: list[str] = []
        self._seats: dict[str, Seat] = {}
        self._stopped = threading.Event()
        self._watch = Watch(laboratory.uuid)
        self._pool = ThreadPoolExecutor(
            _backends_at_a_time(laboratory.device), thread_name_prefix=f"{laboratory.device}"
        )

    def __enter__(self) -> Line:
        self._watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for seat in self._seats.values():
            seat.worker.close()
        self._pool.shutdown()
        self._watch.__exit__(None, None, None)
        if self._watch.note and self.laboratory.device.type == "cuda":
            self.notes.append(f"{self.laboratory.device}: {self._watch.note}")

    def stop(self) -> None:
        """End what is under way, from any thread."""
        self._stopped.set()
        for seat in list(self._seats.values()):
            seat.worker.kill()

    def start(self, plans: Iterable[Plan]) -> None:
        """Let the plans' processes import what they need while nothing is timed yet."""
        for seat in {self._place(plan): self._seat(plan) for plan in plans}.values():
            with suppress(LostError):  # it is started by the first request else, whose row then says why it was not
                seat.worker.start()

    def measure(self, case: Case, plans: Sequence[Plan]) -> Iterator[Doing | Measurement]:
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
    ) -> Generator[Doing | Measurement, None, dict[Plan, LostError]]:
        started = datetime.now(timezone.utc)
        lost: dict[Plan, LostError] = {}
        yield Doing(_PREPARING, case)
        prepared = self._prepared(case, plans, lost)
        yield Doing(_TIMING, case)
        samples = self._timed(case, list(prepared), lost)
        yield Doing(_JUDGING, case)
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
                row = measured(case, plan, opened, first, gathered, findings, gpu, started, self.laboratory)
            except ValidationError as error:  # a number that no record holds costs its own row
                said = error.errors(include_url=False, include_input=False)[0]
                where = ".".join(map(str, said["loc"]))
                lost[plan] = LostError("error", f"no record holds its {where}: {said['msg']}", died=False)
            else:
                yield row
        self._abreast(_JUDGING, plans, self._close)
        return lost

    def _abreast(
        self, phase: Phase, plans: Sequence[Plan], work: Callable[[Seat, Plan], _T]
    ) -> dict[Plan, _T | LostError]:
        """Work on the plans, each process's one after the other, several at a time, where nothing is timed."""
        by_seat: dict[str, list[Plan]] = {}
        for plan in plans:
            self._seat(plan)  # made here, because the pool's threads must not make one twice
            by_seat.setdefault(self._place(plan), []).append(plan)

        def go_on(own: Sequence[Plan]) -> dict[Plan, _T | LostError]:
            found: dict[Plan, _T | LostError] = {}
            for plan in own:
                if self._stopped.is_set():
                    break
                try:
                    found[plan] = work(self._seat(plan), plan)
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
    def _judge(seat: Seat, plan: Plan) -> Findings:
        return seat.conclude(plan)

    @staticmethod
    def _close(seat: Seat, plan: Plan) -> None:
        seat.close()

    def _prepared(
        self, case: Case, plans: Sequence[Plan], lost: dict[Plan, LostError]
    ) -> dict[Plan, tuple[Opened, Prepared]]:
        """First runs."""

        def prepare(seat: Seat, plan: Plan) -> tuple[Opened, Prepared]:
            return seat.open(case), seat.prepare(plan)

        found = self._abreast(_PREPARING, plans, prepare)
        lost |= {plan: each for plan, each in found.items() if isinstance(each, LostError)}
        return {plan: each for plan, each in found.items() if not isinstance(each, LostError)}

    def _timed(self, case: Case, plans: Sequence[Plan], lost: dict[Plan, LostError]) -> dict[Plan, Samples]:
        def visit(plan: Plan) -> Visit | None:
            seat = self._seat(plan)
            self._check()
            try:
                visited = _credible(seat.sample(plan))
            except LostError as error:
                self._check()
                lost[plan] = error
                seat.drop(plan)
                return None
            self.spent[_TIMING] += visited.span[1] - visited.span[0]
            return visited

        steady = partial(self._watch.steady, time.perf_counter())
        emulated = [plan for plan in plans if self.laboratory.registry.emulated(plan, self.laboratory.device.type)]
        brief = emulated if len(emulated) < len(plans) else ()
        return interleaved(plans, visit, self.laboratory.timer, case.name, steady, brief)

    def _check(self) -> None:
        if self._stopped.is_set():
            raise StoppedError

    def _failed(self, case: Case, plan: Plan, lost: LostError) -> Measurement:
        return passed_over(case, plan, lost.status, [lost.reason], self.laboratory)

    def _seat(self, plan: Plan) -> Seat:
        place = self._place(plan)
        if place not in self._seats:
            setting = Setting(self.laboratory.source, self.laboratory.timer, torch.get_num_threads())
            self._seats[place] = Seat(Worker(setting), self.laboratory.seconds)
        return self._seats[place]

    def _place(self, plan: Plan) -> str:
        """Whose process it is: the backend's, or where compilers make it wait the forward kernel's own."""
        backend = backend_of(plan.forward)
        return plan.forward if self.laboratory.registry.backends[backend].compiles else backend


def _credible(visit: Visit) -> Visit:
    """Raise LostError where a sample is no time at all, from which nothing may be concluded."""
    for cost, taken in visit.time_ms.items():
        if odd := [sample for sample in taken if not (math.isfinite(sample) and sample > 0)]:
            raise LostError("error", f"a sample of the cost {cost} took {odd[0]:g} ms", died=False)
    return visit


def _backends_at_a_time(device: torch.device) -> int:
    """While nothing is timed: compiling is work for a CPU core, and so is a CPU's own kernel."""
    return max(1, min(16, usable_cores() * 3 // 4)) if device.type == "cuda" else 1
