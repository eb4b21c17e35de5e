"""Injected slow-downs for the gate to find: installed kernels, some of them slower by a share that a file gives.

The file, which the environment variable SLOWED names, is JSON: ``{"case spec as text": {"plan": 0.03}}``.  A device
sleeps, a CPU spins, for that share of the time that the pass takes in this process without it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from attnbench.kernels.registry import Registry, registry

__all__ = ["slowed_registry"]

_REPEATS = 25
_CYCLES = 2_000_000


@lru_cache(maxsize=1)
def slowed_registry() -> Registry:
    """The installed kernels, slowed down according to the file."""
    known = registry()
    for kernel in known.forwards.values():
        _slow_forward(kernel)
    for kernel in known.backwards.values():
        _slow_backward(kernel)
    return known


def _shares(spec: object) -> dict[str, float]:
    path = os.environ.get("SLOWED", "")
    return _read(path, os.stat(path).st_mtime_ns).get(str(spec), {}) if path else {}


@lru_cache(maxsize=1)
def _read(path: str, stamp: int) -> dict[str, dict[str, float]]:
    with open(path, encoding="utf-8") as file:
        found: dict[str, dict[str, float]] = json.load(file)
    return found


def _share(spec: object, name: str, place: int) -> float:
    """The file's share for the spec and the plan with this kernel as forward (place 0) or backward (-1)."""
    return next((share for plan, share in _shares(spec).items() if plan.split(">")[place] == name), 0.0)


def _slow_forward(kernel: Any) -> None:
    prepare, run = kernel.prepare, kernel.run
    waits: dict[object, Callable[[float], None]] = {}

    def slow_prepare(inputs: Any, spec: object) -> Any:
        operands = prepare(inputs, spec)
        if spec not in waits and _share(spec, kernel.name, 0):
            waits[spec] = _wait(lambda: run(prepare(inputs, spec)), inputs.device)
        return operands

    def slow_run(operands: Any) -> Any:
        result = run(operands)
        if (share := _share(operands.spec, kernel.name, 0)) and operands.spec in waits:
            waits[operands.spec](share)
        return result

    kernel.prepare, kernel.run = slow_prepare, slow_run
    kernel.whole = lambda spec, device_type: None  # which would run neither


def _slow_backward(kernel: Any) -> None:
    run = kernel.run
    waits: dict[object, Callable[[float], None]] = {}

    def slow_run(saved: Any, grad_out: torch.Tensor) -> Any:
        spec = saved.operands.spec
        result = run(saved, grad_out)
        if share := _share(spec, kernel.name, -1):
            if spec not in waits and not (grad_out.is_cuda and torch.cuda.is_current_stream_capturing()):
                waits[spec] = _wait(lambda: run(saved, grad_out), grad_out.device)
            waits[spec](share)
        return result

    kernel.run = slow_run


def _wait(call: Callable[[], object], device: torch.device) -> Callable[[float], None]:
    """A function that delays the device by a share of the call's time."""
    with torch.no_grad():
        if device.type == "cuda":
            own, slept = _device_ms([call, lambda: torch.cuda._sleep(_CYCLES)])
            return lambda share: torch.cuda._sleep(max(1, int(share * own / slept * _CYCLES)))
        seconds = _host_seconds(call)
    return lambda share: _spin(share * seconds)


def _device_ms(calls: Sequence[Callable[[], object]]) -> list[float]:
    """The shortest time of each call, measured in turns because other processes may use the device."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(_REPEATS):
        for times, call in zip(taken, calls, strict=True):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_CYCLES)  # so that the host runs ahead
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
    return [min(times) for times in taken]


def _host_seconds(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
