"""How long a plan takes on a shape that was not measured: a physical law, corrected by what was measured nearby."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from .plan import Plan
from .similarity import class_of, distance
from .spec import AttentionSpec
from .table import Entry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Array = npt.NDArray[np.float64]

__all__ = ["CostModel", "Prediction"]

# How far the logarithm of a time lies from the physical law, and how that carries over from one
# spec to another.  Found on the rows of an H200 by choosing on half of them for the other half:
# any of them halved or doubled changed the regret by at most one per cent, most by some tenths.
_CLASS_DEVIATION = 0.2  # of a class of specs: what a kernel reaches at its head dimension and mask
_FIXED_DEVIATION = 0.8  # of its launch and bytes: a kernel may pad or transpose at some head dimensions
_SIZE_DEVIATION = 0.12  # of one spec within its class
_REACH_HEAD_DIM = 2.0  # doublings over which the deviations of classes forget one another
_REACH_SIZE = 4.0  # doublings over which those of sizes do
_OTHER_MASK, _OTHER_GROUPING = 0.8, 0.9  # the correlation that is left across them
_REPEATED = 0.05  # how well a median is known whose samples hardly scatter: sweeps differ by more than they say
_LARGEST_SPREAD = 0.3  # an entry that scatters by more counts for next to nothing already
_SHORTEST, _LONGEST = 1e-6, 1e9  # ms; what a file claims beyond these was never measured
_MOST_ENTRIES = 256  # a fit takes the nearest of more: its cost grows with the cube
_MOST_FITS = 1024
_PRIOR_WEIGHT = 2.0  # how many residuals the expectation that the deviations above are right counts for
_ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_MASKS = {"none": 0, "causal": 1, "window": 2}


@dataclass(frozen=True)
class Prediction:
    """``time_ms`` of the whole call, and the standard ``error`` of its logarithm: 0.05 is about 5 %."""

    time_ms: float
    error: float


class CostModel:
    """The time of each plan as a function of the spec, fitted to the entries of one table.

    ``launch + bytes / bandwidth + operations / rate``, with no coefficient below zero, is
    fitted to all of a plan's entries of one direction and precision.  What is left over (a
    rate is another at each head dimension and mask, short rows fill a GPU worse) is taken for
    a Gaussian process of the spec's sizes on logarithms, so that it follows the measured
    specs closely where they are near, and falls back to the law with a growing error where
    they are far (Rasmussen and Williams, Gaussian Processes for Machine Learning, chapter 2;
    the residuals of leaving one out are their equation 5.12, without fitting again).

    A plan is predicted only in a class (``similarity``) in which it was measured.  Nothing is
    fitted until it is asked for.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries: dict[tuple[object, ...], list[Entry]] = {}
        for entry in entries:
            if entry.usable and _SHORTEST <= (entry.time_ms or 0.0) <= _LONGEST:
                self._entries.setdefault(_series(entry.plan, entry.spec), []).append(entry)
        self._fits: dict[tuple[object, ...], _Fit] = {}

    def predict(self, plan: Plan, spec: AttentionSpec) -> Prediction | None:
        """The time of a plan at a spec, None where it was never measured in the spec's class."""
        fit = self._fit(plan, spec)
        return None if fit is None else fit.predict(spec)

    def gap_error(self, one: Plan, other: Plan, spec: AttentionSpec) -> float:
        """The standard error of the logarithm of the ratio of two predictions.

        Shapes that are slow for one plan are slow for the next, so that a ratio is known
        better than its parts: by how much, the residuals of leaving out one spec for both
        say.  Infinite where one of them has no prediction.
        """
        first, second = self._fit(one, spec), self._fit(other, spec)
        if first is None or second is None:
            return math.inf
        together = math.hypot(first.deviation(spec), second.deviation(spec))
        return together * _calibration(
            (first.residuals[each][0] - second.residuals[each][0])
            / math.hypot(first.residuals[each][1], second.residuals[each][1])
            for each in first.residuals.keys() & second.residuals.keys()
        )

    def _fit(self, plan: Plan, spec: AttentionSpec) -> _Fit | None:
        series = _series(plan, spec)
        entries = self._entries.get(series, [])
        if not any(class_of(entry.spec) == class_of(spec) for entry in entries):
            return None
        key = series if len(entries) <= _MOST_ENTRIES else (*series, spec)
        if key not in self._fits:
            if len(self._fits) >= _MOST_FITS:
                self._fits.clear()
            self._fits[key] = _Fit(_nearest(entries, spec))
        return self._fits[key]


def _series(plan: Plan, spec: AttentionSpec) -> tuple[object, ...]:
    """What one fit is made for: a plan in one direction and precision."""
    return plan, spec.direction, spec.dtype, spec.descale


def _nearest(entries: list[Entry], spec: AttentionSpec) -> list[Entry]:
    if len(entries) <= _MOST_ENTRIES:
        return entries
    alike = class_of(spec)
    ranked = sorted(entries, key=lambda each: (class_of(each.spec) != alike, distance(each.spec, spec), str(each.spec)))
    return ranked[:_MOST_ENTRIES]


class _Fit:
    """One plan's law, its residual process, and how well both did on each entry without that entry."""

    def __init__(self, entries: list[Entry]) -> None:
        import numpy as np  # attention() is imported without it

        entries = sorted(entries, key=lambda each: str(each.spec))  # sums come out the same in whatever order
        specs = [entry.spec for entry in entries]
        times = np.array([entry.time_ms for entry in entries], dtype=float)
        parts = np.array([_parts(spec) for spec in specs])
        noise = np.array([_REPEATED**2 + _noise(entry) ** 2 for entry in entries])
        self._law = _non_negative(parts / times[:, None], _REPEATED / np.sqrt(noise))
        left_over = np.log(times) - np.log(np.maximum(parts @ self._law, _SHORTEST))
        self._places = np.array([self._place(spec) for spec in specs])
        self._inverse = np.linalg.inv(_covariance(self._places, self._places) + np.diag(noise))
        self._weights = self._inverse @ left_over
        variances = 1.0 / np.diag(self._inverse)
        self.residuals = {
            spec: (float(weight * variance), math.sqrt(variance))
            for spec, weight, variance in zip(specs, self._weights, variances, strict=True)
        }
        self._calibration = _calibration(residual / deviation for residual, deviation in self.residuals.values())

    def predict(self, spec: AttentionSpec) -> Prediction | None:
        import numpy as np

        law = max(float(np.dot(_parts(spec), self._law)), _SHORTEST)
        residual = float((_covariance(np.array([self._place(spec)]), self._places) @ self._weights)[0])
        time_ms = law * math.exp(min(residual, 50.0))
        if not 0 < time_ms < math.inf:
            return None
        return Prediction(time_ms, self._calibration * self.deviation(spec))

    def _place(self, spec: AttentionSpec) -> tuple[float, ...]:
        """Where a spec lies, and the share of its time that the law gives to launch and bytes."""
        launch, moved, computed = (part * factor for part, factor in zip(_parts(spec), self._law, strict=True))
        return (*_place(spec), (launch + moved) / max(launch + moved + computed, _SHORTEST))

    def deviation(self, spec: AttentionSpec) -> float:
        """The standard deviation of the logarithm of a time to be measured, before calibration."""
        import numpy as np

        place = np.array([self._place(spec)])
        near = _covariance(place, self._places)
        variance = _covariance(place, place) - near @ self._inverse @ near.T
        return math.sqrt(max(0.0, float(variance[0, 0])) + _REPEATED**2)


def _calibration(scores: Iterable[float]) -> float:
    """How many times the expected deviation the residuals are, drawn towards 1 where they are few."""
    squares = [min(score * score, 100.0) for score in scores]  # one wild entry must not silence a plan
    return math.sqrt((sum(squares) + _PRIOR_WEIGHT) / (len(squares) + _PRIOR_WEIGHT))


def _parts(spec: AttentionSpec) -> tuple[float, float, float]:
    """What the law multiplies: 1 for the launch, gigabytes that must be read and written, tera-operations."""
    per_head = spec.head_dim + spec.head_dim_v
    elements = spec.batch * (spec.heads * spec.seqlen_q + spec.kv_heads * spec.seqlen_kv) * per_head
    passes = 3 if spec.training else 1  # a backward reads all of it again, and writes as much
    return 1.0, elements * _ELEMENT_BYTES.get(spec.dtype, 1) * passes / 1e9, spec.flops / 1e12


def _place(spec: AttentionSpec) -> tuple[float, ...]:
    """Where a spec lies among others, in doublings; the mask and the grouping are numbered."""
    sizes = (spec.head_dim, spec.head_dim_v, spec.batch * spec.heads, spec.seqlen_q, spec.seqlen_kv)
    return (*(math.log2(size) for size in sizes), float(_MASKS[spec.mask.kind]), float(spec.group > 1))


def _covariance(ones: _Array, others: _Array) -> _Array:
    """Of the deviations from the law at every one of ``ones`` (n, 8) and ``others`` (m, 8): (n, m)."""
    import numpy as np

    apart = np.abs(ones[:, None, :] - others[None, :, :])
    head_dim, head_dim_v, heads, queries, keys, mask, grouping, _ = np.moveaxis(apart, -1, 0)
    classes = np.exp(-(head_dim + head_dim_v) / 2 / _REACH_HEAD_DIM)
    classes = classes * np.where(mask > 0, _OTHER_MASK, 1.0) * np.where(grouping > 0, _OTHER_GROUPING, 1.0)
    sizes = np.exp(-(heads + (queries + keys) / 2) / _REACH_SIZE)
    fixed = ones[:, None, -1] * others[None, :, -1]
    product: _Array = classes * (_CLASS_DEVIATION**2 + _SIZE_DEVIATION**2 * sizes + _FIXED_DEVIATION**2 * fixed)
    return product


def _noise(entry: Entry) -> float:
    """Half the interquartile range over the median: how far the middle half of the samples lies from it."""
    assert entry.time_ms, "entries without a time are in no fit"
    return min(0.5 * (entry.spread_ms or 0.0) / entry.time_ms, _LARGEST_SPREAD)


def _non_negative(columns: _Array, weights: _Array) -> _Array:
    """The coefficients, none below 0, whose sum of columns is nearest to 1 in every row: weighted least squares.

    There are so few columns that every subset is tried; the best one without a negative is
    the answer.
    """
    import numpy as np

    columns, target = columns * weights[:, None], weights
    best, least = np.zeros(columns.shape[1]), math.inf
    for count in range(1, columns.shape[1] + 1):
        for chosen in combinations(range(columns.shape[1]), count):
            part = columns[:, chosen]
            scale = np.abs(part).max(axis=0)
            if not scale.all():
                continue
            found = np.linalg.lstsq(part / scale, target, rcond=None)[0] / scale
            error = float(np.sum((part @ found - target) ** 2))
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(columns.shape[1]), error
                best[list(chosen)] = found
    return best
