"""The client of one backend's worker: it opens the case and prepares plans again whenever the worker was replaced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnbench.kernels.plan import Plan

from ..cases.case import Case
from ..measure.findings import Findings, Opened, Prepared, Visit
from .race import LOOKED_AT
from .worker_process import LostError, Worker

__all__ = ["BackendProcess"]

_MOST_REVIVALS = 3  # of a plan that ran before: beyond that its worker does not die of others


@dataclass
class BackendProcess:
    """One worker process, and what it knows of the open case.

    A worker that dies costs the plan that it was running.  The backend's other plans are prepared again in the next
    process, and sampled once before they are judged: a plan is judged in the state in which it is timed.

    A plan whose CUDA graph could not be recorded is not recorded again in later cases: each failure costs a process
    with all that it has compiled.
    """

    worker: Worker
    seconds: float
    _case: Case | None = None
    _opened: Opened | LostError | None = None
    _generation: int = 0
    _prepared: set[Plan] = field(default_factory=set)
    _revivals: dict[Plan, int] = field(default_factory=dict)
    _unrecordable: set[Plan] = field(default_factory=set)

    def open(self, case: Case) -> Opened:
        """Open the case.  Raises LostError; a case that could not be opened is not tried again for every plan."""
        if self._case is not case:
            self._case, self._opened = case, None
            self._prepared.clear()
            self._revivals.clear()
        return self._open()

    def _open(self) -> Opened:
        if isinstance(self._opened, LostError):
            raise self._opened
        if self._opened is None or self._generation != self.worker.generation or not self.worker.alive:
            self._prepared.clear()
            try:
                opened: Opened = self.worker.ask("open", self._case, seconds=self.seconds)
            except LostError as lost:
                self._opened = lost
                raise
            self._opened, self._generation = opened, self.worker.generation
        return self._opened

    def prepare(self, plan: Plan, prove: bool = True) -> Prepared:
        """Run the plan for the first time, and prove that it is what ran unless ``prove`` does later.

        Raises LostError.
        """
        self._open()
        prepared: Prepared = self.worker.ask("prepare", plan, *(() if prove else (False,)), seconds=self.seconds)
        self._prepared.add(plan)
        return prepared

    def prove(self, plan: Plan, first_ms: float) -> Prepared:
        """Prove what a plan runs whose first run took ``first_ms``.

        One that was released is prepared and sampled again.  Raises LostError.
        """
        if not self._knows(plan):
            prepared = self.prepare(plan)
            self._sampled(plan, replay=False)
            return prepared
        proved: Prepared = self.worker.ask("prove", plan, first_ms, seconds=self.seconds)
        return proved

    def look(self, plan: Plan, launch_ms: float | None = None) -> Visit:
        """A first look at the plan: samples of the costs that a race needs, none replayed.  Raises LostError.

        ``launch_ms``: of the host for which times are given (attnbench.harness.measure.trial), here and below.
        """
        self._revive(plan)
        visit: Visit = self.worker.ask("look", plan, LOOKED_AT, launch_ms, seconds=self.seconds)
        return visit

    def sample(self, plan: Plan, launch_ms: float | None = None, replay: bool = True) -> Visit:
        """Samples of every cost of the plan; without ``replay`` none is recorded.  Raises LostError."""
        self._revive(plan)
        visit = self._sampled(plan, launch_ms, replay)
        if visit.worn:
            self._unrecordable.add(plan)
            self._revivals.clear()  # it is not dying of its plans
            self.worker.close()
        return visit

    def _sampled(self, plan: Plan, launch_ms: float | None = None, replay: bool = True) -> Visit:
        replay = replay and plan not in self._unrecordable
        visit: Visit = self.worker.ask("sample", plan, replay, launch_ms, seconds=self.seconds)
        return visit

    def conclude(self, plan: Plan) -> Findings:
        """Judge the plan.  Raises LostError."""
        if self._revive(plan):
            self._sampled(plan)
        findings: Findings = self.worker.ask("conclude", plan, seconds=self.seconds)
        return findings

    def drop(self, plan: Plan) -> None:
        """Release a plan that was lost, or whose turn is over."""
        if self._knows(plan):
            self._release("drop", plan)
        self._prepared.discard(plan)

    def close(self) -> None:
        """Release the case."""
        if self._case is not None and self.worker.alive and self._generation == self.worker.generation:
            self._release("close")
        self._case = self._opened = None
        self._prepared.clear()

    def _knows(self, plan: Plan) -> bool:
        """Whether the running process has the plan prepared."""
        return plan in self._prepared and self.worker.alive and self._generation == self.worker.generation

    def _release(self, method: str, *arguments: Any) -> None:
        """Ask the worker to release something.  If it dies, its memory is free anyway, and the next case starts one."""
        try:
            self.worker.ask(method, *arguments, seconds=self.seconds)
        except LostError:
            self.worker.close()

    def _revive(self, plan: Plan) -> bool:
        """Prepare the plan again if the process that knew it is gone; True if it was."""
        if self._knows(plan):
            return False
        self._revivals[plan] = self._revivals.get(plan, 0) + 1
        if self._revivals[plan] > _MOST_REVIVALS:
            raise LostError("crashed", f"its worker died {_MOST_REVIVALS} times while other plans ran", died=False)
        self.prepare(plan)
        return True
