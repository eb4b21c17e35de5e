"""Predict the error of a plan on a shape that was not measured, as a distribution over random inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...kernels.plan import Plan
from ...problem.spec import AttentionSpec
from ...tables.entry import Entry
from ..similarity import of_batch, series

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Array = npt.NDArray[np.float64]

__all__ = ["ErrorModel", "summed"]

# Standard deviations above the expected logarithm that an error stays below with 95 % confidence.  1.65 would do if the
# errors had a normal distribution, but rare inputs have larger ones.  Of 194 FP8 errors beyond 8,192 tokens, in the
# table of an H200, 185 stayed below what those up to there predict, grown as kernels declare; with 2.5 it was 179.
_DEVIATIONS = 3.0
# The spread of log2 errors about a fit before anything was measured, for 8 and for 16 bits, and how many measurements
# that counts for.  On an H200 the spreads of fits were 0.01 to 0.2.
_SPREAD_FP8, _SPREAD, _PRIOR_WEIGHT = 0.12, 0.03, 10.0
_STIFFNESS = 0.3  # of how many measurements a slope of 0 counts for, at one unit from the middle
_STIFFNESS_UNEQUAL = 10.0  # of that of packed and padded sequences: each is quantised and attended like one alone
_LEAST, _MOST = 1e-9, 1e3  # errors are counted as if between them: neither 0 nor infinity has a logarithm


class ErrorModel:
    """The error of each plan as a function of the spec, fitted to entries of one or more tables.

    The logarithm of the error is linear in the logarithms of head dimension and of the keys that a query sees, in the
    mean over the longest sequence: a window shows few, however long that is.  It is another with a mask than without,
    and with sequences of unequal length; batch, heads and grouping do not matter.  A plan of one direction and type has
    one such Bayesian regression for each input family, over all classes (Gelman et al., Bayesian Data Analysis, chapter
    14).  What it leaves over is how inputs and shapes differ: the fewer the measurements and the more they differ, the
    wider the distribution of the next error.  Below the fewest measured keys the error is that at the fewest.  Beyond
    the most it goes on to grow, as on outliers, of which more tokens have larger ones (H200: 1.03 to 1.20 a doubling),
    but not to fall.  Of 194 FP8 errors of more than 8,192 tokens there 60 were above what those of fewer predict if it
    stays, 23 if it grows as kernels declare, 9 if it does both.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries: dict[tuple[object, ...], list[Entry]] = {}
        for entry in entries:
            if entry.usable:
                self._entries.setdefault(series(entry.plan, entry.spec), []).append(entry)
        self._fits: dict[tuple[object, ...], dict[str, _Fit]] = {}

    def predict(self, plan: Plan, spec: AttentionSpec) -> tuple[float, str] | None:
        """(error that one more measurement stays below with 95 % confidence, the input family where it is largest).

        None if the plan was never measured in this direction and type.
        """
        key = series(plan, spec)
        if key not in self._fits:
            entries = of_batch(self._entries, plan, spec)
            if not entries:
                return None
            self._fits[key] = _fits(entries)
        return max((fit.bound(spec), family) for family, fit in self._fits[key].items())

    def most_summed(self, plan: Plan, spec: AttentionSpec) -> int:
        """The most tokens in a sum that the plan was measured with, in this direction and type."""
        return max(summed(entry.spec) for entry in of_batch(self._entries, plan, spec))


def summed(spec: AttentionSpec) -> int:
    """The tokens in the longest sum: keys for out and dQ, and in training queries for dK and dV."""
    return max(spec.seqlen_q, spec.seqlen_kv) if spec.training else spec.seqlen_kv


def _fits(entries: Iterable[Entry]) -> dict[str, _Fit]:
    """A regression for each input family."""
    measured: dict[str, list[tuple[AttentionSpec, float]]] = {}
    for entry in sorted(entries, key=lambda each: str(each.spec)):  # sums depend on the order
        for family, error in entry.errors.items():
            measured.setdefault(family, []).append((entry.spec, error))
    spread = _SPREAD_FP8 if entry.plan.fp8 else _SPREAD
    return {family: _Fit(each, spread) for family, each in measured.items()}


class _Fit:
    """The regression of one plan's errors on one input family."""

    def __init__(self, measured: list[tuple[AttentionSpec, float]], spread: float) -> None:
        import numpy as np  # imported here: attention() does not need it

        places = np.array([_place(spec) for spec, _ in measured])
        errors = np.log2(np.clip([error for _, error in measured], _LEAST, _MOST))
        self._least, self._most = places.min(axis=0)[-1], places.max(axis=0)[-1]
        precision = places.T @ places + np.diag([1e-6, _STIFFNESS, _STIFFNESS, _STIFFNESS_UNEQUAL, _STIFFNESS])
        self._covariance: _Array = np.linalg.inv(precision)
        self._weights: _Array = self._covariance @ (places.T @ errors)
        left = errors - places @ self._weights
        fitted = float(np.einsum("ij,jk,ik->", places, self._covariance, places))  # parameters that the errors fixed
        freedom = _PRIOR_WEIGHT + max(len(measured) - fitted, 0.0)
        self._variance = (_PRIOR_WEIGHT * spread**2 + float(left @ left)) / freedom

    def bound(self, spec: AttentionSpec) -> float:
        """The error that one more measurement stays below with 95 % confidence."""
        import numpy as np

        *place, keys = _place(spec)
        at = np.array([*place, min(max(keys, self._least), self._most)])
        deviation = math.sqrt(self._variance * (1 + float(at @ self._covariance @ at)))
        grown = max(keys - self._most, 0.0) * max(self._weights[-1], 0.0)
        return float(2 ** min(float(at @ self._weights) + _DEVIATIONS * deviation + grown, 1000.0))


def _place(spec: AttentionSpec) -> tuple[float, ...]:
    """What an error depends on: a constant, doublings of the head dimensions from 128, a mask, unequal lengths,
    doublings of the keys that a query sees from 2,048.
    """
    dims = math.log2(spec.head_dim * spec.head_dim_v) / 2 - 7
    masked, unequal = float(spec.mask.kind != "none"), float(spec.lengths is not None)
    seen = max(spec.mask.area(spec.seqlen_q, spec.seqlen_kv) / spec.seqlen_q, 1.0)
    return 1.0, dims, masked, unequal, math.log2(seen) - 11
