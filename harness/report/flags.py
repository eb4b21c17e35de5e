"""Flags of a measured plan: facts that a reader of its numbers must know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import numpy as np

from ..measure.clocks import Conditions, Throttle
from ..results.records import Measurement

__all__ = ["FLAGS", "MEANINGS", "Flag", "flags", "highest_clock"]

Flag = Literal["emulated", "throttled", "leak", "not deterministic", "host-bound", "replayed"]
FLAGS: tuple[Flag, ...] = get_args(Flag)
MEANINGS: dict[Flag, str] = {
    "emulated": (
        "computes what an FP8 kernel computes by other means, to show its error; how long that takes says nothing of "
        "the kernel and is not compared (the samples are in the records)"
    ),
    "throttled": (
        "heat or a fault of the board held the GPU's clock down, or a cap held its median more than 3% below the "
        "highest of the sweep"
    ),
    "leak": (
        "what the mask hides changes outputs, later tokens earlier ones, or one sequence another, as a scale over all "
        "of them does"
    ),
    "not deterministic": "two runs on the same inputs differed in some bit",
    "host-bound": "the host took as long to launch the call as the call lasted: kernels waited for it",
    "replayed": "kernel, prepared or backward kept the device waiting for the host and was timed as a CUDA graph",
}
# "power cap" is missing: under full load many boards reach it, at nearly the full clock.
_ALWAYS: frozenset[Throttle] = frozenset(("thermal", "hardware thermal", "hardware slowdown", "power brake"))
_FALLEN = 0.03
# Of the call: even if the device always waits for its host, the events that the host records take some of the time.
_HOST_SHARE = 0.9


def flags(row: Measurement, highest_mhz: float | None) -> list[Flag]:
    """The flags of a measured row; ``highest_mhz`` is the highest clock in any row of the sweep."""
    holds: dict[Flag, bool] = {
        "emulated": row.emulated,
        "throttled": _throttled(row.performance.gpu, highest_mhz),
        "leak": bool(row.correctness.leak),
        "not deterministic": row.correctness.deterministic is False,
        "host-bound": _host_bound(row),
        "replayed": bool(row.performance.replayed),
    }
    return [flag for flag in FLAGS if holds[flag]]


def highest_clock(rows: Iterable[Measurement]) -> float | None:
    """The highest SM clock in MHz in any of the rows; None if no row has one."""
    seen = [row.performance.gpu for row in rows if row.measured]
    clocks = [gpu.clock_mhz.highest for gpu in seen if gpu is not None and gpu.clock_mhz is not None]
    return max(clocks, default=None)


def _throttled(gpu: Conditions | None, highest_mhz: float | None) -> bool:
    if gpu is None or not gpu.throttled:
        return False
    if not _ALWAYS.isdisjoint(gpu.throttled):
        return True
    clock = gpu.clock_mhz
    return clock is not None and highest_mhz is not None and clock.median < (1 - _FALLEN) * highest_mhz


def _host_bound(row: Measurement) -> bool:
    """Whether the device waits for the host; never on a CPU, where the host is the device."""
    host = row.performance.host_ms
    if host is None or row.environment.device_type == "cpu":
        return False
    return bool(np.median(host) >= _HOST_SHARE * row.median_ms())
