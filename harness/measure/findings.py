"""What a worker tells the sweep: plain values, so that nothing of torch or of the device crosses the pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .accuracy import Judgement, TensorName
from .timing import Cost

__all__ = ["Findings", "Opened", "Prepared", "Side", "Visit"]

Side = Literal["forward", "backward"]
Judgements = Mapping[TensorName, Judgement]


@dataclass(frozen=True)
class Opened:
    """A case is open: what its errors are taken on, whose random numbers its inputs are, what a sample of time is."""

    truth: str
    drawn_on: Literal["cpu", "cuda"]
    timer: str


@dataclass(frozen=True)
class Prepared:
    """A plan has run: milliseconds of its first run, with all that is compiled and tuned, and what was seen to run."""

    first_ms: float
    ran: Mapping[Side, list[str]]


@dataclass(frozen=True)
class Visit:
    """Samples of every cost of a plan, milliseconds, and the host's for each call.

    ``spans`` are the seconds (of the clock that all processes share) in which each cost was
    sampled; ``replayed`` the costs whose samples are replays of a CUDA graph; ``late_ms`` how
    long the device went on after the last call had ended on its stream.  ``worn``: a graph
    could not be recorded, after which not all of torch works as it should in this process.
    """

    time_ms: Mapping[Cost, list[float]]
    host_ms: list[float]
    span: tuple[float, float]
    replayed: tuple[Cost, ...]
    late_ms: float
    worn: bool = False


@dataclass(frozen=True)
class Findings:
    """What is known of a plan once it has been timed.

    ``judged``, ``floor`` and ``own`` map input families to judgements: against the truth, of
    exact attention on the quantised operands against the truth, and against that attention;
    the latter two lack the families in which nothing is quantised.  ``stale`` judges a run
    on inputs that were negated where they lie.  ``settled`` says that the result was the same
    once the device was idle, ``untouched`` that the inputs were.  ``deterministic`` compares
    two runs bit by bit, ``leak`` is how far outputs changed with what their mask hides.
    """

    judged: Mapping[str, Judgements]
    floor: Mapping[str, Judgements]
    own: Mapping[str, Judgements]
    stale: Judgements
    settled: bool
    untouched: bool
    deterministic: bool
    leak: float | None
    memory_bytes: int | None
    retained_bytes: int | None
