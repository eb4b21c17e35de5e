"""What a sweep has to say: a table for each case, the answer in sentences, and what was passed over, by reason."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from tabulate import tabulate

from attnbench.plan import backend_of

from .accuracy import TensorName
from .condense import worst_errors
from .records import Measurement, Status
from .timing import Cost

__all__ = ["Style", "report", "sentences"]

Style = Literal["text", "markdown"]
_WIDTH = 100
_LONGEST_PLAN = 28  # a longer one breaks before its backward, so that the numbers fit beside it
_WORST_FIRST: tuple[Status, ...] = ("crashed", "error", "oom", "timeout", "unavailable", "refused")
_EMULATION = "The emulated plans show what FP8 does to the result; their times say nothing of a GPU's FP8 kernels."
_LEGEND = (
    "Times are medians in ms: kernel is the forward alone, prepared adds quantising and copies to it, backward is the "
    "backward alone, call is everything the user pays. TFLOPS are the operations of exact attention over the call; "
    "peak is the share that the kernels reach of what the device can do in their precision. Errors are relative L2 "
    "against FP64, the worst over out and gradients, with the floor in brackets: what exact attention on the quantised "
    "tensors would give. * marks the fastest plan within its bound, ! one beyond it."
)


def report(rows: Sequence[Measurement], style: Style) -> str:
    """The rows for a terminal of 100 columns, or as Markdown; plans in the order of their call time."""
    parts = []
    for case, group in _by_case(rows).items():
        measured = sorted((row for row in group if row.measured), key=lambda row: _median(row, "call"))
        if measured:
            parts += [_heading(_shown(case, style), style), _table(measured, style), _prose(sentences(group), style)]
    parts.append(_passed_over(rows, style))
    if any(row.measured for row in rows):
        emulated = any(backend_of(row.plan.forward) == "emulated" for row in rows if row.measured)
        parts.append(_prose([f"{_LEGEND} {_EMULATION}" if emulated else _LEGEND], style))
    return "\n\n".join(part for part in parts if part)


def sentences(rows: Sequence[Measurement]) -> list[str]:
    """What the rows of one case say: who is fastest within the bound, who most accurate, who out of bounds."""
    said = []
    ok = sorted((row for row in rows if row.status == "ok"), key=lambda row: _median(row, "call"))
    if ok:
        said.append(_fastest(ok[0], next((row for row in ok if row.plan.fp8 != ok[0].plan.fp8), None)))
    else:
        said.append("No plan stayed within its bound.")
    narrow = [row for row in rows if row.measured and row.plan.fp8]
    if narrow:
        best = min(narrow, key=lambda row: max(worst_errors(row).values()))
        worst, family = max((error, family) for family, error in worst_errors(best).items())
        said.append(f"Most accurate in FP8: {best.plan}, at worst {_error(worst)} ({family} inputs).")
    if beyond := [row for row in rows if row.status == "inaccurate"]:
        listed = ", ".join(f"{row.plan} ({_error(_worst(row))} > {row.bound:g})" for row in beyond)
        said.append(f"Out of bounds: {listed}.")
    return said


def _fastest(first: Measurement, rival: Measurement | None) -> str:
    said = f"Fastest within its bound: {first.plan}, {_number(_median(first, 'call'))} ms a call"
    if rival is None:
        return f"{said}."
    ratio = _median(rival, "call") / _median(first, "call")
    kind = "FP8 plan" if rival.plan.fp8 else "plan without FP8"
    return f"{said}; the fastest {kind}, {rival.plan}, takes {ratio:.2f} times as long."


def _table(measured: Sequence[Measurement], style: Style) -> str:
    best = next((row for row in measured if row.status == "ok"), None)
    families = list(measured[0].error)
    costs: tuple[Cost, ...] = ("kernel", "backward" if measured[0].spec.training else "prepared", "call")
    shares = any(row.peak_share is not None for row in measured)
    lines = []
    for row in measured:
        mark = "*" if row is best else "!" if row.status == "inaccurate" else ""
        speed = row.spec.flops / _median(row, "call") / 1e9
        numbers = [_number(number) for number in (*(_median(row, cost) for cost in costs), speed)]
        if shares:
            numbers.append("" if row.peak_share is None else f"{row.peak_share:.0%}")
        lines.append([_plan(row, mark, style), *numbers, *(_with_floor(row, family) for family in families)])
    headers = ["plan", *costs, "TFLOPS", *(["peak"] if shares else []), *families]
    align = ["left", *["right"] * (len(headers) - 1 - len(families)), *["left"] * len(families)]
    form = "github" if style == "markdown" else "simple"
    return tabulate(lines, headers, tablefmt=form, disable_numparse=True, colalign=align)


def _passed_over(rows: Sequence[Measurement], style: Style) -> str:
    """The rows without numbers, grouped by the first of their reasons: twenty refusals for one cause are one line."""
    causes: dict[tuple[Status, str], list[Measurement]] = {}
    for row in rows:
        if row.reason is not None and not row.measured:
            causes.setdefault((row.status, row.reason.partition("; ")[0]), []).append(row)
    if not causes:
        return ""
    lines = []
    for (status, reason), group in sorted(
        causes.items(), key=lambda cause: (_WORST_FIRST.index(cause[0][0]), cause[0])
    ):
        alone = {row.plan.forward for row in group if row.plan.backward in (None, row.plan.forward)}
        plans = sorted(alone) + sorted({str(row.plan) for row in group if row.plan.forward not in alone})
        cases = len({row.case for row in group})
        lines.append(
            _shown(f"{status}, {cases} {'case' if cases == 1 else 'cases'}: {reason}: {', '.join(plans)}", style)
        )
    return f"{_heading('Not measured', style)}\n\n{_prose(lines, style, bullets=True)}"


def _by_case(rows: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    cases: dict[str, list[Measurement]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    return cases


def _median(row: Measurement, cost: Cost) -> float:
    return float(np.median(row.time_ms[cost]))


def _worst(row: Measurement) -> float:
    return max(value for errors in row.error.values() for value in errors.values())


def _with_floor(row: Measurement, family: str) -> str:
    error = _error(worst_errors(row)[family])
    floors: dict[TensorName, float] = row.floor.get(family, {})
    outputs = [value for name, value in floors.items() if name != "lse"]
    return f"{error} ({_error(max(outputs))})" if outputs else error


def _error(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "infinite"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _plan(row: Measurement, mark: str, style: Style) -> str:
    plan = str(row.plan)
    if style == "markdown":
        return f"{_shown(plan, style)} {mark}".strip()
    # tabulate would strip blanks in front of a plan, so the mark stands behind it.
    broken = plan.replace(">", "\n>") if len(plan) > _LONGEST_PLAN else plan
    return f"{broken} {mark}".strip()


def _heading(text: str, style: Style) -> str:
    return f"### {text}" if style == "markdown" else f"{text}\n{'=' * min(len(text), _WIDTH)}"


def _prose(lines: Sequence[str], style: Style, bullets: bool = False) -> str:
    if style == "markdown":
        return "\n".join(f"- {line}" if bullets or len(lines) > 1 else line for line in lines)
    first, later = ("- ", "  ") if bullets else ("", "")
    wrap = textwrap.TextWrapper(_WIDTH, first, later, break_on_hyphens=False, break_long_words=False)
    return "\n".join(wrap.fill(line) for line in lines)


def _shown(text: str, style: Style) -> str:
    """The text without what would steer a terminal or break Markdown: files and plug-ins write some of it."""
    safe = "".join(char if char.isprintable() else " " for char in text)
    if style == "markdown":
        for char in "\\`*_<>|[]":
            safe = safe.replace(char, f"\\{char}")
    return safe
