"""The report of a sweep: a table for each case, the findings in sentences, and what was not measured, by reason."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from attnbench.kernels.plan import backend_of, precision_of

from ..formatting import WIDTH, Style, escape, heading, prose
from ..results.records import Measurement, Status
from .alternatives import alternatives, key_of
from .flags import FLAGS, MEANINGS, Flag, flags, highest_clock
from .sentences import answer_of, by_call, fastest, sentences
from .table import PRECISION, case_table, in_markdown, ruled, spread

__all__ = ["report"]

_WORST_FIRST: tuple[Status, ...] = ("crashed", "error", "oom", "timeout", "slower", "unavailable", "refused")
_FAILURES: tuple[Status, ...] = ("crashed", "error", "oom", "timeout")
_LEGEND = (
    "Times are medians in ms: kernel is the forward alone, prepared adds quantising and copies to it, backward is the "
    "backward alone, call is everything the user pays. TFLOPS are the operations of exact attention over the call; "
    "peak is the share that the kernels reach of what the device can do in their precision. The error is relative L2 "
    "against exact attention, the largest over out and gradients and over the input families, whose name follows "
    "it; in brackets its floor, what exact attention on the quantised tensors would give, and how many times the floor "
    "it is. * marks the fastest plan within its bound, or those that may be; ! one that is inaccurate."
)
_PRECISION = (
    f"{PRECISION} is how far off the median of the call may be (95%), where that is 2% or more; with fewer than six "
    "samples, how far the farthest of them is off; ? where there is but one."
)
_LEAST_CASE = 20  # columns of the summary
_ADD = "`attnbench doctor` says which of them can be added here, and how."


def report(rows: Sequence[Measurement], style: Style) -> str:
    """The rows for a terminal of 100 columns, or as Markdown; plans in the order of their call time.

    The summary of all cases is where it is read first: last on a terminal, first on a page.
    """
    parts = []
    seen: set[Flag] = set()
    highest, beside = highest_clock(rows), alternatives(rows)
    for case, group in _by_case(rows).items():
        measured = by_call(group)
        if measured:
            own = [flags(row, highest) for row in measured]
            seen.update(*own)
            others = beside.get(key_of(group[0]))
            lines = [escape(sentence, style) for sentence in (*sentences(group), *([others] if others else []))]
            table = case_table(measured, fastest(measured), own, style)
            parts += [heading(escape(case, style), style), table, prose(lines, style)]
    parts.append(_passed_over(rows, style))
    parts.append(prose(_legend([row for row in rows if row.measured], seen), style))
    answer = _answer(rows, style)
    parts = [answer, *parts] if style == "markdown" else [*parts, answer]
    return "\n\n".join(part for part in parts if part)


def _answer(rows: Sequence[Measurement], style: Style) -> str:
    """Every case with its fastest plan within its bound; empty for a single case."""
    answers = [answer for group in _by_case(rows).values() if (answer := answer_of(group))]
    if len(answers) < 2:
        return ""
    columns = {name: [escape(answer[name], style) for answer in answers] for name in answers[0]}
    if style == "text":
        others = sum(2 + max(map(len, (name, *cells))) for name, cells in columns.items() if name != "case")
        columns["case"] = [textwrap.fill(case, max(_LEAST_CASE, WIDTH - others)) for case in columns["case"]]
    words = ("case", "fastest within its bound", "the other kind")
    parts = [heading("Summary", style), in_markdown(columns) if style == "markdown" else ruled(columns, words)]
    notes = []
    if any(answer["fastest within its bound"].endswith("?") for answer in answers):
        notes.append("?: not for certain, another plan may be as fast.")
    if any(answer["the other kind"] for answer in answers):
        notes.append("The last column is how many times as long the fastest plan takes that is in FP8, or without it.")
    parts += [prose(notes, style)] if notes else []
    return "\n\n".join(parts)


def _legend(measured: Sequence[Measurement], seen: set[Flag]) -> list[str]:
    """The explanations that the tables need."""
    if not measured:
        return []
    lines = [_LEGEND]
    if any(spread(row) for row in measured):
        lines.append(_PRECISION)
    lines += [f"{flag}: {MEANINGS[flag]}." for flag in FLAGS if flag in seen]
    return lines


def _passed_over(rows: Sequence[Measurement], style: Style) -> str:
    """The rows without numbers, grouped by their first reason: twenty refusals for one cause are one line.

    Further details of a failure, such as the last output of its process, are those of the first row.
    """
    causes: dict[tuple[Status, str], list[Measurement]] = {}
    for row in rows:
        if row.reason is not None and not row.measured:
            causes.setdefault((row.status, _cause(row)), []).append(row)
    if not causes:
        return ""
    lines = []
    for (status, reason), group in sorted(
        causes.items(), key=lambda cause: (_WORST_FIRST.index(cause[0][0]), cause[0])
    ):
        alone = {row.plan.forward for row in group if row.plan.backward in (None, row.plan.forward)}
        plans = [*_by_backend(alone), *sorted({str(row.plan) for row in group if row.plan.forward not in alone})]
        cases = len({row.case for row in group})
        line = f"{status}, {cases} {'case' if cases == 1 else 'cases'}: {reason}: {', '.join(plans)}"
        first = group[0]
        more = (first.reason or "").partition("; ")[2]
        if status in _FAILURES and more:
            line += f"; {more}" if len(group) == 1 else f"; first {first.plan} on {first.case}: {more}"
        lines.append(escape(line, style))
    parts = [heading("Not measured", style), prose(lines, style, bullets=True)]
    if any(status == "unavailable" for status, _ in causes):
        parts.append(prose([_ADD], style))
    return "\n\n".join(parts)


def _cause(row: Measurement) -> str:
    """The first of the reasons, without its backend, which the plan names."""
    reason = (row.reason or "").partition("; ")[0]
    for backend in map(backend_of, row.plan.kernels):
        reason = reason.removeprefix(f"{backend}: ")
    return reason


def _by_backend(kernels: Iterable[str]) -> list[str]:
    """``fa3:bf16`` and ``fa3:fp8`` as ``fa3:bf16/fp8``: a backend that is not installed misses all of its kernels."""
    precisions: dict[str, list[str]] = {}
    for kernel in sorted(kernels):
        precisions.setdefault(backend_of(kernel), []).append(precision_of(kernel))
    return [f"{backend}:{'/'.join(each)}" for backend, each in precisions.items()]


def _by_case(rows: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    cases: dict[str, list[Measurement]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    return cases
