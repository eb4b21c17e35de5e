"""One open case on one device and the plans that are prepared for it: the object that a worker serves."""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import cached_property

import torch

from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry

from ..cases.case import Case
from .findings import Findings, Opened, Prepared, Visit
from .open_case import OpenCase
from .setup import registry_of
from .timing import COSTS, Cost, Timer
from .trial import Trial

__all__ = ["Bench"]


class Bench:
    """Opens one case after the other.  Each method serves a request: it may take long, raise, or never return."""

    def __init__(self, source: str, timer: Timer) -> None:
        self.timer = timer
        self._source = source
        self._open: OpenCase | None = None
        self._trials: dict[Plan, Trial] = {}
        if timer.device.type == "cuda":
            torch.cuda.set_device(timer.device)

    @cached_property
    def registry(self) -> Registry:
        """Made by the first request and not before, because an import may be the fault to report."""
        return registry_of(self._source)

    def open(self, case: Case) -> Opened:
        """Draw the inputs; truths are computed for the first plan that is judged."""
        self.close()
        self._open = OpenCase(case, self.registry, self.timer.device)
        return Opened(self._open.buffers.drawn_on, self.timer.conditions)

    def compile(self, case: Case, plan: Plan) -> float:
        """Milliseconds of the plan's first run in this process, which leaves the compiled code on the disk."""
        self.close()
        return _first_run(plan, OpenCase(case, self.registry, self.timer.device))[1]

    def prepare(self, plan: Plan, prove: bool = True) -> Prepared:
        """Run the plan for the first time, and prove that it is what ran, now or by ``prove``."""
        assert self._open is not None, "a case is opened first"
        self._open.load_first()
        trial, first_ms = _first_run(plan, self._open)
        self._trials[plan] = trial
        return self._proved(trial, first_ms) if prove else Prepared(first_ms, {})

    def prove(self, plan: Plan, first_ms: float) -> Prepared:
        """Prove that a prepared plan is what runs; ``first_ms`` is that of its first run."""
        trial = self._trials[plan]
        trial.case.load_first()
        return self._proved(trial, first_ms)

    def _proved(self, trial: Trial, first_ms: float) -> Prepared:
        trial.run(prove=True)
        trial.restore()
        return Prepared(first_ms, trial.ran)

    def sample(self, plan: Plan, replay: bool = True, launch_ms: float | None = None) -> Visit:
        """Samples of every cost of a prepared plan; ``replay`` lets short ones be recorded as CUDA graphs."""
        return self._sampled(plan, self.timer, replay, COSTS, launch_ms)

    def look(self, plan: Plan, costs: Collection[Cost], launch_ms: float | None = None) -> Visit:
        """A few samples of these costs of a prepared plan, none replayed."""
        return self._sampled(plan, self.timer.brief, False, costs, launch_ms)

    def _sampled(
        self, plan: Plan, timer: Timer, replay: bool, costs: Collection[Cost], launch_ms: float | None
    ) -> Visit:
        trial = self._trials[plan]
        trial.case.load_first()
        return trial.sample(timer, replay, costs, launch_ms)

    def conclude(self, plan: Plan) -> Findings:
        """The plan's errors, in the state that the samples left, and its other findings."""
        trial = self._trials.pop(plan)
        trial.case.load_first()
        with torch.no_grad():
            return trial.conclude()

    def drop(self, plan: Plan) -> None:
        """Release a prepared plan."""
        self._trials.pop(plan, None)
        self._free()

    def close(self) -> None:
        """Release the case, its plans and their memory."""
        self._trials.clear()
        self._open = None
        self._free()

    def _free(self) -> None:
        """Return unused memory to the device, which other processes share."""
        if self.timer.device.type == "cuda":
            torch.cuda.empty_cache()


def _first_run(plan: Plan, case: OpenCase) -> tuple[Trial, float]:
    """The plan's trial after one run and one call, and the milliseconds of making and running it."""
    start = time.perf_counter()
    trial = Trial(plan, case)
    trial.run()
    trial.synchronize()
    first_ms = (time.perf_counter() - start) * 1e3
    trial.call()
    return trial, first_ms
