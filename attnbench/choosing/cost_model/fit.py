"""Fit one plan's times as a function of the spec: a law for the device, its residuals, and the host."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from ...problem.lengths_kind import BATCHES
from ...problem.spec import AttentionSpec
from ...tables.entry import Entry
from ..similarity import of_one_length
from .host import HostFloor, MeasuredHost, longer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Array = npt.NDArray[np.float64]

__all__ = ["Fit", "Residual", "calibration"]

# How far the logarithm of a time lies from the physical law, and how that carries over from one
# spec to another.  Found on the rows of an H200 by choosing on half of them for the other half:
# any of them halved or doubled changed the regret by at most 0.3 per cent.
_CLASS_DEVIATION = 0.2  # of a class of specs: what a kernel reaches at its head dimension and mask
_FIXED_DEVIATION = 0.8  # of its launch and bytes: a kernel may pad or transpose at some head dimensions
_SIZE_DEVIATION = 0.12  # of one spec within its class
_REACH_HEAD_DIM = 2.0  # doublings over which the deviations of classes forget one another
_REACH_SIZE = 4.0  # doublings over which those of sizes do
_OTHER_MASK, _DOUBLE_GROUP = 0.8, 0.95  # the correlation left across masks or a softcap, and a doubling of the group
# That between sequences of one length and packed or padded ones of as much work: the deviation of one is then known to
# 0.1 from the other.  On an H200 90 predictions of packed batches, of 9 plans at 64k tokens, from those of one length
# were 0.77 to 1.50 times what was measured; between plans at one batch they differed by 0.09.
_OTHER_BATCH = 0.9
_LAW_DEVIATION = 0.15  # of a time from the law that its kernel follows, relative to the time
_WITHOUT_OPERATIONS = 0.1  # prior weight of a law in which operations take no time; that of another is 1
_REPEATED = 0.05  # how well a median is known whose samples hardly scatter: sweeps differ by more than they say
_LARGEST_SPREAD = 0.3  # an entry that scatters by more counts for next to nothing already
_SHORTEST = 1e-6  # ms
_PRIOR_WEIGHT = 2.0  # how many residuals the expectation that the deviations above are right counts for
_ROUNDS, _STEP = 8, 0.6  # of telling host from device; a full step may swing between two answers
_MASKS = {"none": 0, "causal": 1, "window": 2}
_BATCHES = (None, *BATCHES)
_TILE, _BLOCKS = 128, 128  # queries that a block of threads processes at once, and blocks that fill a data centre's GPU


class Residual(NamedTuple):
    """A logarithm of a time minus its prediction; ``heard`` is the probability that the call waited for the device."""

    value: float
    deviation: float
    heard: float


class Fit:
    """One plan's law, residual process and host, with the leave-one-out residual of each entry."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        import numpy as np  # imported here: attention() does not need it

        self._last: tuple[AttentionSpec, float, float] | None = None
        entries = sorted(entries, key=lambda each: str(each.spec))  # sums come out the same in whatever order
        specs = [entry.spec for entry in entries]
        times = np.log(np.array([entry.device_ms or entry.time_ms for entry in entries], dtype=float))
        scatter = np.array([_scatter(entry) for entry in entries])
        noise = _REPEATED**2 + np.nan_to_num(scatter) ** 2
        self._host = HostFloor(times, scatter, np.array([entry.device_ms is not None for entry in entries]))
        self._measured_host = MeasuredHost(entries)
        self._parts = np.array([_parts(spec) for spec in specs])
        self._places = np.array([_place(spec) for spec in specs])
        covariances = _covariances(self._places, self._places)
        sites = times, noise
        means, variances = self._left_out(times, covariances, *sites)
        for _ in range(_ROUNDS):
            self._host.weigh(means, variances, noise)
            sites = _towards(sites, self._host.sites(means, variances, noise))
            means, variances = self._left_out(times, covariances, *sites)
        self.residuals = {
            spec: Residual(float(time - mean), math.sqrt(variance), 1 - float(waited))
            for spec, time, mean, variance, waited in zip(
                specs, times, means, variances + noise, self._host.waited, strict=True
            )
        }
        self._calibration = calibration((each.value / each.deviation, each.heard) for each in self.residuals.values())

    def _left_out(
        self, times: _Array, covariances: tuple[_Array, _Array], sites: _Array, noise: _Array
    ) -> tuple[_Array, _Array]:
        """Fit law and process to the sites; (mean, variance) of the device time at each spec without its own entry."""
        import numpy as np

        alike, fixed = covariances
        self._laws, self._law_weights = _non_negative(self._parts / np.exp(times)[:, None], _REPEATED / np.sqrt(noise))
        self._shares = self._share(self._parts)
        covariance = alike + fixed * np.outer(self._shares, self._shares)
        self._inverse = np.linalg.inv(covariance + np.diag(noise))
        self._weights = self._inverse @ (sites - self._by_law(self._parts)[0])
        variances = 1.0 / np.diag(self._inverse)
        return sites - self._weights * variances, np.maximum(variances - noise, 1e-6)

    def _share(self, parts: _Array) -> _Array:
        """The share (n,) of the time that the law gives to launch and bytes, for parts (n, 3)."""
        import numpy as np

        times = parts[:, None, :] * self._laws
        share: _Array = times[..., :2].sum(axis=2) / np.maximum(times.sum(axis=2), _SHORTEST) @ self._law_weights
        return share

    def _by_law(self, parts: _Array) -> tuple[_Array, _Array]:
        """Mean and variance (n,) of the logarithm of the time by the laws, for parts (n, 3)."""
        import numpy as np

        logs = np.log(np.maximum(parts @ self._laws.T, _SHORTEST))
        mean = logs @ self._law_weights
        variance: _Array = (logs - mean[:, None]) ** 2 @ self._law_weights
        return mean, variance

    def predict(self, spec: AttentionSpec) -> tuple[float, float]:
        """(median of the whole call in ms, standard error of its logarithm); the time may be infinite far from
        measurements.
        """
        median, spread = self._at(spec)
        return math.exp(median) if median < 700 else math.inf, self._calibration * spread

    def deviation(self, spec: AttentionSpec) -> float:
        """The standard deviation of the logarithm of a time to be measured, before calibration."""
        return self._at(spec)[1]

    def _at(self, spec: AttentionSpec) -> tuple[float, float]:
        """Median and deviation of the logarithm, kept for the spec of the last call: a choice asks for it repeatedly.

        The deviation is half the distance between the bounds of the middle two thirds.
        """
        last = self._last
        if last is None or last[0] != spec:
            device = self._device(spec)
            low, median, high = (self._longer(spec, device, share) for share in (1 / 6, 0.5, 5 / 6))
            self._last = last = spec, median, (high - low) / 2
        return last[1:]

    def _longer(self, spec: AttentionSpec, device: tuple[float, float], share: float) -> float:
        """The logarithm of a time that a call stays below in this share of cases."""
        return longer(self._measured_host.at(spec) or self._host.host, device, share)

    def _device(self, spec: AttentionSpec) -> tuple[float, float]:
        """Mean and deviation of the logarithm of a time to be measured on the device."""
        import numpy as np

        parts, place = np.array([_parts(spec)]), np.array([_place(spec)])
        share = float(self._share(parts)[0])
        alike, fixed = (each[0] for each in _covariances(place, self._places))
        near = alike + fixed * share * self._shares
        variance = _CLASS_DEVIATION**2 + _SIZE_DEVIATION**2 + (_FIXED_DEVIATION * share) ** 2
        variance -= float(near @ self._inverse @ near)
        (law,), (undecided,) = self._by_law(parts)
        deviation = math.sqrt(max(0.0, variance) + float(undecided) + _REPEATED**2)
        return float(law) + float(near @ self._weights), deviation


def calibration(scores: Iterable[tuple[float, float]]) -> float:
    """How many times larger than expected the residuals are, shrunk towards 1 if they are few; from (score, weight)
    pairs.
    """
    # Bounded, so that one outlier does not hide all others.
    squares = [(min(score * score, 100.0), weight) for score, weight in scores]
    total = sum(weight for _, weight in squares) + _PRIOR_WEIGHT
    return math.sqrt((sum(square * weight for square, weight in squares) + _PRIOR_WEIGHT) / total)


def _towards(before: tuple[_Array, _Array], after: tuple[_Array, _Array]) -> tuple[_Array, _Array]:
    """A damped step from one set of (values, variances) to the other, in natural parameters."""
    (old, was), (new, now) = before, after
    precision = (1 - _STEP) / was + _STEP / now
    return ((1 - _STEP) * old / was + _STEP * new / now) / precision, 1 / precision


def _parts(spec: AttentionSpec) -> tuple[float, float, float]:
    """The terms of the law: 1 for the launch, 1e9 elements read and written, tera-operations.

    How many bytes an element has and how often a backward reads it are the same in all of a fit, in its coefficient.
    With fewer blocks of queries than a GPU runs at once, operations count more, for the part that is idle; kernels that
    split the keys of a block are faster, which the residuals learn.  Sequences of unequal length count as those of one
    length with as much work.
    """
    spec = of_one_length(spec)
    per_head = spec.head_dim + spec.head_dim_v
    elements = spec.batch * (spec.heads * spec.seqlen_q + spec.kv_heads * spec.seqlen_kv) * per_head
    busy = min(1.0, spec.batch * spec.heads * math.ceil(spec.seqlen_q / _TILE) / _BLOCKS)
    return 1.0, elements / 1e9, spec.flops / 1e12 / busy


def _place(spec: AttentionSpec) -> tuple[float, ...]:
    """The coordinates of a spec, in doublings, of its sequences as if of one length; mask and softcap are numbered
    together, and batches.
    """
    batch = _BATCHES.index(None if spec.lengths is None else spec.lengths.batch)
    spec = of_one_length(spec)
    sizes = (spec.head_dim, spec.head_dim_v, spec.batch * spec.heads, spec.seqlen_q, spec.seqlen_kv, spec.group)
    return (*(math.log2(size) for size in sizes), _MASKS[spec.mask.kind] + 0.5 * (spec.softcap > 0), float(batch))


def _covariances(ones: _Array, others: _Array) -> tuple[_Array, _Array]:
    """The covariance of the deviations from the law at ``ones`` (n, 8) and ``others`` (m, 8), in two parts (n, m).

    The first is that of classes and sizes.  The second is that of launch and bytes where a time consists of nothing
    else; it is multiplied by their shares of both times.
    """
    import numpy as np

    apart = np.abs(ones[:, None, :] - others[None, :, :])
    head_dim, head_dim_v, heads, queries, keys, group, mask, batch = np.moveaxis(apart, -1, 0)
    classes = np.exp(-(head_dim + head_dim_v) / 2 / _REACH_HEAD_DIM)
    classes = classes * np.where(mask > 0, _OTHER_MASK, 1.0) * _DOUBLE_GROUP**group
    classes = classes * np.where(batch > 0, _OTHER_BATCH, 1.0)
    sizes = np.exp(-(heads + (queries + keys) / 2) / _REACH_SIZE)
    return classes * (_CLASS_DEVIATION**2 + _SIZE_DEVIATION**2 * sizes), classes * _FIXED_DEVIATION**2


def _scatter(entry: Entry) -> float:
    """Half the interquartile range of the samples over their median; NaN if it is not known."""
    assert entry.time_ms, "entries without a time are in no fit"
    return math.nan if entry.spread_ms is None else min(0.5 * entry.spread_ms / entry.time_ms, _LARGEST_SPREAD)


def _non_negative(columns: _Array, weights: _Array) -> tuple[_Array, _Array]:
    """Coefficients (m, 3) of m laws, and the weight of each (m,) in their average.

    A law is the weighted least-squares fit of a subset of the columns, whose sum should be 1; laws with a negative
    coefficient are left out.  Few measurements fit several: by one alone, a call with eight times the tokens may take
    as long, or 64 times.
    """
    import numpy as np

    columns, target = columns * weights[:, None], weights
    laws, errors = [], []
    for count in range(1, columns.shape[1] + 1):
        for chosen in combinations(range(columns.shape[1]), count):
            part = columns[:, chosen]
            scale = np.abs(part).max(axis=0)
            fitted = np.linalg.lstsq(part / scale, target, rcond=None)[0] / scale
            if (fitted >= 0).all():
                law = np.zeros(columns.shape[1])
                law[list(chosen)] = fitted
                laws.append(law)
                errors.append(float(np.sum((part @ fitted - target) ** 2)))
    found = np.array(laws)
    likelihoods = np.exp((min(errors) - np.array(errors)) / (2 * _LAW_DEVIATION**2))
    weighted = likelihoods * np.where(found[:, -1] > 0, 1.0, _WITHOUT_OPERATIONS)
    return found, weighted / weighted.sum()
