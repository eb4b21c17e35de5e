"""What a worker tells the sweep: plain values, so that nothing of torch or of the device crosses the pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .timing import Cost
from .verdict import Evidence

__all__ = ["Findings", "Opened", "Prepared", "Side", "Visit"]

Side = Literal["forward", "backward"]


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


@dataclass(frozen=True, kw_only=True)
class Findings(Evidence):
    """What is known of a plan once it has been timed: the evidence without its bound, and on what no verdict rests.

    ``deterministic`` compares two runs bit by bit, ``leak`` is how far outputs changed with what their mask hides.
    The bytes are those of ``attnbench.harness.results.records.Performance``.
    """

    deterministic: bool
    leak: float | None
    memory_bytes: int | None
    retained_bytes: int | None
