"""How long a call takes: raw samples, the conditions said, nothing averaged away.

Four costs are told apart:

- ``kernel``: the forward kernel alone, on operands that were prepared before;
- ``prepared``: preparing (quantising, transposing) and that kernel;
- ``backward`` (training): the backward kernel alone, on what the forward saved;
- ``call``: what the user pays, ``attention()`` with everything in it, in training with its backward.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

__all__ = ["COSTS", "Cost", "Timer"]

Cost = Literal["kernel", "prepared", "backward", "call"]
COSTS: tuple[Cost, ...] = ("kernel", "prepared", "backward", "call")
_LONGEST_CONDITIONS = 200
_EVICTING = 2  # times the L2: a write of one L2's size may leave lines of the other way standing


@dataclass(frozen=True)
class Timer:
    """Takes samples of a call until ``seconds`` are spent, at least ``least`` and at most ``most`` of them.

    ``patience`` seconds end it with fewer, and a call that takes longer than that is its own
    warm-up: its first run is the one sample.

    On a GPU a sample is device time between two events on the current stream, with the L2
    cache (its size asked of the device) overwritten before each; the host queues ahead, so
    that launch gaps are hidden unless a call is shorter than its own launch.  On a CPU it is
    wall time, caches as the call before left them.
    """

    device: torch.device
    seconds: float
    warmup_seconds: float
    patience: float
    least: int = 5
    most: int = 200

    @classmethod
    def for_device(cls, device: torch.device) -> Timer:
        """The limits that a whole sweep can afford for each cost of each plan."""
        if device.type == "cuda":
            return cls(device, seconds=0.1, warmup_seconds=0.02, patience=1.0)
        return cls(device, seconds=0.05, warmup_seconds=0.01, patience=0.3)

    @property
    def conditions(self) -> str:
        """What a sample is, for the record."""
        if self.device.type == "cuda":
            return f"cuda events, {_l2_bytes(self.device) * _EVICTING} bytes written before each sample to evict the L2"
        waiting = os.environ.get("OMP_WAIT_POLICY", "unset")
        return f"perf_counter, caches warm, OMP_WAIT_POLICY {waiting}"[:_LONGEST_CONDITIONS]

    def samples(self, call: Callable[[], object]) -> list[float]:
        """Milliseconds of each sample, in the order they were taken, after warming up."""
        with torch.no_grad():
            return self._on_gpu(call) if self.device.type == "cuda" else self._on_cpu(call)

    def _enough(self, count: int, spent: float) -> bool:
        if spent >= self.patience or count >= self.most:
            return True
        return count >= self.least and spent >= self.seconds

    def _on_cpu(self, call: Callable[[], object]) -> list[float]:
        def sample() -> float:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

        warming = [sample()]
        if warming[0] >= self.patience:
            return [warming[0] * 1e3]
        while sum(warming) < self.warmup_seconds:
            warming.append(sample())
        taken: list[float] = []
        while not self._enough(len(taken), sum(taken)):
            taken.append(sample())
        return [seconds * 1e3 for seconds in taken]

    def _on_gpu(self, call: Callable[[], object]) -> list[float]:
        """Warm up sample by sample, then queue as many as the limits allow, so that the device never waits."""
        scratch = torch.empty(_l2_bytes(self.device) * _EVICTING, dtype=torch.uint8, device=self.device)

        def queued() -> tuple[torch.cuda.Event, torch.cuda.Event]:
            event: Callable[[], torch.cuda.Event] = partial(torch.cuda.Event, enable_timing=True)
            start, stop = event(), event()
            scratch.zero_()
            start.record()
            call()
            stop.record()
            return start, stop

        def elapsed(events: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
            events[1].synchronize()
            return float(events[0].elapsed_time(events[1]))

        with torch.cuda.device(self.device):
            begin = time.perf_counter()
            warming = [elapsed(queued())]
            if warming[0] >= self.patience * 1e3:
                return warming
            while time.perf_counter() - begin < self.warmup_seconds:
                warming.append(elapsed(queued()))
            each = (time.perf_counter() - begin) / len(warming)
            count = max(self.least, int(self.seconds / each))
            count = max(1, min(count, self.most, int(self.patience / each)))
            return [elapsed(events) for events in [queued() for _ in range(count)]]


def _l2_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)
