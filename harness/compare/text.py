"""A comparison for a terminal or a pull request: the rows that changed, then how many did not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from ..formatting import Style, escape, prose
from ..statistics import TimeVerdict
from .regression import Outcome, Regression, RowVerdict
from .sentences import share
from .terms import LARGEST_LIMIT, Gated
from .times import CostChange

__all__ = ["conclusion", "regression_text"]

_SILENT: tuple[RowVerdict, ...] = ("uncertain", "same", "baseline", "unmeasured")
_LEAST_WIDTH = 40  # of the sentences
_ORDER: tuple[TimeVerdict, ...] = ("slower", "faster", "uncertain", "same")


def regression_text(regression: Regression, style: Style, width: int, every: bool = False) -> str:
    """The rows that failed, changed, may have changed or could not be compared (``every``: all); then sentences.

    Where several rows cannot be compared for one reason, a sentence says so instead of a line for each.  As text it is
    ``width`` columns wide if the names leave room for that.
    """
    shared = {} if every else _shared_reasons(regression)
    rows = [
        each
        for each in regression.outcomes
        if every or each.suspect or (each.verdict not in _SILENT and _reason(each) not in shared)
    ]
    rows.sort(key=lambda each: (not each.regressed, list(regression.counts).index(each.verdict)))
    alike = (f"{count} rows cannot be compared (--all lists them): {reason}." for reason, count in shared.items())
    lines = [escape(sentence, style) for sentence in (*_sentences(regression), *alike)]
    parts = [*([_table(rows, style, width)] if rows else []), prose(lines, style, bullets=True), conclusion(regression)]
    return "\n\n".join(parts)


def conclusion(regression: Regression) -> str:
    """One line: whether it regressed, and the numbers of rows that decide it."""
    code = regression.exit_code
    if code == 0:
        visible = max((each.visible for each in regression.outcomes if each.visible is not None), default=None)
        power = "" if visible is None else f"; in any row {share(visible)} would have been found with 95%"
        return f"clean: nothing became slower, less accurate, failed or went missing{power}"
    if code == 4:
        return f"not certain: {'; '.join(_uncertain(regression))}; {regression.advice}"
    if code == 1:
        counted = Counter(each.verdict for each in regression.outcomes if each.regressed)
        return "regressed: " + ", ".join(f"{counted[each]} {each}" for each in regression.counts if counted[each])
    if not regression.counts.get("incomparable"):
        return "not comparable: there is no row with numbers on both sides"
    return "not comparable: unlike machines or cases; --relative-to PLAN compares the ratios to a plan on each machine"


def _table(outcomes: Sequence[Outcome], style: Style, width: int) -> str:
    cases, plans = (
        [escape(each.key[0], style) for each in outcomes],
        [escape(str(each.key[1]), style) for each in outcomes],
    )
    verdicts = [_verdict(each) for each in outcomes]
    visible = ["" if each.visible is None else share(each.visible) for each in outcomes]
    because = [escape("; ".join(each.reasons), style) for each in outcomes]
    if style == "markdown":
        columns = {"verdict": verdicts, "case": cases, "plan": plans, "visible": visible, "because": because}
        return tabulate(columns, headers="keys", tablefmt="github", disable_numparse=True)
    names = [f"{case}\n{plan}" for case, plan in zip(cases, plans, strict=True)]
    columns = {"verdict": verdicts, "case, plan": names, "visible": visible, "because": because}
    taken = sum(
        2 + max(len(line) for cell in [name, *cells] for line in cell.split("\n"))
        for name, cells in list(columns.items())[:-1]
    )
    widths = [None, None, None, max(_LEAST_WIDTH, width - taken)]
    return tabulate(columns, headers="keys", tablefmt="simple", disable_numparse=True, maxcolwidths=widths)


def _reason(outcome: Outcome) -> str | None:
    """Why the row cannot be compared; None if it can."""
    return "; ".join(outcome.reasons) if outcome.verdict == "incomparable" else None


def _shared_reasons(regression: Regression) -> dict[str, int]:
    """The reasons for which several rows cannot be compared, and how many these are."""
    counted = Counter(reason for each in regression.outcomes if (reason := _reason(each)) is not None)
    return {reason: count for reason, count in counted.items() if count > 1}


def _verdict(outcome: Outcome) -> str:
    return f"{outcome.verdict}, allowed" if outcome.allowed else outcome.verdict


def _sentences(regression: Regression) -> Iterator[str]:
    counts = ", ".join(f"{number} {verdict}" for verdict, number in regression.counts.items())
    yield f"{len(regression.outcomes)} rows: {counts}."
    if suspects := sum(each.suspect and each.verdict == "uncertain" for each in regression.outcomes):
        yield f"{suspects} of the uncertain may be slower: a cost's 95% interval lies above 0."
    for cost in regression.terms.costs:
        if summary := _of_cost(regression, cost):
            yield f"{cost}: {summary}."
    if any(each.costs for each in regression.outcomes):
        yield "visible: the smallest slow-down that would have been found with 95%."
    if regression.differences:
        yield f"What else differs: {'; '.join(regression.differences)}."
    if any(each.startswith("uuid_hash ") for each in regression.differences):
        yield (
            "BASE and NEW come from two GPUs of one model, whose times may differ by more than what is looked for; "
            "`attnbench gate` measures on one."
        )


def _of_cost(regression: Regression, cost: Gated) -> str:
    """How many rows have each verdict, and the slow-downs that would have been found."""
    changes = [each.costs[cost] for each in regression.outcomes if cost in each.costs]
    if not changes:
        return ""
    counted = Counter(each.verdict for each in changes)
    verdicts = ", ".join(f"{counted[verdict]} {verdict}" for verdict in _ORDER if counted[verdict])
    return f"{verdicts}, visible {_range(changes)}"


def _range(changes: Sequence[CostChange]) -> str:
    """The smallest to the largest visible slow-down of the costs."""
    visible = [each.visible for each in changes]
    low, high = share(min(visible)), share(max(visible))
    return low if low == high else f"{low} to {high}"


def _uncertain(regression: Regression) -> Iterator[str]:
    """How many rows could not have shown their limit, what they would have shown, and which limit would be certain."""
    limits = regression.terms.limits
    for host, limit, option in ((False, limits.time, "--fail-on"), (True, limits.host, "--fail-on-host")):
        rows = [[cost for cost in each.costs.values() if cost.host == host] for each in regression.outcomes]
        missed = [[cost for cost in row if cost.verdict == "uncertain"] for row in rows]
        worst = [max(row, key=lambda cost: cost.visible) for row in missed if row]
        if not worst:
            continue
        alike = all(each.limit == limit for each in worst)
        text = f"{len(worst)} of {sum(map(bool, rows))} rows could not have shown a slow-down of "
        text += f"{share(limit) if alike else 'their limit'} ({_range(worst)} would have been found)"
        needed = max(cost.visible for row in rows for cost in row)
        offered = alike and limit < needed <= LARGEST_LIMIT
        whose = "the host's times of " if host else ""
        yield whose + text + (f", {option} {math.ceil(needed * 100)}% would be certain" if offered else "")
    unknown = [each for each in regression.outcomes if each.verdict == "uncertain"]
    if empty := sum(all(cost.verdict != "uncertain" for cost in each.costs.values()) for each in unknown):
        yield f"{empty} of {len(regression.outcomes)} rows have no times to compare"
