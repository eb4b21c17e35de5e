"""Measurements condensed for choosing: one entry a row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from attnbench.plan import Plan
from attnbench.spec import AttentionSpec
from attnbench.table import Entry

from .records import Measurement

__all__ = ["condense", "worst_errors"]


def condense(rows: Iterable[Measurement]) -> list[Entry]:
    """Entries for a table: the median of the whole call and its interquartile range, the worst error of each family."""
    entries: dict[tuple[AttentionSpec, Plan], Entry] = {}
    for row in rows:
        new = _entry(row)
        before = entries.setdefault((row.spec, row.plan), new)
        if before is not new:
            entries[row.spec, row.plan] = _worse(before, new)
    return list(entries.values())


def _worse(one: Entry, other: Entry) -> Entry:
    """What holds for two cases with one question, as captured calls of two layers: the worse, the larger errors."""
    worse = max(one, other, key=lambda each: (each.status != "ok", each.time_ms or 0.0))
    if worse.time_ms is None:
        return worse
    families = {**one.errors, **other.errors}
    errors = {family: max(each.errors.get(family, 0.0) for each in (one, other)) for family in families}
    return replace(worse, errors=errors)


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
