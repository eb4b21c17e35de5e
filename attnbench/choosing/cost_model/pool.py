"""One prediction from several tables: of this GPU, and of others of its generation whose times were scaled to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ...kernels.plan import Plan
from ...problem.spec import AttentionSpec
from ...tables.table import Table
from .predict import CostModel, Prediction

__all__ = ["PooledModel"]


class PooledModel:
    """The cost models of several tables as one.

    Each table predicts by its own model, because its host and its GPU are others.  The logarithms of these times are
    averaged with the inverse squares of their errors as weights, so the table that knows more of the plan near the
    spec counts for more.  The error of a scaled time contains that of scaling (``Table.time_error``).
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._parts = [(CostModel(table.entries.values()), table) for table in tables]

    def predict(self, plan: Plan, spec: AttentionSpec) -> Prediction | None:
        """The predicted time of a plan at a spec; None if it was never measured in its direction and type."""
        found = [
            (part, math.hypot(part.error, table.time_error), table.scaled_from)
            for model, table in self._parts
            if (part := model.predict(plan, spec)) is not None
        ]
        if not found:
            return None
        mean, error = _mean((math.log(part.time_ms), error) for part, error, _ in found)
        sources = [source for _, _, source in found]
        return Prediction(math.exp(mean), error, None if None in sources else sources[0])

    def gap_error(self, one: Plan, other: Plan, spec: AttentionSpec) -> float:
        """The standard error of the logarithm of the ratio of two predictions, infinite if one has none.

        Plans that no table has both of are compared across tables, by the errors of both predictions.
        """
        gaps = [
            (0.0, math.hypot(gap, table.time_error))
            for model, table in self._parts
            if math.isfinite(gap := model.gap_error(one, other, spec))
        ]
        if gaps:
            return _mean(gaps)[1]
        both = [self.predict(plan, spec) for plan in (one, other)]
        return math.hypot(*(math.inf if each is None else each.error for each in both))


def _mean(values: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The mean of (value, standard error) pairs weighted by the inverse squares of the errors, and its own error."""
    weighted = [(value, error**-2) for value, error in values]
    whole = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / whole, whole**-0.5
