"""What a table holds about one plan at one spec."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from decimal import ROUND_CEILING, Decimal
from functools import cached_property
from typing import Literal, get_args

from ..kernels.plan import Plan
from ..problem.spec import AttentionSpec

__all__ = ["HOST_DIGITS", "LONGEST_MS", "SHORTEST_MS", "STATUSES", "Entry", "Status", "nearest"]

Status = Literal["ok", "inaccurate", "slower", "refused", "unavailable", "oom", "timeout", "crashed", "error"]
STATUSES: tuple[Status, ...] = get_args(Status)
# Of any time: a nanosecond, which no clock here resolves, and eleven days.
SHORTEST_MS, LONGEST_MS = 1e-6, 1e9
_ASKED_LIVE = ("refused", "unavailable")  # each choice asks the kernel again
_TIME_DIGITS, _SPREAD_DIGITS, _ERROR_DIGITS = 4, 2, 3
HOST_DIGITS = 3  # of the host's and the device's part of a call
_LONGEST_REASON = 200
# The least worst error that a kernel in 8 bits had on an H200 is 0.0027, by the rounding of its 16-bit output alone.
_LEAST_FP8_ERROR = 1e-4
# Families without which an error says nothing of FP8 in a model: on normal inputs every kernel has 0.05, on outliers
# some have three times as much.  Captured are a model's own tensors.
_HARD = ("outlier", "captured:")


@dataclass(frozen=True)
class Entry:
    """The measurement of one plan at one spec, as a table holds it.

    ``time_ms`` is the median of the whole call and ``spread_ms`` its interquartile range, None unless ``status`` is
    ``ok``, ``inaccurate`` or ``slower``: after a first look, or (without a spread) by its passes in other plans.
    ``host_ms`` and ``device_ms`` are what the host and the device need for the call, of which it takes the longer; None
    where the host's speed was not measured beside them.
    ``errors`` maps an input family to the worst relative L2 over tensors, infinite if not
    finite.  ``reason`` says why the status is not ``ok``; ``check`` names the check that found a plan inaccurate,
    ``error`` if the errors exceed a bound.
    """

    spec: AttentionSpec
    plan: Plan
    status: str
    time_ms: float | None = None
    spread_ms: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    check: str | None = None
    host_ms: float | None = None
    device_ms: float | None = None

    @property
    def usable(self) -> bool:
        """Whether it can be chosen by, budget permitting."""
        return self.unusable is None

    @cached_property  # a choice asks each entry of its class several times
    def unusable(self) -> str | None:
        """Why the plan cannot be chosen by this entry, one sentence, or None where it can."""
        if self.status == "slower":
            return f"it lost a race when it was measured: {self.reason}"
        if self.time_ms is None or not self.errors:
            return f"{self.status} when it was measured: {self.reason}"
        if self.check not in (None, "error"):
            return f"inaccurate by the check {self.check!r} when it was measured: {self.reason}"
        if self.plan.fp8 and not any(family.startswith(_HARD) for family in self.errors):
            return "its error was never measured on inputs with outliers, nor on a model's own"
        if self.plan.fp8 and self.worst[0] < _LEAST_FP8_ERROR:
            return f"its error of {self.worst[0]:.2g} is less than 8 bits allow, so it is not used"
        return None

    @property
    def worst(self) -> tuple[float, str]:
        """The largest error and the input family it was seen in."""
        return max((error, family) for family, error in self.errors.items())

    @property
    def kept(self) -> bool:
        """Whether choosing needs it; refusals are not kept, because each choice asks the kernel again."""
        return self.status not in _ASKED_LIVE

    def shortened(self) -> Entry:
        """The same with fewer digits: times four, spreads two, the host's times three, errors three and rounded up so
        that none falls below a budget.
        """
        return replace(
            self,
            time_ms=nearest(self.time_ms, _TIME_DIGITS),
            spread_ms=nearest(self.spread_ms, _SPREAD_DIGITS),
            host_ms=nearest(self.host_ms, HOST_DIGITS),
            device_ms=nearest(self.device_ms, HOST_DIGITS),
            errors={family: _above(error, _ERROR_DIGITS) for family, error in self.errors.items()},
            reason=None if self.reason is None else " ".join(self.reason.split())[:_LONGEST_REASON],
        )

    def timed(self, time_ms: float, host_ms: float | None, device_ms: float | None) -> Entry:
        """The same with other times, within those of a table, and the spread in proportion."""
        time_ms, spread_ms = _bounded(time_ms), self.spread_ms
        if spread_ms is not None and self.time_ms:
            spread_ms = min(spread_ms * time_ms / self.time_ms, LONGEST_MS)
        host_ms, device_ms = (None if each is None else _bounded(each) for each in (host_ms, device_ms))
        return replace(self, time_ms=time_ms, spread_ms=spread_ms, host_ms=host_ms, device_ms=device_ms)

    def on_host(self, slower: float) -> Entry:
        """The same on a host that takes ``slower`` times as long; as it is where host and device are not told apart."""
        if self.time_ms is None or self.host_ms is None or self.device_ms is None:
            return self
        host = self.host_ms * slower
        return self.timed(max(host, self.device_ms), host, self.device_ms)

    def renewed(self, newer: Entry) -> Entry:
        """The newer entry with this one's errors on input families that it lacks.

        A first look, which takes no errors, renews the times alone.
        """
        if newer.status == "slower" and self.errors:
            times = {name: getattr(newer, name) for name in ("time_ms", "spread_ms", "host_ms", "device_ms")}
            return replace(self, **times)
        return newer if newer.time_ms is None else replace(newer, errors={**self.errors, **newer.errors})


def _bounded(time_ms: float) -> float:
    return min(max(time_ms, SHORTEST_MS), LONGEST_MS)


def nearest(value: float | None, digits: int) -> float | None:
    """The nearest number of so many digits; None stays None."""
    return None if value is None else float(f"{value:.{digits}g}")


def _above(value: float, digits: int) -> float:
    """The least number of so many digits that is not below the value."""
    if not math.isfinite(value) or value == 0:
        return value
    exact = Decimal(repr(value))
    return float(exact.quantize(Decimal((0, (1,), exact.adjusted() - digits + 1)), rounding=ROUND_CEILING))
