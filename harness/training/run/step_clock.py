"""Time each step and read its results without making the device wait for the host."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["StepClock", "Stepped"]

_BEHIND = 4  # steps by which the host's reading lags, so that launches overlap with kernels


class Stepped(NamedTuple):
    """A step that has ended: its milliseconds, loss and gradient norm."""

    step: int
    ms: float
    loss: float
    grad_norm: float


class StepClock:
    """Times steps from their first operation to their last.

    On a GPU by events on the current stream: a step's time includes gaps between its kernels that a slow host causes,
    but nothing between steps.  On a CPU by wall time.  On a GPU results come some steps later: ``ended`` returns those
    that are known.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._open: deque[tuple[int, torch.cuda.Event | float, torch.cuda.Event | float, Tensor]] = deque()
        self._start: torch.cuda.Event | float = 0.0

    def start(self) -> None:
        """Mark the start of a step."""
        self._start = self._now()

    def stop(self, step: int, found: Tensor) -> None:
        """Mark the end of a launched step; ``found`` (2,) will hold loss and gradient norm."""
        self._open.append((step, self._start, self._now(), found))

    def ended(self, *, all: bool = False) -> list[Stepped]:
        """The steps that have ended since the last call; ``all`` waits for every step."""
        left = 0 if all or not self._gpu else _BEHIND
        known = []
        while len(self._open) > left:
            step, start, stop, found = self._open.popleft()
            if isinstance(start, float) or isinstance(stop, float):
                ms = (float(stop) - float(start)) * 1e3  # type: ignore[arg-type]
            else:
                stop.synchronize()
                ms = start.elapsed_time(stop)
            loss, grad_norm = found.tolist()
            known.append(Stepped(step, ms, loss, grad_norm))
        return known

    def _now(self) -> torch.cuda.Event | float:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
