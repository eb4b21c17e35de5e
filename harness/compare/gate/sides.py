"""BASE and NEW for the gate: processes of two environments that hold the same rows and are visited in turns."""

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
from ...measure.timing import Timer
from ...sequence_lengths import SequenceLengths
from ...sweep.worker_pool import usable_cores
from ...sweep.worker_process import LostError, Worker
from ..terms import Key
from .worker import PROTOCOL

__all__ = ["SECONDS", "SIDES", "Question", "Side", "Sides", "Visited"]

Side = Literal["BASE", "NEW"]
SIDES: tuple[Side, Side] = ("BASE", "NEW")
_MODULE = "attnbench.harness.compare.gate.worker"
# Whether glibc's malloc returns memory depends on what was freed first: two processes of the same code were 19 % apart
# on a CPU in a kernel with large temporaries, and 1 % with these settings.
_STEADY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}
# This environment's path must not replace the other environment's packages.
_WITHOUT_OURS = {"PYTHONPATH": ""}
SECONDS = 300.0  # that one request to a process may take before it is a hang
_MOST_REVIVALS = 3  # of a process that dies while its rows are visited
_TOO_OLD = "No module named 'attnbench"
_Place = tuple[Side, str]  # a side and a backend
Visited = Mapping[str, float]  # by cost, the median of a visit's samples in milliseconds


@dataclass(frozen=True)
class Question:
    """A row to measure on both sides: its number, case and plan, spec, the input family for its timing, and lengths."""

    number: int
    key: Key
    spec: AttentionSpec
    family: str
    lengths: SequenceLengths | None = None

    @property
    def plan(self) -> Plan:
        """The row's plan."""
        return self.key[1]

    @property
    def backend(self) -> str:
        """The backend in whose process it is measured."""
        return backend_of(self.plan.forward)


class Sides:
    """The processes, one for each side and backend, kept until the context is left.

    ``base`` is the Python of the environment with the old code; None if a fixed piece of work, the anchor, takes its
    place.  ``source`` names the registry's function, for tests.  Used from one thread, which must outlive the context.
    """

    def __init__(self, device: torch.device, base: Path | None, source: str = INSTALLED) -> None:
        self._device, self._base, self._source = device, base, source
        self._workers: dict[_Place, Worker] = {}
        self._begun: dict[tuple[Side, int], int] = {}  # the generation of the worker that has the row
        self._revivals: Counter[_Place] = Counter()
        self._unrecordable: set[tuple[Side, int]] = set()
        # The system ties a process to the thread that started it, so this pool lives as long as the processes.
        self._pool = ThreadPoolExecutor(max(1, usable_cores() // 2), thread_name_prefix="gate")

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._pool.shutdown()

    def close(self) -> None:
        """End every process; the next rows start new ones."""
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
        """Start the processes, which import what they need, without waiting for them."""
        for side in SIDES:
            for backend in {each.backend for each in questions}:
                with suppress(LostError):  # the first request to it says why
                    self._worker(side, backend).start()

    def introduce(self, question: Question, say: Callable[[str], object]) -> None:
        """Say which environments are compared.  Raises MisuseError if BASE's cannot take part."""
        if self.anchored:
            return
        facts = {}
        for side in SIDES:
            try:
                facts[side] = self._about((side, question.backend))
            except LostError as error:
                if side == "BASE" and _TOO_OLD in error.reason:
                    raise MisuseError(f"{self._base} has no attnbench with a gate") from error
                return  # the backend's own fault; its rows report it
            say(f"{side}: {', '.join(f'{name} {value}' for name, value in facts[side].items())}")
        if facts["BASE"] == facts["NEW"]:
            say("both environments say the same of themselves: is the old one really the old one?")

    def _about(self, place: _Place) -> dict[str, str]:
        if (spoken := self._ask(place, "protocol")) != PROTOCOL:
            raise MisuseError(f"{self._base}: its attnbench speaks the gate's protocol {spoken}, not {PROTOCOL}")
        facts: dict[str, str] = self._ask(place, "about")
        return facts

    def begin(self, questions: Sequence[Question]) -> dict[int, tuple[Side, LostError]]:
        """Prepare the rows on both sides, several processes at a time; returns those lost, with side and reason."""
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
        """Release a row on both sides; a process that dies of it is replaced by the next request."""
        for side in SIDES:
            place = side, question.backend
            worker, begun = self._workers.get(place), self._begun.pop((side, question.number), None)
            if worker is not None and worker.alive and begun == worker.generation:
                with suppress(LostError):
                    self._ask(place, "end", question.number)

    def _worker(self, side: Side, backend: str) -> Worker:
        place = side, backend
        if place not in self._workers:
            device, core = str(self._device), Timer.for_device(self._device).core  # one for both sides
            setting = {"source": self._source, "device": device, "threads": torch.get_num_threads(), "core": core}
            python = self._base if side == "BASE" else None
            environ = _STEADY if python is None else {**_STEADY, **_WITHOUT_OURS}
            self._workers[place] = Worker(setting, module=_MODULE, python=python, environ=environ)
        return self._workers[place]

    def _ask(self, place: _Place, method: str, *arguments: object) -> Any:
        return self._workers[place].ask(method, *arguments, seconds=SECONDS)

    def _begin(self, side: Side, question: Question) -> None:
        place = side, question.backend
        name, spec = question.key[0], question.spec.to_dict()
        lengths = () if question.lengths is None else (question.lengths.model_dump_json(),)
        self._ask(place, "begin", question.number, name, spec, question.family, str(question.plan), *lengths)
        self._begun[side, question.number] = self._workers[place].generation
