"""The table of one case: a line for each plan with its times, its worst error beside the floor, and its flags."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from ..formatting import WIDTH, Style, error, escape, number, size
from ..measure.accuracy import TensorName
from ..measure.timing import COSTS, Cost
from ..results.records import Measurement
from ..statistics import median_interval
from .flags import Flag
from .sentences import families_of

__all__ = ["PRECISION", "case_table", "in_markdown", "ruled", "spread"]

PRECISION = "+-"  # the column's name
_NOTEWORTHY = 0.02  # of the median
_PLAN_WIDTH = 28  # a longer plan breaks before its backward, so that the numbers fit beside it
_LEAST_WIDTH = 10  # of the last column: room for any one number
_GAP = 2  # tabulate's space between columns


def case_table(
    measured: Sequence[Measurement],
    marked: Sequence[Measurement],
    flags: Sequence[Sequence[Flag]],
    style: Style,
) -> str:
    """The measured rows of one case in order; ``marked`` ones have *, inaccurate ones !, emulated ones no times.

    ``flags`` are the rows' own.  As text it is at most 100 columns wide: the error is that of the worst family, flags
    follow the plan.  Markdown has a column for every family, and for memory and first runs.
    """
    training = any(row.spec.training for row in measured)
    costs = [row.performance for row in measured]
    columns: dict[str, list[str]] = {cost: _times(measured, cost) for cost in _costs(training, style)}
    columns |= {
        PRECISION: [spread(row) for row in measured],
        "TFLOPS": ["" if row.emulated else number(row.flops / row.median_ms() / 1e9) for row in measured],
        "peak": ["" if each.peak_share is None else f"{each.peak_share:.0%}" for each in costs],
    }
    marks = [" *" if row in marked else " !" if row.status == "inaccurate" else "" for row in measured]
    if style == "markdown":
        plans = [f"{escape(str(row.plan), style)}{mark}" for row, mark in zip(measured, marks, strict=True)]
        columns = {"plan": plans} | columns | _further(measured, flags)
        return in_markdown(columns)
    # The cell of the call says that a plan is emulated; a flag would need a line.
    further = [[flag for flag in own if flag != "emulated"] for own in flags]
    plans = [_folded(row, mark, own) for row, mark, own in zip(measured, marks, further, strict=True)]
    columns = {"plan": plans} | {name: cells for name, cells in columns.items() if any(cells)}
    left = WIDTH - sum(_GAP + max(len(name), _width(cells)) for name, cells in columns.items())
    several = len(families_of(measured)) > 1
    worst = [_worst(row, several) for row in measured]
    columns["error"] = [textwrap.fill(escape(cell, style), max(_LEAST_WIDTH, left)) for cell in worst]
    return ruled(columns, ["plan", "error"])


def spread(row: Measurement) -> str:
    """The 95 % confidence limit of the median of the call, as a share of it, if that is 2 % or more.

    With two to five samples, which give no such interval, the distance of the farthest sample from the median.  Empty
    for an emulated plan, whose time is not shown.
    """
    if row.emulated:
        return ""
    samples = row.time_ms["call"]
    if len(samples) == 1:
        return "?"
    low, median, high = median_interval(samples)
    if not math.isfinite(high):
        low, high = min(samples), max(samples)
    off = max(high - median, median - low) / median
    return f"{off:.0%}" if off >= _NOTEWORTHY else ""


def ruled(columns: Mapping[str, Sequence[str]], words: Sequence[str]) -> str:
    """A table for a terminal without empty columns; all but ``words`` are aligned to the right.

    A header is no wider than its name; tabulate would pad it, and longer lines break more often.
    """
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    align = ["left" if name in words else "right" for name in kept]
    lines = zip(*([name, "-" * max(len(name), _width(cells)), *cells] for name, cells in kept.items()), strict=True)
    return tabulate(list(lines), tablefmt="plain", disable_numparse=True, colalign=align)


def in_markdown(columns: Mapping[str, Sequence[str]]) -> str:
    """The same table in Markdown, with every column aligned to the left."""
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    return tabulate(kept, headers="keys", tablefmt="github", disable_numparse=True, colalign=["left"] * len(kept))


def _costs(training: bool, style: Style) -> list[Cost]:
    if style == "markdown":
        return [cost for cost in COSTS if training or cost != "backward"]
    return ["kernel", "backward" if training else "prepared", "call"]


def _times(measured: Sequence[Measurement], cost: Cost) -> list[str]:
    return [_time(row, cost) for row in measured]


def _time(row: Measurement, cost: Cost) -> str:
    if row.emulated:
        return "emulated" if cost == "call" else ""
    return number(row.median_ms(cost)) if cost in row.time_ms else ""


def _folded(row: Measurement, mark: str, flags: Sequence[Flag]) -> str:
    """The plan and its mark, wrapped, with its flags below."""
    plan = str(row.plan)
    parts = plan.replace(">", "\n>").split("\n") if len(plan) > _PLAN_WIDTH else [plan]
    lines = [line for part in parts for line in textwrap.wrap(part, _PLAN_WIDTH)]
    # tabulate strips blanks before a plan, so the mark follows it.
    lines[-1] += mark
    return "\n".join([*lines, *(textwrap.wrap(f"({', '.join(flags)})", _PLAN_WIDTH + 2) if flags else ())])


def _width(cells: Sequence[str]) -> int:
    return max(len(line) for cell in cells for line in cell.split("\n"))


def _further(measured: Sequence[Measurement], flags: Sequence[Sequence[Flag]]) -> dict[str, list[str]]:
    """The columns that only Markdown has."""
    families = families_of(measured)
    columns = {"worst": [escape(_worst(row, True), "markdown") for row in measured]} if len(families) > 1 else {}
    for family in families:
        columns[f"on {escape(family, 'markdown')}"] = [_error(row, family, _off(row, family)) for row in measured]
    costs = [row.performance for row in measured]
    return columns | {
        "first run": ["" if each.first_ms is None else number(each.first_ms) for each in costs],
        "memory": ["" if each.memory_bytes is None else size(each.memory_bytes) for each in costs],
        "held": ["" if each.retained_bytes is None else size(each.retained_bytes) for each in costs],
        "flags": [", ".join(own) for own in flags],
    }


def _off(row: Measurement, family: str) -> TensorName | None:
    """The output or gradient with the largest error."""
    errors = {name: value for name, value in row.error.get(family, {}).items() if name != "lse"}
    return max(errors, key=lambda name: errors[name], default=None)


def _worst(row: Measurement, several: bool) -> str:
    """The largest error, its floor, and its tensor; with several families, the family."""
    found = [(row.error[family][name], family, name) for family in row.error if (name := _off(row, family))]
    _, family, name = max(found, key=lambda each: each[0])
    parts = [_error(row, family, name)]
    if row.spec.training:
        parts.append(f"{name} on" if several else name)
    return " ".join([*parts, family] if several else parts)


def _error(row: Measurement, family: str, name: TensorName | None) -> str:
    """An error, in brackets the floor of the same tensor, and the ratio of the two."""
    if name is None:
        return ""
    value, floor = row.error[family][name], row.correctness.floor.get(family, {}).get(name)
    if floor is None:
        return error(value)
    times = value / floor if floor else math.inf
    ratio = f" {number(times) if times >= 10 else f'{times:.1f}'}x" if math.isfinite(times) else ""
    return f"{error(value)} ({error(floor)}){ratio}"
