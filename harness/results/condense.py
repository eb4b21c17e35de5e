"""Condense measurements for choosing: one entry for each row, and one table from several sweeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import combinations
from statistics import median

import numpy as np

from attnbench.errors import MisuseError
from attnbench.kernels.plan import Plan
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.environment import Environment
from attnbench.tables.table import Entry, Table

from .host_speed import HostSpeed
from .records import Measurement

__all__ = ["condense", "join_sweeps", "table_of", "worst_errors"]

# How many rows with a known host speed a plan needs for its others to be left out.  On fresh shapes of an H200 choices
# then cost 1.6 % (21 % at worst), and 2.4 % (46 %) with all rows; with 3 rows it is the same, with 10 it is 1.7 %.
_WATCHED = 5
_LIMITED = 0.97  # of the call


def condense(rows: Iterable[Measurement], speed: HostSpeed | None = None) -> list[Entry]:
    """Entries for a table: median and interquartile range of the whole call, the worst error of each family.

    ``speed`` is that of these rows by default.
    """
    rows = list(rows)
    speed = HostSpeed(rows) if speed is None else speed
    entries: dict[tuple[AttentionSpec, Plan], Entry] = {}
    for row in rows:
        if row.status == "slower" and not row.time_ms:
            continue  # predicted, not measured
        new = _entry(row, speed)
        before = entries.setdefault((row.spec, row.plan), new)
        if before is not new:
            entries[row.spec, row.plan] = _worse(before, new)
    return list(entries.values())


def table_of(environment: Environment, rows: Iterable[Measurement]) -> Table:
    """The table of the rows of one sweep, at the speed that its host had."""
    rows = list(rows)
    speed = HostSpeed(rows)
    return Table.from_entries(environment, condense(rows, speed), speed.usual_ms)


def join_sweeps(sweeps: Mapping[str, Sequence[Measurement]]) -> Table:
    """One table of the measurements of some sweeps; the keys say where each was read.

    If several sweeps measured a plan at a spec, the newest row counts; errors on input families that only older rows
    have are added (``Entry.renewed``).  Calls are given as at one speed of the host (``HostSpeed``).  Where that speed
    is not known, a call that its host limited says little: such rows are left out of a plan and direction of which
    ``_WATCHED`` rows have it.  The environment is that of the newest row, with every backend of any row.

    Raises MisuseError if there is no measurement, or if two environments cannot be compared
    (``Environment.differences``); another commit of attnbench does not matter.
    """
    places: dict[Environment, str] = {}
    for place, rows in sweeps.items():
        for row in rows:
            places.setdefault(row.environment, place)
    for (before, here), (after, there) in combinations(places.items(), 2):
        if hard := before.differences(after)[0]:
            where = here if here == there else f"{here} and {there}"
            raise MisuseError(f"{where}: measurements that must not be mixed: {'; '.join(hard)}")
    if not places:
        raise MisuseError(f"{' and '.join(sweeps) or 'nothing'} holds no measurement")
    watched = Counter((row.plan, row.spec.direction) for rows in sweeps.values() for row in rows if _watched(row))
    known = {each for each, count in watched.items() if count >= _WATCHED}
    sweeps = {
        place: [row for row in rows if (row.plan, row.spec.direction) not in known or _watched(row) or not _hosted(row)]
        for place, rows in sweeps.items()
    }
    speed = HostSpeed(row for rows in sweeps.values() for row in rows)
    entries: dict[tuple[AttentionSpec, Plan], Entry] = {}
    for _, entry in sorted(
        (each for rows in sweeps.values() for each in _dated(rows, speed)), key=lambda each: each[0]
    ):
        older = entries.get((entry.spec, entry.plan))
        entries[entry.spec, entry.plan] = entry if older is None else older.renewed(entry)
    newest = max((row for rows in sweeps.values() for row in rows), key=lambda row: row.started).environment
    environment = replace(
        newest,
        backends={name: version for each in (*places, newest) for name, version in each.backends.items()},
        origins={name: origin for each in (*places, newest) for name, origin in each.origins.items()},
    )
    return Table(environment, entries, speed.usual_ms)


def _watched(row: Measurement) -> bool:
    """Whether the host's speed is known while the row was measured."""
    return row.performance_ is not None and bool(row.performance_.host_scale or row.performance_.launch_ms)


def _hosted(row: Measurement) -> bool:
    """Whether the host limited most calls of the row."""
    host = None if row.performance_ is None else row.performance_.host_ms
    return host is not None and "call" in row.time_ms and median(host) >= _LIMITED * row.median_ms()


def _dated(rows: Sequence[Measurement], speed: HostSpeed) -> list[tuple[datetime, Entry]]:
    """The entries of a sweep, each with the start of its last row."""
    begun: dict[tuple[AttentionSpec, Plan], datetime] = {}
    for row in rows:
        begun[row.spec, row.plan] = max(row.started, begun.get((row.spec, row.plan), row.started))
    return [(begun[entry.spec, entry.plan], entry) for entry in condense(rows, speed)]


def _worse(one: Entry, other: Entry) -> Entry:
    """The entry for two cases with one spec, such as captured calls of two layers: the worse with the larger errors."""
    worse = max(one, other, key=lambda each: (each.status != "ok", not each.usable, each.time_ms or 0.0))
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


def _entry(row: Measurement, speed: HostSpeed) -> Entry:
    time_ms = spread_ms = host_ms = device_ms = None
    if "call" in row.time_ms:
        lower, median, upper = np.percentile(speed.calls(row), (25, 50, 75))
        time_ms, spread_ms = float(median), float(upper - lower)
        host_ms, device_ms = speed.parts(row)
    elif row.time_ms:  # of a plan that was never called, by its passes in other plans
        time_ms = sum(map(min, row.time_ms.values()))
    return Entry(
        spec=row.spec,
        plan=row.plan,
        status=row.status,
        time_ms=time_ms,
        spread_ms=spread_ms,
        host_ms=host_ms,
        device_ms=device_ms,
        errors=worst_errors(row),
        reason=row.reason,
        check=row.check,
    )
