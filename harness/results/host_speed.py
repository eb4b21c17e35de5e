"""The calls of rows as at one speed of the host, for plans whose calls wait for it more or less than a launch does.

A sweep gives the host's part of a call in proportion to that of starting a small kernel, which was measured beside it.
Whole calls follow with a power of their own: of three forward plans of torch's SDPA on an H200 1.6 (a slow host is also
slow at finding code in its caches), of most others about 1.  The visits of all rows of a plan say which power.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from attnbench.kernels.plan import Plan

from .records import Measurement

__all__ = ["HostSpeed"]

# Of how many visits at a host 1.16 times as slow the expectation counts that the power is 1.
_PRIOR_VISITS, _USUAL_SPREAD = 8, 0.15
_LEAST, _MOST = 0.5, 2.0
_UNDISTURBED = 10  # the percentile of a pass's times that no late host made longer

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Visit:
    call: _Array
    host: _Array  # as it was
    launch_ms: float


class HostSpeed:
    """How the calls of each plan and direction follow the host's speed, from rows that know it (``launch_ms``).

    ``usual_ms`` is the median of what the host needed to start a small kernel: the speed to which calls are brought.
    """

    def __init__(self, rows: Iterable[Measurement]) -> None:
        found: dict[tuple[Plan, str], list[float]] = {}
        launches: list[float] = []
        for row in rows:
            visits = _visits(row)
            launches += [visit.launch_ms for visit in visits]
            if len(visits) > 1:
                slow = np.log([visit.launch_ms for visit in visits])
                took = np.log([float(np.median(visit.host)) for visit in visits])
                slow = slow - slow.mean()
                sums = found.setdefault((row.plan, row.spec.direction), [0.0, 0.0])
                sums[0] += float(slow @ took)
                sums[1] += float(slow @ slow)
        prior = _PRIOR_VISITS * _USUAL_SPREAD**2
        self._powers = {key: (both + prior) / (own + prior) for key, (both, own) in found.items()}
        self.usual_ms = median(launches) if launches else None

    def power(self, plan: Plan, direction: str) -> float:
        """The power of a launch's time with which the host's time of the plan's calls goes."""
        return min(max(self._powers.get((plan, direction), 1.0), _LEAST), _MOST)

    def calls(self, row: Measurement) -> Sequence[float]:
        """Milliseconds of the row's calls on the usual host; as they are where the host's speed is not known."""
        parts = self._parts(row)
        if not parts:
            return row.time_ms["call"]
        calls: list[float] = np.concatenate([np.maximum(host, device) for host, device in parts]).tolist()
        return calls

    def parts(self, row: Measurement) -> tuple[float, float] | tuple[None, None]:
        """Milliseconds of the usual host and of the device for a call; None where the host's speed is not known."""
        parts = self._parts(row)
        if not parts:
            return None, None
        host, device = (float(np.median(np.concatenate(part))) for part in zip(*parts, strict=True))
        return host, device

    def _parts(self, row: Measurement) -> list[tuple[_Array, _Array]]:
        """What the usual host and what the device needs for the calls of each visit."""
        visits = _visits(row)
        if not visits or self.usual_ms is None:
            return []
        power, passes, parts = self.power(row.plan, row.spec.direction), _passes(row), list[tuple[_Array, _Array]]()
        for visit, scale in zip(visits, row.performance.host_scale or [1.0] * len(visits), strict=True):
            host = visit.host * (self.usual_ms / visit.launch_ms) ** power
            # Where the host was the longer, the device is known from the passes alone.
            device = np.where(visit.call > visit.host * scale * 1.0001, visit.call, np.minimum(visit.call, passes))
            parts.append((host, device))
        return parts


def _visits(row: Measurement) -> list[_Visit]:
    """The visits of a row's calls; empty where the host's speed or its part of the calls is not known."""
    found = row.performance_
    if found is None or not found.launch_ms or not found.host_ms or "call" not in found.visits:
        return []
    counts = found.visits["call"]
    scales = found.host_scale or [1.0] * len(counts)
    if not len(counts) == len(found.launch_ms) == len(scales) or len(found.host_ms) != sum(counts):
        return []
    ends = np.cumsum(counts)[:-1]
    calls, hosts = np.split(np.asarray(found.time_ms["call"]), ends), np.split(np.asarray(found.host_ms), ends)
    each = zip(calls, hosts, scales, found.launch_ms, strict=True)
    return [_Visit(call, host / scale, launch) for call, host, scale, launch in each if call.size]


def _passes(row: Measurement) -> float:
    """Milliseconds of the device for the passes of a call: a host that came late made many of them longer."""
    taken = [row.time_ms[cost] for cost in ("prepared", "backward") if cost in row.time_ms]
    return sum(float(np.percentile(each, _UNDISTURBED)) for each in taken)
