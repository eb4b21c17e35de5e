"""Predict the error of a plan on a shape that was not measured, as a distribution over random inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...kernels.plan import Plan
from ...problem.spec import AttentionSpec
from ...tables.entry import Entry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Array = npt.NDArray[np.float64]

__all__ = ["ErrorModel"]

# Quantile of the Student distribution that a budget is held against.  Rare inputs have larger errors than it allows: on
# an H200 2.8 % of 1,600 errors, predicted without their class, were above this quantile, and 5.1 % above that of 0.95.
_QUANTILE = 0.99
# The spread of log2 errors about a fit before anything was measured, for 8 and for 16 bits, and how many measurements
# that counts for.  On an H200 the spreads of fits were 0.01 to 0.2.
_SPREAD_FP8, _SPREAD, _PRIOR_WEIGHT = 0.12, 0.03, 10.0
_STIFFNESS = 0.3  # of how many measurements a slope of 0 counts for, at one unit from the middle
_LEAST, _MOST = 1e-9, 1e3  # errors are counted as if between them: neither 0 nor infinity has a logarithm


class ErrorModel:
    """The error of each plan as a function of the spec, fitted to the entries of one table.

    The logarithm of the error is linear in the logarithms of head dimension and keys, and another with a mask than
    without; batch, heads and grouping do not matter.  A plan of one direction and type has one such Bayesian regression
    for each input family, over all classes; what is left over is how inputs and shapes differ, and has a Student
    distribution (Gelman et al., Bayesian Data Analysis, chapter 14): the fewer the measurements and the more they
    differ, the wider.  Beyond the fewest and most measured keys the error is that at the last.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._errors: dict[tuple[object, ...], dict[str, list[tuple[AttentionSpec, float]]]] = {}
        for entry in sorted((each for each in entries if each.usable), key=lambda each: str(each.spec)):
            families = self._errors.setdefault(_series(entry.plan, entry.spec), {})
            for family, error in entry.errors.items():
                families.setdefault(family, []).append((entry.spec, error))
        self._fits: dict[tuple[object, ...], dict[str, _Fit]] = {}

    def predict(self, plan: Plan, spec: AttentionSpec) -> tuple[float, str] | None:
        """(error that one more measurement stays below, the input family where it is largest).

        None if the plan was never measured in this direction and type.
        """
        series = _series(plan, spec)
        if series not in self._errors:
            return None
        fits = self._fits.get(series)
        if fits is None:
            spread = _SPREAD_FP8 if plan.fp8 else _SPREAD
            fits = self._fits[series] = {family: _Fit(each, spread) for family, each in self._errors[series].items()}
        return max((fit.quantile(spec), family) for family, fit in fits.items())

    def most_keys(self, plan: Plan, spec: AttentionSpec) -> int:
        """The largest number of keys that the plan was measured with, in this direction and type."""
        return max(at.seqlen_kv for each in self._errors[_series(plan, spec)].values() for at, _ in each)


class _Fit:
    """The regression of one plan's errors on one input family."""

    def __init__(self, measured: list[tuple[AttentionSpec, float]], spread: float) -> None:
        import numpy as np  # imported here: attention() does not need it

        places = np.array([_place(spec) for spec, _ in measured])
        errors = np.log2(np.clip([error for _, error in measured], _LEAST, _MOST))
        self._least, self._most = places.min(axis=0)[-1], places.max(axis=0)[-1]
        precision = places.T @ places + np.diag([1e-6, *[_STIFFNESS] * (places.shape[1] - 1)])
        self._covariance: _Array = np.linalg.inv(precision)
        self._weights: _Array = self._covariance @ (places.T @ errors)
        left = errors - places @ self._weights
        fitted = float(np.einsum("ij,jk,ik->", places, self._covariance, places))  # parameters that the errors fixed
        self._freedom = _PRIOR_WEIGHT + max(len(measured) - fitted, 0.0)
        self._variance = (_PRIOR_WEIGHT * spread**2 + float(left @ left)) / self._freedom

    def quantile(self, spec: AttentionSpec) -> float:
        """The error that one more measurement stays below with a probability of 95 % at least."""
        import numpy as np
        from scipy.special import stdtrit

        *place, keys = _place(spec)
        at = np.array([*place, min(max(keys, self._least), self._most)])
        deviation = math.sqrt(self._variance * (1 + float(at @ self._covariance @ at)))
        expected = float(at @ self._weights)
        return float(2 ** min(expected + float(stdtrit(self._freedom, _QUANTILE)) * deviation, 1000.0))


def _series(plan: Plan, spec: AttentionSpec) -> tuple[object, ...]:
    """The key of the fits: a plan in one direction and type."""
    return plan, spec.direction, spec.dtype, spec.descale


def _place(spec: AttentionSpec) -> tuple[float, ...]:
    """What an error depends on: a constant, doublings of the head dimensions from 128, a mask, doublings of the keys
    from 2,048.
    """
    dims = math.log2(spec.head_dim * spec.head_dim_v) / 2 - 7
    return 1.0, dims, float(spec.mask.kind != "none"), math.log2(spec.seqlen_kv) - 11
