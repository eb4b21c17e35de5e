"""How long a call takes: raw samples with their conditions, nothing averaged.

There are four costs:

- ``kernel``: the forward kernel alone, on operands prepared before;
- ``prepared``: preparing (quantising, transposing) and the forward kernel;
- ``backward`` (training): the backward kernel alone, on what the forward saved;
- ``call``: the whole ``attention()`` call; in training forward and backward together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Literal, NamedTuple

import torch

from .cores import core_for, on_core

__all__ = ["COSTS", "LATE_MS", "Cost", "Taken", "Timer"]

Cost = Literal["kernel", "prepared", "backward", "call"]
COSTS: tuple[Cost, ...] = ("kernel", "prepared", "backward", "call")
_LONGEST_CONDITIONS = 200
_EVICTING = 2  # times the L2: writing one L2's size may leave lines of other ways in place
LATE_MS = 0.5  # waiting for an idle device takes a fiftieth of that
_MOST_A_VISIT = 50  # the device's queue takes about a thousand launches before the host has to wait
_FIRST_LEAD_MS = 2.0  # most calls need less of the host; for the others it is known afterwards
_LONG_HOST_MS = 50.0  # of a first call: importing or compiling, for which the device need not be held
_MARGIN = 1.5  # the host's speed varies
_CYCLES = 2_000_000  # of a GPU in a millisecond at its highest clock
_PROBES = 4  # small kernels started before each sample, some 8 us each


class Taken(NamedTuple):
    """Samples of one visit in order: device and host milliseconds of each call.

    ``late_ms`` is how long the device worked on after the last call had ended on its own stream.  ``host_bound``: the
    device waited for the host in most calls, so the device times contain the host's gaps.  ``launch_ms`` is what the
    host needed meanwhile to start a small kernel; None on a CPU.
    """

    device_ms: list[float]
    host_ms: list[float]
    late_ms: float = 0.0
    host_bound: bool = False
    launch_ms: float | None = None


@dataclass(frozen=True)
class Timer:
    """How samples are taken on one device, and when there are enough.

    A visit takes ``visit`` seconds of samples of a call, at least one.  A plan is visited at least ``fewest`` times,
    then until the 95 % interval of its median is narrower than ``narrow`` on either side, relative to the median, and
    its visits agree about as well, or until they took ``limit`` seconds.  A call longer than ``patience`` seconds is
    its own warm-up.

    On a GPU a sample is device time between two events on the current stream; the L2 cache is overwritten before each.
    The device is held until the host is ahead of it, as in a stream of calls: otherwise the sample would contain the
    host's time.  All threads of the process run on the ``core`` meanwhile: otherwise autograd's thread wakes on another
    one in every call, where a model wakes it once a step (1.0 ms of host instead of 0.65 in training on an H200).

    Before each sample the host starts a few small kernels, because a shared host's speed changes within 50 ms: over
    7,376 rounds on an H100's machine the host's time of an SDPA call scattered by 28 %, and by 13 % relative to that of
    such a start.

    On a CPU a sample is wall time, with the caches as the call before left them.
    """

    device: torch.device
    visit: float
    limit: float
    patience: float
    fewest: int = 2
    narrow: float = 0.005
    core: int | None = None

    @classmethod
    def for_device(cls, device: torch.device, core: int | None = None) -> Timer:
        """The limits that a whole sweep can afford for each plan; by default on a ``core`` of this process's own."""
        if device.type == "cuda":
            core = core_for(device.index or 0) if core is None else core
            return cls(device, visit=0.01, limit=0.3, patience=0.015, fewest=4, core=core)
        # A CPU's calls take ten times as long and scatter more: six samples are enough there for an interval.
        return cls(device, visit=0.03, limit=1.5, patience=0.03, narrow=0.02)

    @property
    def brief(self) -> Timer:
        """For a first look, whose shortest sample counts: fewer samples of short calls."""
        return replace(self, visit=self.visit / 4)

    @property
    def conditions(self) -> str:
        """What a sample is, for the record."""
        if self.device.type == "cuda":
            written = _l2_bytes(self.device) * _EVICTING
            core = "" if self.core is None else "on one core, "
            return f"cuda events, {written} bytes written before each sample to evict the L2, {core}the host ahead"
        waiting = os.environ.get("OMP_WAIT_POLICY", "unset")
        return f"perf_counter, caches warm, OMP_WAIT_POLICY {waiting}"[:_LONGEST_CONDITIONS]

    def take(self, call: Callable[[], object], renew: Callable[[], object] = lambda: None) -> Taken:
        """The samples of one visit, after a discarded warm-up; ``renew`` runs before each sample, untimed."""
        with torch.no_grad(), on_core(self.core):
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
            queue = _Queue(self.device, call, renew)
            warm = queue.take(1, _FIRST_LEAD_MS)
            if warm.host_ms[0] > _LONG_HOST_MS:
                warm = queue.take(1, _FIRST_LEAD_MS)
            if _longer(warm) >= self.patience * 1e3:
                if warm.late_ms < LATE_MS and not warm.host_bound:
                    return warm
                # A delayed host is not delayed twice; work that was left running is there again.
                again = queue.ahead(1, _lead(warm, 1), waits=warm.host_bound)
                return (again if warm.host_bound else warm)._replace(late_ms=min(warm.late_ms, again.late_ms))
            # The second call runs like the later ones, without the host's initial delay.
            second = queue.take(1, _lead(warm, 1))
            count = self._count(_longer(second) / 1e3)
            return queue.ahead(count, _lead(second, count), waits=second.host_bound)


def _longer(taken: Taken) -> float:
    """Milliseconds of the one call on the host or the device, whichever is longer."""
    return max(*taken.device_ms, *taken.host_ms)


def _lead(taken: Taken, count: int) -> float:
    """Milliseconds to hold the device so that the host stays ahead for ``count`` calls like the one taken."""
    (device,), (host,), probes = taken.device_ms, taken.host_ms, _PROBES * (taken.launch_ms or 0.0)
    return _MARGIN * (host + (count - 1) * max(0.0, host + probes - device))


class _Queue:
    """Queues a call on the current stream between events, with the L2 evicted before each."""

    def __init__(self, device: torch.device, call: Callable[[], object], renew: Callable[[], object]) -> None:
        self._device, self._call, self._renew = device, call, renew
        self._scratch = torch.empty(_l2_bytes(device) * _EVICTING, dtype=torch.uint8, device=device)
        self._small = torch.zeros(1, device=device)
        self._event: Callable[[], torch.cuda.Event] = partial(torch.cuda.Event, enable_timing=True)

    def ahead(self, count: int, lead_ms: float, *, waits: bool) -> Taken:
        """``count`` samples, with the device held if that keeps the host ahead.

        ``waits``: the host was not ahead before either, as for every call that waits for the device.
        """
        taken = self.take(count, lead_ms)
        if taken.host_bound and not waits:
            taken = self.take(count, lead_ms)  # a delayed host is not delayed twice
        # A call that waits for the device would also wait for the hold, and its host time would include that.
        return self.take(count, 0.0) if taken.host_bound else taken

    def take(self, count: int, lead_ms: float) -> Taken:
        """``count`` samples, after holding the device for ``lead_ms``."""
        if lead_ms:
            torch.cuda._sleep(int(lead_ms * _CYCLES))  # type: ignore[no-untyped-call]
        queued, host, launches, waited = [], [], [], 0
        for _ in range(count):
            launches.append(self._launch_ms())
            start, stop = self._event(), self._event()
            self._renew()
            self._scratch.zero_()
            start.record()
            begin = time.perf_counter()
            self._call()
            host.append((time.perf_counter() - begin) * 1e3)
            # The device reached the start before the whole call was queued.
            waited += start.query()  # type: ignore[no-untyped-call]
            stop.record()
            queued.append((start, stop))
        queued[-1][1].synchronize()
        ended = time.perf_counter()
        torch.cuda.synchronize(self._device)
        late = (time.perf_counter() - ended) * 1e3
        device = [start.elapsed_time(stop) for start, stop in queued]
        return Taken(device, host, late, 2 * waited > count, median(launches))

    def _launch_ms(self) -> float:
        begin = time.perf_counter()
        for _ in range(_PROBES):
            self._small.add_(1)
        return (time.perf_counter() - begin) * 1e3 / _PROBES


def _l2_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)
