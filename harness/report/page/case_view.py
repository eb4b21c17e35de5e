"""One case on the page: its candidates with why they won or lost, what was not measured, and how to repeat it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attnbench.choosing.regret import Asked
from attnbench.kernels.plan import Plan

from ...results.records import Measurement
from ..alternatives import Key, key_of
from ..flags import Flag, flags
from ..sentences import sentences
from .commands import PLAN, sweep_command
from .machines import DEFAULT, Answer, Case, worst_error

__all__ = ["CaseView", "Line", "Missing", "asked_text", "view"]


@dataclass(frozen=True)
class Line:
    """A measured plan: its row, its verdict, and the reason in the words of a choice."""

    row: Measurement
    verdict: str
    why: str
    error: float
    family: str
    floor: float | None
    flags: list[Flag]


@dataclass(frozen=True)
class Missing:
    """Plans without numbers for the same reason."""

    status: str
    reason: str
    plans: list[str]


@dataclass(frozen=True)
class CaseView:
    """``command`` contains ``plan``, which any other plan may replace; ``note`` says why there is no command."""

    case: Case
    remarks: list[str]
    lines: list[Line]
    missing: list[Missing]
    command: str
    plan: str
    note: str | None


def view(case: Case, highest_mhz: float | None, beside: Mapping[Key, str]) -> CaseView:
    """``highest_mhz`` is the highest clock that the machine's sweeps saw (attnbench.harness.report.flags), ``beside``
    what the other layouts of sequences cost (attnbench.harness.report.alternatives).
    """
    remarks = sentences(case.measured) if case.measured else []
    remarks += [beside[key] for key in dict.fromkeys(map(key_of, case.measured)) if key in beside]
    if len(case.sources) > 1:
        counts = ", ".join(f"{name} ({count})" for name, count in case.sources.items())
        remarks.append(f"The measured rows are those of several sweeps, the newest of each plan: {counts}.")
    command, note = sweep_command(case.rows)
    first = case.answer.plan or (case.measured or case.rows)[0].plan
    return CaseView(
        case=case,
        remarks=remarks,
        lines=[_line(case, row, highest_mhz) for row in case.measured],
        missing=_missing(case),
        command=command.replace(PLAN, str(first)),
        plan=str(first),
        note=note,
    )


def _line(case: Case, row: Measurement, highest_mhz: float | None) -> Line:
    error, family = worst_error(row)
    floors = [value for name, value in row.correctness.floor.get(family, {}).items() if name != "lse"]
    verdict, why = _verdict(case, row)
    return Line(row, verdict, why, error, family, max(floors, default=None), flags(row, highest_mhz))


def _verdict(case: Case, row: Measurement) -> tuple[str, str]:
    answer = case.answer
    candidate = answer.candidates.get(row.plan)
    if row.plan == answer.plan:
        return "chosen", _lead(answer)
    if candidate is None:
        return "unmeasured", "nothing is known of it that a choice could rest on"
    if candidate.verdict != "eligible":
        return ("inaccurate" if row.status == "inaccurate" else candidate.verdict), "; ".join(candidate.reasons)
    if row.status == "inaccurate":
        return "eligible", f"out of the bound of its sweep: {row.reason}"
    if answer.plan is None:
        return "eligible", ""
    ratio = row.median_ms() / case.times[answer.plan]
    if ratio < 1:
        return (
            "eligible",
            "as fast within the noise; the chosen plan is more accurate, or declared to come first",
        )
    return "eligible", f"takes {ratio:.2f} times as long as {answer.plan}"


def _lead(answer: Answer) -> str:
    if answer.margin is None:
        return "no other plan is eligible"
    other, gap = answer.margin.runner_up, answer.margin.gap
    noise = "within the noise" if answer.margin.inside_noise else "beyond the noise"
    lead = f"{gap:.1%} ahead of {other}" if gap >= 0 else f"{-gap:.1%} behind {other}"
    return f"{lead}, {noise}"


def _missing(case: Case) -> list[Missing]:
    """The rows without numbers by the first of their reasons, failures first."""
    groups: dict[tuple[str, str], list[Plan]] = {}
    for row in case.rows:
        if not row.measured:
            reason = row.reason or ""
            cause = reason.partition("; ")[0] if row.status in ("slower", "refused", "unavailable") else reason
            groups.setdefault((row.status, cause), []).append(row.plan)
    order = sorted(groups, key=lambda cause: (cause[0] in ("slower", "refused", "unavailable"), cause))
    return [Missing(status, reason, sorted(map(str, groups[status, reason]))) for status, reason in order]


def asked_text(asked: Asked) -> str:
    """The request that gets this answer."""
    if not asked.fp8:
        return "16 bits only"
    return "FP8, default budget" if asked == DEFAULT else f"FP8, error ≤ {asked.max_error:g}"
