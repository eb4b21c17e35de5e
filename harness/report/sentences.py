"""The results of one case in sentences: the fastest plan first, then what the table does not show."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import TypeAlias

import numpy as np

from ..formatting import error, number, size
from ..results.condense import worst_errors
from ..results.records import Measurement
from ..results.visits import visit_medians
from ..statistics import Comparison, compare

__all__ = ["answer_of", "by_call", "families_of", "fastest", "sentences"]

_FAR_APART = 1.03  # the default limit of compare
_MOST_NAMED = 3
_LONG_RUN_MS = 1000.0
_REMARKABLE_HEAD = 2.0  # times the error of its whole tensor; correct heads under outliers differ by less
_NO_ANSWER = 1.0  # the relative L2 of zeros
_Found: TypeAlias = tuple[float, str, Measurement, str, float]
_GROUPS = re.compile(r"on ([0-9]+) of ([0-9]+) ")


def by_call(rows: Iterable[Measurement]) -> list[Measurement]:
    """Measured rows by median call; then the emulated ones by error."""
    measured = [row for row in rows if row.measured]
    emulated = [row for row in measured if row.emulated]
    return sorted((row for row in measured if not row.emulated), key=Measurement.median_ms) + sorted(
        emulated, key=_worst
    )


def fastest(rows: Iterable[Measurement]) -> list[Measurement]:
    """The fastest row within its bound, and those that its samples cannot distinguish from it; none is emulated."""
    ok = [row for row in by_call(rows) if row.status == "ok" and not row.emulated]
    return ok[:1] + list(takewhile(lambda row: _alike(ok[0], row), ok[1:]))


def families_of(rows: Iterable[Measurement]) -> list[str]:
    """The input families of the rows, each once."""
    return list(dict.fromkeys(family for row in rows for family in row.error))


def sentences(rows: Sequence[Measurement]) -> list[str]:
    """The fastest plan within its bound, the most accurate one, those out of bounds, and other remarkable facts."""
    measured = by_call(rows)
    lines = [_fastest(measured)]
    narrow = [row for row in measured if row.plan.fp8]
    if narrow:
        best = min(narrow, key=_worst)
        worst, family = max((value, family) for family, value in worst_errors(best).items())
        lines.append(f"Most accurate in FP8: {best.plan}, at worst {error(worst)} ({family} inputs).")
    return [*lines, *_beyond(measured), *_astray(measured), *_costs(measured), *_truths(measured)]


def answer_of(rows: Sequence[Measurement]) -> dict[str, str]:
    """One line of the summary table, by column; empty if no plan was timed within its bound.

    The last column is how many times as long the fastest plan of the other kind takes, in FP8 or without.
    """
    tied = fastest(rows)
    if not tied:
        return {}
    first = tied[0]
    rival = next((row for row in by_call(rows) if _other_kind(row, [first])), None)
    kind = "in FP8" if rival is not None and rival.plan.fp8 else "without FP8"
    other = "" if rival is None else f"{number(rival.median_ms() / first.median_ms())}x {kind}"
    plan = first.plan.forward if first.plan.backward in (None, first.plan.forward) else str(first.plan)
    return {
        "case": first.case,
        "fastest within its bound": f"{plan}{' ?' if len(tied) > 1 else ''}",
        "ms": number(first.median_ms()),
        "error": error(_worst(first)),
        "the other kind": other,
    }


def _other_kind(row: Measurement, tied: Sequence[Measurement]) -> bool:
    """Whether a valid row is in FP8 and none of the tied ones is, or the other way round."""
    return row.status == "ok" and not row.emulated and row.plan.fp8 not in {each.plan.fp8 for each in tied}


def _alike(first: Measurement, second: Measurement) -> bool:
    """Whether the second row, slower in the median, may be as fast."""
    one, other = first.time_ms["call"], second.time_ms["call"]
    found = _compared(first, second)
    if found.verdict == "uncertain":
        # Few samples are always uncertain, but sets that lie far apart are not a tie.
        return found.ratio < _FAR_APART or bool(np.percentile(other, 25) <= np.percentile(one, 75))
    return found.verdict != "slower"


def _fastest(measured: Sequence[Measurement]) -> str:
    timed = [row for row in measured if not row.emulated]
    if not timed and measured:
        return "No time is compared: every plan that ran is emulated."
    tied = fastest(timed)
    if not tied:
        return "No plan stayed within its bound."
    first = tied[0]
    certain = "Fastest within its bound" if len(tied) == 1 else "Fastest within its bound, but not for certain"
    text = f"{certain}: {first.plan}, {number(first.median_ms())} ms a call"
    if len(tied) > 1:
        named = [f"{row.plan} ({number(row.median_ms())} ms{_within(first, row)})" for row in tied[1:_MOST_NAMED]]
        more = [f"{len(tied) - _MOST_NAMED} more"] if len(tied) > _MOST_NAMED else []
        text += f"; {' and '.join(named + more)} may be as fast"
    rival = next((row for row in timed if _other_kind(row, tied)), None)
    if rival is None:
        return f"{text}."
    kind = "FP8 plan" if rival.plan.fp8 else "plan without FP8"
    times = number(rival.median_ms() / first.median_ms())
    return f"{text}; the fastest {kind}, {rival.plan}, takes {times} times as long."


def _within(first: Measurement, other: Measurement) -> str:
    """The largest difference between two tied calls, on either side, with 95 % confidence, as part of a sentence."""
    low, high = _compared(first, other).interval
    return f", at most {max(high, 1 / low) - 1:.0%} apart"


def _compared(first: Measurement, second: Measurement) -> Comparison:
    """Compare two calls that were visited in turns, with the machine in the same state."""
    return compare(visit_medians(first, "call"), visit_medians(second, "call"))


def _beyond(measured: Sequence[Measurement]) -> list[str]:
    beyond = [row for row in measured if row.status == "inaccurate"]
    wide = [
        f"{row.plan} ({error(_largest(row))} > {row.correctness.bound:g})"
        for row in beyond
        if row.check in (None, "error")
    ]
    lines = [f"Out of bounds: {', '.join(wide)}."] if wide else []
    return lines + [
        f"Not what it should be: {row.plan}, by the check {row.check!r}: {row.reason}."
        for row in beyond
        if row.check not in (None, "error")
    ]


def _largest(row: Measurement) -> float:
    return max(value for errors in row.error.values() for value in errors.values())


def _astray(measured: Sequence[Measurement]) -> list[str]:
    """The worst head and the worst row of plans within their bounds, if the error of the whole tensor hides them."""
    heads: list[_Found] = []
    rows: list[_Found] = []
    for row in measured:
        for family, details in row.correctness.detail.items() if row.status == "ok" else ():
            for name, detail in details.items():
                whole = row.error[family][name]
                if name != "lse" and detail.worst_head > max(_REMARKABLE_HEAD * whole, row.correctness.bound):
                    heads.append((detail.worst_head, f"One head of {name}", row, family, whole))
                # A row of dq or dk may be a sum that nearly cancels, whose relative error means nothing.
                if name in ("out", "dv") and detail.worst_row > _NO_ANSWER:
                    rows.append((detail.worst_row, f"One row of {name}", row, family, whole))
    return [_off(max(found, key=lambda each: each[0])) for found in (heads, rows) if found]


def _off(found: _Found) -> str:
    worst, what, row, family, whole = found
    beside = ", more than zeros would be" if worst > _NO_ANSWER else ""
    return (
        f"{what} of {row.plan} has an error of {error(worst)} on {family} inputs{beside}; the whole tensor has "
        f"{error(whole)}."
    )


def _costs(measured: Sequence[Measurement]) -> list[str]:
    """Compile time and memory, which the time of a call does not show."""
    lines = []
    first = max(((row.performance.first_ms or 0.0, str(row.plan)) for row in measured), default=(0.0, ""))
    if first[0] >= _LONG_RUN_MS:
        lines.append(f"Slowest first run, compiling included: {first[1]}, {first[0] / 1000:.1f} s.")
    if peak := _range(measured, lambda row: row.performance.memory_bytes):
        held = _range(measured, lambda row: row.performance.retained_bytes if row.spec.training else None)
        lines.append(f"Peak memory of a call: {peak}{f'; held for the backward: {held}' if held else ''}.")
    return lines


def _range(measured: Sequence[Measurement], of: Callable[[Measurement], int | None]) -> str:
    sizes = [(count, str(row.plan)) for row in measured if (count := of(row)) is not None]
    if not sizes:
        return ""
    least, most = min(sizes), max(sizes)
    if size(least[0]) == size(most[0]):
        return size(least[0])
    return f"{size(least[0])} ({least[1]}) to {size(most[0])} ({most[1]})"


def _truths(measured: Sequence[Measurement]) -> list[str]:
    """The input family of the errors if there is only one, and the truth if it does not cover all heads."""
    families = families_of(measured)
    partial = [f"Errors are on {families[0]} inputs."] if len(families) == 1 else []
    for truth in dict.fromkeys(row.correctness.truth for row in measured):
        groups = _GROUPS.search(truth)
        if groups is None or groups[1] != groups[2]:
            partial.append(f"Errors are against {truth}.")
    return partial


def _worst(row: Measurement) -> float:
    return max(worst_errors(row).values())
