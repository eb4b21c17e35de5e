"""How long a call takes: raw samples, the conditions said, nothing averaged away.

Four costs are told apart:

- ``kernel``: the forward kernel alone, on operands that were prepared before;
- ``prepared``: preparing (quantising, transposing) and that kernel;
- ``backward`` (training): the backward kernel alone, on what the forward saved;
- ``call``: what the user pays, ``attention()`` with everything in it; in training forward and
  backward as one step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch

__all__ = ["COSTS", "LATE_MS", "Cost", "Taken", "Timer"]

Cost = Literal["kernel", "prepared", "backward", "call"]
COSTS: tuple[Cost, ...] = ("kernel", "prepared", "backward", "call")
_LONGEST_CONDITIONS = 200
_EVICTING = 2  # times the L2: a write of one L2's size may leave lines of the other way standing
LATE_MS = 0.5  # waiting for an idle device takes a fiftieth of that
_MOST_A_VISIT = 50  # the device's queue takes about a thousand launches before the host has to wait


class Taken(NamedTuple):
    """Samples of one visit, in the order they were taken: device and host milliseconds of each call.

    ``late_ms`` is how long the device went on after the last call had ended on its own stream.
    """

    device_ms: list[float]
    host_ms: list[float]
    late_ms: float = 0.0

    @property
    def host_bound(self) -> bool:
        """Whether the host could not queue as fast as the device ran, which puts its gaps into the device's times."""
        middle = len(self.device_ms) // 2
        return sorted(self.host_ms)[middle] > _HEAD_START * sorted(self.device_ms)[middle]


# A host that needs less than this share of the device's time stays ahead of it, once a few calls are queued.
_HEAD_START = 0.7


@dataclass(frozen=True)
class Timer:
    """How samples are taken on one device, and when there are enough of them.

    A visit takes ``visit`` seconds of samples of a call, one at least.  A plan is visited again
    until the 95 % interval of its median is narrower than ``narrow`` on either side, relative
    to it, or its visits took ``limit`` seconds; ``fewest`` of them at least, or one that took
    that long.  A call that takes longer than ``patience`` seconds is its own warm-up.

    On a GPU a sample is device time between two events on the current stream, with the L2
    cache (its size asked of the device) overwritten before each; the host queues ahead.  On a
    CPU it is wall time, caches as the call before left them.
    """

    device: torch.device
    visit: float
    limit: float
    patience: float
    fewest: int = 2
    narrow: float = 0.005

    @classmethod
    def for_device(cls, device: torch.device) -> Timer:
        """The limits that a whole sweep can afford for each plan."""
        if device.type == "cuda":
            return cls(device, visit=0.01, limit=0.3, patience=0.015, fewest=4)
        return cls(device, visit=0.01, limit=0.4, patience=0.05)

    @property
    def conditions(self) -> str:
        """What a sample is, for the record."""
        if self.device.type == "cuda":
            return f"cuda events, {_l2_bytes(self.device) * _EVICTING} bytes written before each sample to evict the L2"
        waiting = os.environ.get("OMP_WAIT_POLICY", "unset")
        return f"perf_counter, caches warm, OMP_WAIT_POLICY {waiting}"[:_LONGEST_CONDITIONS]

    def take(self, call: Callable[[], object], renew: Callable[[], object] = lambda: None) -> Taken:
        """The samples of one visit, after a warm-up that is not among them; ``renew`` runs before each, untimed."""
        with torch.no_grad():
            return self._on_gpu(call, renew) if self.device.type == "cuda" else self._on_cpu(call, renew)

    def _count(self, each: float) -> int:
        return max(1, min(_MOST_A_VISIT, int(self.visit / max(each, 1e-9))))

    def _on_cpu(self, call: Callable[[], object], renew: Callable[[], object]) -> Taken:
        def sample() -> float:
            renew()
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3

        first = sample()
        taken = [first] if first >= self.patience * 1e3 else [sample() for _ in range(self._count(first / 1e3))]
        return Taken(taken, taken)

    def _on_gpu(self, call: Callable[[], object], renew: Callable[[], object]) -> Taken:
        with torch.cuda.device(self.device):
            queue = _Queue(self.device, renew)
            begin = time.perf_counter()
            queue.put(call)
            warm = queue.drained()
            each = time.perf_counter() - begin
            if each >= self.patience:
                if warm.late_ms < LATE_MS:
                    return warm
                queue.put(call)  # a host that was held up is not so twice; work that was left running is
                return warm._replace(late_ms=min(warm.late_ms, queue.drained().late_ms))
            # Queued together: the second runs as those to come will, without the host's first hesitation.
            begin = time.perf_counter()
            for _ in range(2):
                queue.put(call)
            queue.drained()
            for _ in range(self._count((time.perf_counter() - begin) / 2)):
                queue.put(call)
            return queue.drained()


class _Queue:
    """Calls queued on the current stream between events, the L2 evicted before each."""

    def __init__(self, device: torch.device, renew: Callable[[], object]) -> None:
        self._device, self._renew = device, renew
        self._scratch = torch.empty(_l2_bytes(device) * _EVICTING, dtype=torch.uint8, device=device)
        self._event: Callable[[], torch.cuda.Event] = partial(torch.cuda.Event, enable_timing=True)
        self._queued: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._host: list[float] = []

    @contextmanager
    def _between(self) -> Iterator[None]:
        events = self._event(), self._event()
        self._renew()
        self._scratch.zero_()
        events[0].record()
        start = time.perf_counter()
        yield
        self._host.append((time.perf_counter() - start) * 1e3)
        events[1].record()
        self._queued.append(events)

    def put(self, call: Callable[[], object]) -> None:
        with self._between():
            call()

    def drained(self) -> Taken:
        """What was queued, once it has run."""
        self._queued[-1][1].synchronize()
        ended = time.perf_counter()
        torch.cuda.synchronize(self._device)
        late = (time.perf_counter() - ended) * 1e3
        taken = Taken([start.elapsed_time(stop) for start, stop in self._queued], self._host, late)
        self._queued, self._host = [], []
        return taken


def _l2_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)
