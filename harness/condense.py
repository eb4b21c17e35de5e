"""Measurements condensed for choosing: one entry a row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from attnbench.table import Entry

from .records import Measurement

__all__ = ["condense", "worst_errors"]


def condense(rows: Iterable[Measurement]) -> list[Entry]:
    """Entries for a table: the median of the whole call and its interquartile range, the worst error of each family."""
    return [_entry(row) for row in rows]


def worst_errors(row: Measurement) -> dict[str, float]:
    """Relative L2 by input family, the worst over out and, in training, dq, dk, dv."""
    return {
        family: max(value for name, value in errors.items() if name != "lse") for family, errors in row.error.items()
    }


def _entry(row: Measurement) -> Entry:
    time_ms = spread_ms = None
    if row.measured:
        lower, median, upper = np.percentile(row.time_ms["call"], (25, 50, 75))
        time_ms, spread_ms = float(median), float(upper - lower)
    return Entry(
        spec=row.spec,
        plan=row.plan,
        status=row.status,
        time_ms=time_ms,
        spread_ms=spread_ms,
        errors=worst_errors(row),
        reason=row.reason,
    )
