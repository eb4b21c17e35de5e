"""What a worker sends to the sweep: plain values, so that nothing of torch or of the device crosses the pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .timing import Cost
from .verdict import Observations

__all__ = ["Findings", "Opened", "Prepared", "Side", "Visit"]

Side = Literal["forward", "backward"]


@dataclass(frozen=True)
class Opened:
    """A case is open: where its inputs were drawn, and what a sample of time is."""

    drawn_on: Literal["cpu", "cuda"]
    timer: str


@dataclass(frozen=True)
class Prepared:
    """A plan has run: milliseconds of its first run, compiling and tuning included, and the kernels that ran.

    ``ran`` is empty as long as the plan was not proved.
    """

    first_ms: float
    ran: Mapping[Side, list[str]]


@dataclass(frozen=True)
class Visit:
    """One visit's samples in milliseconds of every cost of a plan, and the host's milliseconds for each call.

    ``span`` is the start and the end in seconds of ``time.perf_counter``, which all processes share.  ``replayed`` are
    the costs whose samples are replays of a CUDA graph.  ``late_ms`` is how long the device worked on after the last
    call had ended on its stream.  ``worn``: a graph could not be recorded, so torch may misbehave in this process.

    ``launch_ms`` is what the host needed during the samples of the call to start a small kernel, None on a CPU.  The
    host's part of the call was multiplied by ``host_scale``.
    """

    time_ms: Mapping[Cost, list[float]]
    host_ms: list[float]
    span: tuple[float, float]
    replayed: tuple[Cost, ...]
    late_ms: float
    worn: bool = False
    launch_ms: float | None = None
    host_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Findings(Observations):
    """What is known of a plan once it has been timed: the evidence, except its bound, and numbers without a verdict.

    ``truth`` says how the truth was computed.  ``deterministic`` compares two runs bit by bit, ``leak`` is how far
    outputs changed with what their mask hides.  The bytes are those of
    ``attnbench.harness.results.records.Performance``.
    """

    truth: str
    deterministic: bool
    leak: float | None
    memory_bytes: int | None
    retained_bytes: int | None
