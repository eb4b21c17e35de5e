"""A backend's place at a case: its worker, told again what it must know whenever it had to be replaced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnbench.kernels.plan import Plan

from ..cases.case import Case
from ..measure.findings import Findings, Opened, Prepared, Visit
from .worker_process import LostError, Worker

__all__ = ["BackendProcess"]

_MOST_REVIVALS = 3  # of a plan that ran before: beyond that its worker does not die of others


@dataclass
class BackendProcess:
    """One worker, and what it has been told of the open case.

    A worker that dies costs the plan that it was asked about.  The others of its backend are
    prepared anew in the next process, and sampled once before they are judged, because they
    are to be judged in the state in which they are timed.

    A plan of which no graph could be recorded once is not tried again in later cases either:
    each failure costs a process, with all that it had compiled.
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
        """Open the case, or say again what came of it: what cannot be opened is not tried for every plan."""
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

    def prepare(self, plan: Plan) -> Prepared:
        """Run the plan for the first time.  Raises LostError."""
        self._open()
        prepared: Prepared = self.worker.ask("prepare", plan, seconds=self.seconds)
        self._prepared.add(plan)
        return prepared

    def sample(self, plan: Plan) -> Visit:
        """Samples of every cost of the plan.  Raises LostError."""
        self._revive(plan)
        visit = self._sampled(plan)
        if visit.worn:
            self._unrecordable.add(plan)
            self._revivals.clear()  # it is not dying of its plans
            self.worker.close()
        return visit

    def _sampled(self, plan: Plan) -> Visit:
        how = (False,) if plan in self._unrecordable else ()
        visit: Visit = self.worker.ask("sample", plan, *how, seconds=self.seconds)
        return visit

    def conclude(self, plan: Plan) -> Findings:
        """Judge the plan.  Raises LostError."""
        if self._revive(plan):
            self._sampled(plan)
        findings: Findings = self.worker.ask("conclude", plan, seconds=self.seconds)
        return findings

    def drop(self, plan: Plan) -> None:
        """Let go of a plan that was lost."""
        if plan in self._prepared and self.worker.alive and self._generation == self.worker.generation:
            self._told("drop", plan)
        self._prepared.discard(plan)

    def close(self) -> None:
        """Let go of the case."""
        if self._case is not None and self.worker.alive and self._generation == self.worker.generation:
            self._told("close")
        self._case = self._opened = None
        self._prepared.clear()

    def _told(self, method: str, *arguments: Any) -> None:
        """Where it dies of being told to forget, there is nothing left to forget: the next case gets a new process."""
        try:
            self.worker.ask(method, *arguments, seconds=self.seconds)
        except LostError:
            self.worker.close()

    def _revive(self, plan: Plan) -> bool:
        """Prepare the plan again if the process that knew it is gone; whether it was."""
        if plan in self._prepared and self.worker.alive and self._generation == self.worker.generation:
            return False
        self._revivals[plan] = self._revivals.get(plan, 0) + 1
        if self._revivals[plan] > _MOST_REVIVALS:
            raise LostError("crashed", f"its worker died {_MOST_REVIVALS} times while other plans ran", died=False)
        self.prepare(plan)
        return True
