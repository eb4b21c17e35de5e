"""BASE and NEW as the gate sees them: processes of two environments that hold the same rows, visited in turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from attnbench.errors import MisuseError
from attnbench.kernels.plan import Plan, backend_of
from attnbench.problem.spec import AttentionSpec

from ...measure.setup import INSTALLED
from ...sweep.compile_ahead import usable_cores
from ...sweep.worker_process import LostError, Worker
from ..terms import Key
from .worker import PROTOCOL

__all__ = ["SECONDS", "SIDES", "Question", "Side", "Sides", "Visited"]

Side = Literal["BASE", "NEW"]
SIDES: tuple[Side, Side] = ("BASE", "NEW")
_MODULE = "attnbench.harness.compare.gate.worker"
# glibc's malloc gives memory back, or keeps it, by what happened to be freed first: two processes of the same code
# were 19 % apart on a CPU in a kernel with large temporaries, and 1 % with these.
_STEADY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}
# Of this environment, which must not stand in for the other's packages.
_WITHOUT_OURS = {"PYTHONPATH": ""}
SECONDS = 300.0  # that one request to a process may take before it is a hang
_MOST_REVIVALS = 3  # of a process that dies while its rows are visited
_TOO_OLD = "No module named 'attnbench"
_Place = tuple[Side, str]  # a side and a backend
Visited = Mapping[str, float]  # by cost, the median of a visit's samples in milliseconds


@dataclass(frozen=True)
class Question:
    """What a row asks of both sides: its number, case and plan, spec, and the input family it is timed on."""

    number: int
    key: Key
    spec: AttentionSpec
    family: str

    @property
    def plan(self) -> Plan:
        """The plan that answers."""
        return self.key[1]

    @property
    def backend(self) -> str:
        """Whose process it is measured in."""
        return backend_of(self.plan.forward)


class Sides:
    """The processes, one for each side and backend, kept from row to row until the context is left.

    ``base`` is the Python of the environment that holds the old code; None where there is none, and a fixed piece
    of work, the anchor, stands in its place.  ``source`` names the registry's function, for tests.  Used from one
    thread, which must live as long as the context.
    """

    def __init__(self, device: torch.device, base: Path | None, source: str = INSTALLED) -> None:
        self._device, self._base, self._source = device, base, source
        self._workers: dict[_Place, Worker] = {}
        self._begun: dict[tuple[Side, int], int] = {}  # in which of its worker's processes
        self._revivals: Counter[_Place] = Counter()
        self._unrecordable: set[tuple[Side, int]] = set()
        # The system ties a process to the thread that started it, so these live as long as the processes.
        self._pool = ThreadPoolExecutor(max(1, usable_cores() // 2), thread_name_prefix="gate")

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._pool.shutdown()

    def close(self) -> None:
        """End every process: what is begun next starts in new ones."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._begun.clear()
        self._revivals.clear()

    @property
    def anchored(self) -> bool:
        """Whether BASE is not visited itself."""
        return self._base is None

    def start(self, questions: Iterable[Question]) -> None:
        """Let the processes import what they need, without waiting for them."""
        for side in SIDES:
            for backend in {each.backend for each in questions}:
                with suppress(LostError):  # the first request to it says why
                    self._worker(side, backend).start()

    def introduce(self, question: Question, say: Callable[[str], object]) -> None:
        """Say which environments are compared, as the processes of a row's backend know them.

        Raises MisuseError where BASE's cannot take part at all.
        """
        if self.anchored:
            return
        told = {}
        for side in SIDES:
            try:
                told[side] = self._about((side, question.backend))
            except LostError as error:
                if side == "BASE" and _TOO_OLD in error.reason:
                    raise MisuseError(f"{self._base} has no attnbench with a gate") from error
                return  # the backend's own fault, and said with its rows
            say(f"{side}: {', '.join(f'{name} {value}' for name, value in told[side].items())}")
        if told["BASE"] == told["NEW"]:
            say("both environments say the same of themselves: is the old one really the old one?")

    def _about(self, place: _Place) -> dict[str, str]:
        if (spoken := self._ask(place, "protocol")) != PROTOCOL:
            raise MisuseError(f"{self._base}: its attnbench speaks the gate's protocol {spoken}, not {PROTOCOL}")
        told: dict[str, str] = self._ask(place, "about")
        return told

    def begin(self, questions: Sequence[Question]) -> dict[int, tuple[Side, LostError]]:
        """Prepare the rows on both sides, several processes at a time: which were lost, where, and why."""
        self.start(questions)
        lost: dict[int, tuple[Side, LostError]] = {}

        def work(place: _Place) -> None:
            for each in questions:
                if each.backend == place[1]:
                    try:
                        self._begin(place[0], each)
                    except LostError as error:
                        lost.setdefault(each.number, (place[0], error))

        for _ in self._pool.map(work, list(self._workers)):
            pass
        return lost

    def visit(self, side: Side, question: Question, costs: Sequence[str]) -> Visited:
        """Visit a row.  Raises LostError."""
        place = side, question.backend
        worker = self._workers[place]
        if self._begun.get((side, question.number)) != worker.generation or not worker.alive:
            self._revivals[place] += 1
            if self._revivals[place] > _MOST_REVIVALS:
                raise LostError("crashed", f"its process died {_MOST_REVIVALS} times", died=False)
            self._begin(side, question)
        key = side, question.number
        method = "anchor" if side == "BASE" and self._base is None else "visit"
        samples = self._ask(place, method, question.number, list(costs), key not in self._unrecordable)
        if any(samples.pop("worn", ())):
            self._unrecordable.add(key)
            worker.close()
        return {cost: median(samples[cost]) for cost in costs if samples.get(cost)}

    def end(self, question: Question) -> None:
        """Let go of a row on both sides; a process that dies of that is replaced when it is next asked."""
        for side in SIDES:
            place = side, question.backend
            worker, begun = self._workers.get(place), self._begun.pop((side, question.number), None)
            if worker is not None and worker.alive and begun == worker.generation:
                with suppress(LostError):
                    self._ask(place, "end", question.number)

    def _worker(self, side: Side, backend: str) -> Worker:
        place = side, backend
        if place not in self._workers:
            setting = {"source": self._source, "device": str(self._device), "threads": torch.get_num_threads()}
            python = self._base if side == "BASE" else None
            environ = _STEADY if python is None else {**_STEADY, **_WITHOUT_OURS}
            self._workers[place] = Worker(setting, module=_MODULE, python=python, environ=environ)
        return self._workers[place]

    def _ask(self, place: _Place, method: str, *arguments: object) -> Any:
        return self._workers[place].ask(method, *arguments, seconds=SECONDS)

    def _begin(self, side: Side, question: Question) -> None:
        place = side, question.backend
        name, spec = question.key[0], question.spec.to_dict()
        self._ask(place, "begin", question.number, name, spec, question.family, str(question.plan))
        self._begun[side, question.number] = self._workers[place].generation
