"""Predict how long a plan takes on a shape that was not measured: a physical law, corrected by measurements nearby."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from ...kernels.plan import Plan
from ...problem.spec import AttentionSpec
from ...tables.entry import Entry
from ..similarity import SpecClass, class_of, of_batch, series, sizes
from .fit import Fit, calibration

__all__ = ["CostModel", "Prediction"]

_SHORTEST, _LONGEST = 1e-6, 1e9  # ms; no real time lies outside these bounds
_MOST_ENTRIES = 256  # a fit takes the nearest of more: its cost grows with the cube
_MOST_FITS = 256  # of up to half a MiB each
_fitting = threading.Lock()  # the threads of BLAS are the process's: two at once could leave it with one for good


@dataclass(frozen=True)
class Prediction:
    """``time_ms`` of the whole call, and the standard ``error`` of its logarithm: 0.05 is about 5 %.

    ``scaled_from`` names the GPU whose times were scaled, if it was predicted from such alone.
    """

    time_ms: float
    error: float
    scaled_from: str | None = None


class CostModel:
    """The time of each plan as a function of the spec, fitted to the entries of one table.

    A call takes the longer of two times: the host's, about the same at every spec (``host``), and the device's.  The
    law of the device, ``launch + bytes / bandwidth + operations / rate`` with non-negative coefficients, is fitted to a
    plan's entries of one direction and precision.  Where few entries do not tell its terms apart, all laws that fit are
    averaged, and where they differ the error is larger (Hoeting et al., Bayesian Model Averaging, Statistical Science
    14, 1999).  The residuals on logarithms are a Gaussian process of the spec's
    sizes: near measured specs the prediction follows them, far away it is the law with a growing error (Rasmussen and
    Williams, Gaussian Processes for Machine Learning, chapter 2; leave-one-out residuals are their equation 5.12).  An
    entry counts as far as the device limited it.

    A plan is predicted in any class (``similarity``), with a larger error in those in which it was not measured.  Fits
    are made when they are needed.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries: dict[tuple[object, ...], list[Entry]] = {}
        for entry in entries:
            if (entry.usable or entry.status == "slower") and _SHORTEST <= (entry.time_ms or 0.0) <= _LONGEST:
                self._entries.setdefault(series(entry.plan, entry.spec), []).append(entry)
        self._fits: dict[tuple[object, ...], Fit] = {}
        self._lock = threading.Lock()

    def predict(self, plan: Plan, spec: AttentionSpec) -> Prediction | None:
        """The predicted time of a plan at a spec; None if it was never measured in its direction and type.

        A forward before a backward of another name was measured at few specs, and each of the two at many.  So such a
        pair takes no less than the backward with the forward of its own name, with one forward exchanged for the other.
        """
        found = self._fitted(plan, spec)
        if found is None or plan.backward in (None, plan.forward):
            return found
        own = self._fitted(Plan(plan.backward, plan.backward), spec)
        forward = spec.replace(direction="forward")
        given, usual = self._fitted(Plan(plan.forward), forward), self._fitted(Plan(plan.backward), forward)
        if own is None or given is None or usual is None:
            return found
        least = own.time_ms + given.time_ms - usual.time_ms
        if least <= found.time_ms:
            return found
        parts = (each.time_ms * each.error for each in (own, given, usual))
        return Prediction(least, math.hypot(*parts) / least)

    def _fitted(self, plan: Plan, spec: AttentionSpec) -> Prediction | None:
        fit = self._fit(plan, spec)
        if fit is None:
            return None
        time_ms, error = fit.predict(spec)
        return Prediction(time_ms, error) if 0 < time_ms < math.inf else None

    def gap_error(self, one: Plan, other: Plan, spec: AttentionSpec) -> float:
        """The standard error of the logarithm of the ratio of two predictions, infinite if one has none.

        Shapes that are slow for one plan are slow for others, so a ratio is known better than its parts; the residuals
        of specs that both plans have say by how much.
        """
        first, second = self._fit(one, spec), self._fit(other, spec)
        if first is None or second is None:
            return math.inf
        pairs = [(residual, second.residuals[at]) for at, residual in first.residuals.items() if at in second.residuals]
        return math.hypot(first.deviation(spec), second.deviation(spec)) * calibration(
            ((a.value - b.value) / math.hypot(a.deviation, b.deviation), a.heard * b.heard) for a, b in pairs
        )

    def _fit(self, plan: Plan, spec: AttentionSpec) -> Fit | None:
        entries = of_batch(self._entries, plan, spec)
        if not entries:
            return None
        doublings = _doublings(spec) if len(entries) > _MOST_ENTRIES else None
        key = series(plan, spec) if doublings is None else (*series(plan, spec), class_of(spec), doublings)
        fit = self._fits.get(key)
        if fit is None:
            fit = _fitted_alone(entries if doublings is None else _nearest(entries, class_of(spec), doublings))
            with self._lock:
                if len(self._fits) >= _MOST_FITS:
                    del self._fits[next(iter(self._fits))]
                self._fits[key] = fit
        return fit


def _fitted_alone(entries: list[Entry]) -> Fit:
    """The fit, by one thread of BLAS: more are no faster for so small matrices, and where each of several processes of
    a host has one for every core, all wait for one another (four on two cores: 6 to 11 s instead of 2).
    """
    from threadpoolctl import threadpool_limits  # imported here: attention() does not need it

    with _fitting, threadpool_limits(1, "blas"):
        return Fit(entries)


def _doublings(spec: AttentionSpec) -> tuple[int, ...]:
    """The sizes of a spec to the nearest doubling, so that a program whose keys grow one by one needs few fits."""
    return tuple(round(math.log2(size)) for size in sizes(spec))


def _nearest(entries: list[Entry], alike: SpecClass, doublings: tuple[int, ...]) -> list[Entry]:
    """The entries of the class first, however they pack or pad, then the nearest others; the same for every spec of
    these doublings.
    """

    def order(entry: Entry) -> tuple[bool, float, str]:
        own = class_of(entry.spec)._replace(batch=alike.batch)
        apart = sum(abs(math.log2(size) - middle) for size, middle in zip(sizes(entry.spec), doublings, strict=True))
        return own != alike, apart, str(entry.spec)

    return sorted(entries, key=order)[:_MOST_ENTRIES]
