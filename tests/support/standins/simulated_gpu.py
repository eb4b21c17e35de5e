"""A GPU's queue in simulated time: launched work runs in order, and launches return immediately."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

_LAUNCH = 5e-6  # seconds of the host
_CYCLES = 2e9  # a second
L2_BYTES = 2**25


class Gpu:
    """The host's clock, and the time when the device's queue is empty; seconds.

    ``written`` has the bytes of each write that only evicts the cache.
    """

    def __init__(self, slow: float = 1.0) -> None:
        self.now = self.free = 0.0
        self.written: list[int] = []
        self._launch = slow * _LAUNCH

    def host(self, seconds: float) -> None:
        """Host work that launches nothing."""
        self.now += seconds

    def launch(self, seconds: float) -> None:
        """Queues work that takes the device this long."""
        self.now += self._launch
        self.free = max(self.free, self.now) + seconds

    def wait(self, *_: object) -> None:
        """The host waits for the device."""
        self.now = max(self.now, self.free)

    def scratch(self, size: int, **_: object) -> SimpleNamespace:
        """A tensor of that many bytes."""

        def zero() -> None:
            self.written.append(size)
            self.launch(4e-5)

        return SimpleNamespace(zero_=zero)


class _Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self) -> None:
        self.gpu.launch(0.0)
        self.at = self.gpu.free

    def query(self) -> bool:
        return self.gpu.now >= self.at

    def synchronize(self) -> None:
        self.gpu.now = max(self.gpu.now, self.at)

    def elapsed_time(self, other: _Event) -> float:
        return (other.at - self.at) * 1e3


def simulated(monkeypatch: pytest.MonkeyPatch, slow: float = 1.0) -> Gpu:
    """Replaces torch.cuda and the clock by a simulated device until the test ends.

    Launches take the host ``slow`` times as long as usual.
    """
    gpu = Gpu(slow)
    small = SimpleNamespace(add_=lambda _: gpu.launch(2e-6))
    replaced = {
        (torch.cuda, "Event"): lambda **_: _Event(gpu),
        (torch.cuda, "_sleep"): lambda cycles: gpu.launch(cycles / _CYCLES),
        (torch.cuda, "synchronize"): gpu.wait,
        (torch.cuda, "device"): lambda _: nullcontext(),
        (torch.cuda, "get_device_properties"): lambda _: SimpleNamespace(L2_cache_size=L2_BYTES),
        (torch, "empty"): gpu.scratch,
        (torch, "zeros"): lambda *_, **__: small,
        (time, "perf_counter"): lambda: gpu.now,
    }
    for (place, name), value in replaced.items():
        monkeypatch.setattr(place, name, value)
    return gpu
