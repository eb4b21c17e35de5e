"""A comparison for programs: a JSON document, and JUnit XML, which every CI shows as tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree as ET

from attnbench.tables.environment import Environment
from attnbench.text.printable import printable

from ..results.records import Measurement
from .regression import Outcome, Regression
from .terms import Key, Limits, Threshold
from .text import conclusion
from .times import CostChange

__all__ = ["SCHEMA", "regression_dict", "regression_junit"]

SCHEMA = "attnbench.comparison/2"
_OUTCOMES = {0: "clean", 1: "regressed", 3: "incomparable", 4: "uncertain"}


def regression_dict(
    regression: Regression, base: Mapping[Key, Measurement], new: Mapping[Key, Measurement]
) -> dict[str, Any]:
    """The whole comparison in plain JSON types, as docs/how-to/compare.md describes it."""
    terms = regression.terms
    return {
        "schema": SCHEMA,
        "outcome": _OUTCOMES[regression.exit_code],
        "exit_code": regression.exit_code,
        "conclusion": conclusion(regression),
        "terms": {
            "fail_on": terms.limits.time,
            "fail_on_host": terms.limits.host,
            "error_rise": terms.limits.error,
            "memory_rise": terms.limits.memory,
            "costs": list(terms.costs),
            "relative_to": [str(plan) for plan in terms.relative_to],
            "allow_missing": list(terms.allowed),
            "thresholds": {each.pattern: _limits(each) for each in terms.thresholds},
        },
        "base": _environments(base),
        "new": _environments(new),
        "differences": regression.differences,
        "counts": regression.counts,
        "rows": [_row(each) for each in regression.outcomes],
    }


def regression_junit(regression: Regression, command: str = "attnbench compare") -> str:
    """JUnit XML for the result of a command: a test for each row, in a class for its case.

    A regression is a failure, an incomparable row an error; an uncertain row, one that is missing by permission, and
    one without numbers on either side is skipped, with the reason.
    """
    suite = ET.Element("testsuite", name=command)
    counted = {"failures": 0, "errors": 0, "skipped": 0}
    for outcome in regression.outcomes:
        case, plan = outcome.key
        # XML 1.0 (section 2.2) can hold any printable character; an attribute cannot hold line ends.
        test = ET.SubElement(suite, "testcase", classname=printable(case), name=printable(str(plan)))
        reasons = printable("; ".join(outcome.reasons))
        if outcome.regressed:
            kind, tag = "failures", "failure"
        elif outcome.verdict == "incomparable":
            kind, tag = "errors", "error"
        elif not outcome.certain or outcome.verdict in ("missing", "unmeasured"):
            kind, tag = "skipped", "skipped"
        else:
            continue
        counted[kind] += 1
        mark = ET.SubElement(test, tag, message=f"{outcome.verdict}: {reasons}" if reasons else outcome.verdict)
        if tag != "skipped":
            mark.set("type", outcome.verdict)
    totals = {"tests": str(len(regression.outcomes)), **{name: str(number) for name, number in counted.items()}}
    suite.attrib |= totals
    root = ET.Element("testsuites", {"name": command, **totals})
    root.append(suite)
    ET.indent(root)
    # ASCII with character references: the same document in any encoding.
    text: str = ET.tostring(root, encoding="us-ascii").decode("ascii")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'


def _environments(rows: Mapping[Key, Measurement]) -> list[dict[str, Any]]:
    found: dict[Environment, None] = dict.fromkeys(row.environment for row in rows.values())
    return [each.to_dict() for each in found]


def _row(outcome: Outcome) -> dict[str, Any]:
    case, plan = outcome.key
    return {
        "case": case,
        "plan": str(plan),
        "verdict": outcome.verdict,
        "regressed": outcome.regressed,
        "allowed": outcome.allowed,
        "certain": outcome.certain,
        "visible": None if outcome.visible is None else _number(outcome.visible),
        "reasons": list(outcome.reasons),
        "limits": _limits(outcome.limits),
        "costs": {cost: _cost(change) for cost, change in outcome.costs.items()},
        "errors": [
            {
                "family": each.family,
                "tensor": each.tensor,
                "before": _number(each.before),
                "after": _number(each.after),
            }
            for each in outcome.errors
        ],
        "memory": {each.kind: [each.before, each.after] for each in outcome.memory},
    }


def _limits(limits: Limits | Threshold) -> dict[str, float | None]:
    return {"time": limits.time, "host": limits.host, "error": limits.error, "memory": limits.memory}


def _cost(change: CostChange) -> dict[str, Any]:
    return {
        "verdict": change.verdict,
        "ratio": change.ratio,
        "interval": [_number(each) for each in change.interval],
        "visible": _number(change.visible),
        "limit": change.limit,
        "decided_by": "host" if change.host else "device",
        "visits": list(change.visits),
        "median": [_number(each) for each in change.median],
        "replayed_on_one_side": change.replayed,
    }


def _number(value: float) -> float | str:
    """As in the records: JSON has no infinity, so it is written as text."""
    return value if math.isfinite(value) else "Infinity"
