"""How long a plan takes on a shape that was not measured: a physical law, corrected by what was measured nearby."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from ...kernels.plan import Plan
from ...problem.spec import AttentionSpec
from ...tables.entry import Entry
from ..similarity import SpecClass, class_of, sizes
from .fit import Fit, calibration

__all__ = ["CostModel", "Prediction"]

_SHORTEST, _LONGEST = 1e-6, 1e9  # ms; no real time lies outside these bounds
_MOST_ENTRIES = 256  # a fit takes the nearest of more: its cost grows with the cube
_MOST_FITS = 256  # of up to half a MiB each


@dataclass(frozen=True)
class Prediction:
    """``time_ms`` of the whole call, and the standard ``error`` of its logarithm: 0.05 is about 5 %."""

    time_ms: float
    error: float


class CostModel:
    """The time of each plan as a function of the spec, fitted to the entries of one table.

    A call takes as long as the longer of two: the host, which takes about as long at every spec and scatters
    (``cost_model_host``), and the device.  For the device's time ``launch + bytes / bandwidth + operations / rate``,
    with no coefficient below zero, is fitted to all of a plan's entries of one direction and precision.  What is left
    over (a rate is another at each head dimension and mask, short rows fill a GPU worse) is taken for a Gaussian
    process of the spec's sizes on logarithms, so that it follows the measured specs closely where they are near, and
    falls back to the law with a growing error where they are far (Rasmussen and Williams, Gaussian Processes for
    Machine Learning, chapter 2; the residuals of leaving one out are their equation 5.12, without fitting again).  An
    entry counts as far as the device, not the host, limited it, which the other entries show.

    A plan is predicted only in a class (``similarity``) in which it was measured.  Nothing is
    fitted until it is asked for.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries: dict[tuple[object, ...], list[Entry]] = {}
        for entry in entries:
            if entry.usable and _SHORTEST <= (entry.time_ms or 0.0) <= _LONGEST:
                self._entries.setdefault(_series(entry.plan, entry.spec), []).append(entry)
        self._fits: dict[tuple[object, ...], Fit] = {}
        self._lock = threading.Lock()

    def predict(self, plan: Plan, spec: AttentionSpec) -> Prediction | None:
        """The time of a plan at a spec, None where it was never measured in the spec's class."""
        fit = self._fit(plan, spec)
        if fit is None:
            return None
        time_ms, error = fit.predict(spec)
        return Prediction(time_ms, error) if 0 < time_ms < math.inf else None

    def gap_error(self, one: Plan, other: Plan, spec: AttentionSpec) -> float:
        """The standard error of the logarithm of the ratio of two predictions.

        Shapes that are slow for one plan are slow for the next, so that a ratio is known better than its parts: by how
        much, the residuals of leaving out one spec for both say.  Infinite where one of them has no prediction.
        """
        first, second = self._fit(one, spec), self._fit(other, spec)
        if first is None or second is None:
            return math.inf
        pairs = [(residual, second.residuals[at]) for at, residual in first.residuals.items() if at in second.residuals]
        return math.hypot(first.deviation(spec), second.deviation(spec)) * calibration(
            ((a.value - b.value) / math.hypot(a.deviation, b.deviation), a.heard * b.heard) for a, b in pairs
        )

    def _fit(self, plan: Plan, spec: AttentionSpec) -> Fit | None:
        series = _series(plan, spec)
        entries = self._entries.get(series, [])
        if not any(class_of(entry.spec) == class_of(spec) for entry in entries):
            return None
        doublings = _doublings(spec) if len(entries) > _MOST_ENTRIES else None
        key = series if doublings is None else (*series, class_of(spec), doublings)
        fit = self._fits.get(key)
        if fit is None:
            fit = Fit(entries if doublings is None else _nearest(entries, class_of(spec), doublings))
            with self._lock:
                if len(self._fits) >= _MOST_FITS:
                    del self._fits[next(iter(self._fits))]
                self._fits[key] = fit
        return fit


def _series(plan: Plan, spec: AttentionSpec) -> tuple[object, ...]:
    """The key of a fit: a plan in one direction and precision."""
    return plan, spec.direction, spec.dtype, spec.descale


def _doublings(spec: AttentionSpec) -> tuple[int, ...]:
    """The sizes of a spec to the nearest doubling, so that a program whose keys grow one by one needs few fits."""
    return tuple(round(math.log2(size)) for size in sizes(spec))


def _nearest(entries: list[Entry], alike: SpecClass, doublings: tuple[int, ...]) -> list[Entry]:
    """Those of the class first, then those that lie nearest: the same for every spec of these doublings."""

    def order(entry: Entry) -> tuple[bool, float, str]:
        apart = sum(abs(math.log2(size) - middle) for size, middle in zip(sizes(entry.spec), doublings, strict=True))
        return class_of(entry.spec) != alike, apart, str(entry.spec)

    return sorted(entries, key=order)[:_MOST_ENTRIES]
