"""Read a GPU's clocks, power, temperature and throttle reasons while it is measured.

Measurements taken under throttling are kept: throttling is recorded with them.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from attnbench.errors import InputError
from attnbench.tables.nvml import Gpu, Nvml

__all__ = ["Conditions", "Range", "Reading", "Throttle", "Watch", "readings_within"]

Throttle = Literal[
    "board limit",
    "hardware slowdown",
    "hardware thermal",
    "power brake",
    "power cap",
    "reliability",
    "sync boost",
    "thermal",
    "unknown",
]

# nvmlClocksEventReasons in nvml.h.  "hardware slowdown" stands beside its cause ("hardware thermal",
# "power brake") if the board reports that.
_THROTTLES: dict[int, Throttle] = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal",
    0x040: "hardware thermal",
    0x080: "power brake",
    0x200: "board limit",
    0x400: "reliability",
}
_IDLE = 0x001  # slow because nothing runs: not throttling
_SETTINGS = 0x002 | 0x100  # applications clocks, display clocks: slow because a user set them

_MOST_READINGS = 30_000  # ten minutes at the usual period, a few MB
_REACH = 10  # periods: the largest distance between a span and a reading that still describes it
_SETTLING = 8  # readings in which the clock must be stable
_PATIENCE = 2.0  # seconds to wait for a reading in progress; a driver that hangs must not hang the harness


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of a GPU at ``at`` (``time.perf_counter`` seconds); what the GPU does not report is None.

    ``throttled`` names what holds the clock down, except idleness and settings; ``clock_set`` says whether a setting
    (applications or display clocks) does.
    """

    at: float
    clock_mhz: int | None = None
    memory_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttled: tuple[Throttle, ...] | None = None
    clock_set: bool | None = None


_Quantity = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
_Share = Annotated[float, Field(gt=0, le=1)]


class Range(BaseModel):
    """Lowest, median and highest of one quantity over all readings that have it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    lowest: _Quantity
    median: _Quantity
    highest: _Quantity

    @model_validator(mode="after")
    def _is_in_order(self) -> Range:
        if not self.lowest <= self.median <= self.highest:
            raise ValueError("a range needs lowest <= median <= highest")
        return self


class Conditions(BaseModel):
    """The GPU's state during a measurement, for the record; what the GPU never reported is None.

    ``memory_mhz`` is the median, ``temperature_c`` the highest.  ``throttled`` maps each throttle reason to the share
    of readings that have it, ``clock_set`` is the share in which a setting held the clock down.  ``readings`` counts
    the readings.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    readings: Annotated[int, Field(ge=1, le=_MOST_READINGS)]
    clock_mhz: Range | None = None
    memory_mhz: _Quantity | None = None
    power_w: Range | None = None
    temperature_c: Annotated[float, Field(ge=-273, le=1000)] | None = None
    throttled: dict[Throttle, _Share] | None = None
    clock_set: Annotated[float, Field(ge=0, le=1)] | None = None

    @classmethod
    def of(cls, readings: Sequence[Reading]) -> Conditions:
        """Condense at least one reading."""
        memory = [each.memory_mhz for each in readings if each.memory_mhz is not None]
        degrees = [each.temperature_c for each in readings if each.temperature_c is not None]
        held = [each.throttled for each in readings if each.throttled is not None]
        settings = [each.clock_set for each in readings if each.clock_set is not None]
        names = sorted({name for names in held for name in names})
        return cls(
            readings=len(readings),
            clock_mhz=_range(each.clock_mhz for each in readings),
            memory_mhz=median(memory) if memory else None,
            power_w=_range(each.power_w for each in readings),
            temperature_c=max(degrees, default=None),
            throttled={name: sum(name in names for names in held) / len(held) for name in names} if held else None,
            clock_set=sum(settings) / len(settings) if settings else None,
        )


class Watch:
    """Reads one GPU every ``every`` seconds in a thread while the context is open.

    ``uuid`` is the GPU's (``torch.cuda.get_device_properties(device).uuid`` as text): NVML and torch may number GPUs
    differently.  Without one (a CPU), without NVML, or if the GPU reports nothing, there are no readings and ``note``
    says why.  It keeps the last 30,000 readings, and is opened once.
    """

    def __init__(self, uuid: str | None, every: float = 0.02) -> None:
        if not every > 0:
            raise InputError(f"a GPU is read every so many seconds, not every {every}")
        self.every = every
        self._uuid = uuid
        self._readings: deque[Reading] = deque(maxlen=_MOST_READINGS)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._gpu: Gpu | None = None
        self._reason: str | None = None
        self._clock_is_reported = False

    @property
    def note(self) -> str | None:
        """Why readings are missing or incomplete; None if the GPU reports everything."""
        if self._reason is not None or self._gpu is None:
            return self._reason
        silences = ", ".join(f"{fact} ({reason})" for fact, reason in dict(self._gpu.silences).items())
        return f"the GPU did not always tell its {silences}"[:300] if silences else None

    def between(self, *spans: tuple[float, float]) -> Conditions | None:
        """The conditions during the spans, each (start, stop) in ``time.perf_counter`` seconds, taken together.

        A span too short for a reading of its own uses the nearest one within ten periods.  None if nothing was read.
        Raises InputError for a span that ends before it starts.
        """
        with self._lock:
            readings = list(self._readings)
        found = readings_within(readings, spans, _REACH * self.every)
        return Conditions.of(found) if found else None

    def steady(self, since: float, tolerance: float = 0.01) -> bool:
        """Whether the SM clock has settled since ``since`` (``time.perf_counter`` seconds, when work began).

        It has when the medians of the older and the newer half of the last eight readings differ by at most
        ``tolerance``, relative; a median ignores the single outliers of a GPU at its power cap.  Also True if the GPU
        reports no clock: then there is nothing to wait for.
        """
        if not self._clock_is_reported:
            return True
        with self._lock:
            readings = list(self._readings)[-_SETTLING:]
        clocks = [each.clock_mhz for each in readings if each.at >= since and each.clock_mhz is not None]
        if len(clocks) < _SETTLING:
            return False
        older, newer = median(clocks[: _SETTLING // 2]), median(clocks[_SETTLING // 2 :])
        return abs(newer - older) <= tolerance * newer

    def __enter__(self) -> Watch:
        if self._uuid is None:
            self._reason = "there is no GPU to watch"
            return self
        nvml = Nvml()
        self._gpu = nvml.gpu(self._uuid)
        if self._gpu is None:
            self._reason = nvml.reason
            nvml.close()
            return self
        self._read(self._gpu)
        self._thread = threading.Thread(target=self._go_on, args=(nvml, self._gpu), name="clocks", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE)

    def _go_on(self, nvml: Nvml, gpu: Gpu) -> None:
        try:
            with nvml:
                while not self._ended.wait(self.every):
                    self._read(gpu)
        finally:
            self._clock_is_reported = False

    def _read(self, gpu: Gpu) -> None:
        at = time.perf_counter()
        clock, memory, power, degrees = gpu.clock_mhz(), gpu.memory_mhz(), gpu.power_w(), gpu.temperature_c()
        reasons = gpu.clock_reasons()
        self._clock_is_reported = clock is not None
        if clock is memory is power is degrees is reasons is None:
            return  # no answer at all: gpu.silences has the reasons
        throttled = None if reasons is None else _throttles(reasons)
        clock_set = None if reasons is None else bool(reasons & _SETTINGS)
        reading = Reading(at, clock, memory, power, degrees, throttled, clock_set)
        with self._lock:
            self._readings.append(reading)


def readings_within(
    readings: Sequence[Reading], spans: Iterable[tuple[float, float]], reach: float
) -> Sequence[Reading]:
    """The readings (in order of time) inside any of the spans, each once.

    A span without one gets the nearest reading within ``reach`` seconds.  Raises InputError for a span that ends before
    it starts.
    """
    chosen: set[int] = set()
    for start, stop in spans:
        if not start <= stop:
            raise InputError(f"a span starts before it stops, not at {start} and {stop}")
        first = bisect_left(readings, start, key=lambda each: each.at)
        last = bisect_right(readings, stop, key=lambda each: each.at)
        chosen.update(range(first, last))
        if first == last:
            away = {
                index: _distance(readings[index], start, stop)
                for index in (first - 1, first)
                if 0 <= index < len(readings)
            }
            nearest = min(away, key=lambda index: away[index], default=None)
            if nearest is not None and away[nearest] <= reach:
                chosen.add(nearest)
    return [readings[index] for index in sorted(chosen)]


def _distance(reading: Reading, start: float, stop: float) -> float:
    return max(start - reading.at, reading.at - stop)


def _throttles(reasons: int) -> tuple[Throttle, ...]:
    names = {name for bit, name in _THROTTLES.items() if reasons & bit}
    if reasons & ~(sum(_THROTTLES) | _IDLE | _SETTINGS):
        names.add("unknown")  # a driver newer than this list
    return tuple(sorted(names))


def _range(values: Iterable[float | None]) -> Range | None:
    known = [value for value in values if value is not None]
    return Range(lowest=min(known), median=median(known), highest=max(known)) if known else None
