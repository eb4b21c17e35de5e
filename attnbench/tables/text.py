"""A table as text: one plan a line below its spec, in a fixed order.  Parsing is bounded and checks every field."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from ..files.json_text import bounded_text, decoded, expected, of_kind
from ..kernels.plan import Plan
from ..problem.spec import AttentionSpec
from ..problem.spec_text import short_fields, spec_from, spec_order
from ..text.printable import printable
from .entry import LONGEST_MS, SHORTEST_MS, STATUSES, Entry
from .environment import Environment

__all__ = ["SCHEMA", "parsed", "written"]

SCHEMA = "attnbench.table/2"
_MOST_FAMILIES = 64
_LONGEST_NAME, _LONGEST_REASON = 200, 2000
_LEAST_ERROR = 1e-100  # below it, and above 0, ratios and logarithms leave the range of floats
_FACTS = {"status", "time_ms", "spread_ms", "errors", "check", "reason"}


def written(environment: Environment, entries: Iterable[Entry]) -> str:
    """The text of a table; the same for the same entries in any order."""
    facts = {name: value for name, value in environment.to_dict().items() if value is not None}
    facts |= {name: dict(sorted(facts[name].items())) for name in ("backends", "origins")}
    head = json.dumps({"schema": SCHEMA, "environment": facts}, indent=1)
    ordered = sorted(entries, key=lambda entry: (spec_order(entry.spec), str(entry.plan)))
    specs = [_block(spec, plans) for spec, plans in groupby(ordered, key=lambda entry: entry.spec)]
    return head[:-2] + ',\n "specs": [\n' + ",\n".join(specs) + "\n]}\n"


def parsed(path: Path, text: str) -> tuple[Environment, list[Entry]]:
    """What ``written`` wrote; ``path`` is named in errors.  Raises MalformedFileError on anything else."""
    data = decoded(path, text, SCHEMA)
    with expected(path, "an environment"):
        environment = Environment.from_dict(data["environment"])
    with expected(path, "a list of specs"):
        specs = of_kind(list, data["specs"])
    entries: dict[AttentionSpec, list[Entry]] = {}
    for number, each in enumerate(specs):
        with expected(path, f"a spec at specs[{number}]"):
            spec, plans = spec_from(of_kind(dict, each)["spec"]), of_kind(dict, each["plans"])
            if spec in entries:
                raise ValueError(f"{spec} occurs twice")
        entries[spec] = []
        for name, facts in plans.items():
            with expected(path, f"an entry at specs[{number}], {name!r:.60}"):
                entries[spec].append(_entry(spec, name, of_kind(dict, facts)))
    return environment, [entry for found in entries.values() for entry in found]


def _block(spec: AttentionSpec, entries: Iterable[Entry]) -> str:
    plans = [f" {json.dumps(str(entry.plan))}: {json.dumps(_facts(entry), allow_nan=False)}" for entry in entries]
    return f'{{"spec": {json.dumps(short_fields(spec))}, "plans": {{\n' + ",\n".join(plans) + "\n}}"


def _facts(entry: Entry) -> dict[str, Any]:
    """The fields of an entry that differ from those of a plan that is ok."""
    errors = {family: error if math.isfinite(error) else "inf" for family, error in sorted(entry.errors.items())}
    facts = {
        "status": None if entry.status == "ok" else entry.status,
        "time_ms": entry.time_ms,
        "spread_ms": entry.spread_ms,
        "errors": errors or None,
        "check": entry.check,
        "reason": entry.reason,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _entry(spec: AttentionSpec, name: str, facts: dict[str, Any]) -> Entry:
    if unknown := facts.keys() - _FACTS:
        raise ValueError(f"an entry has no {min(unknown)!r:.60}")
    status, errors = facts.get("status", "ok"), of_kind(dict, facts.get("errors", {}))
    if status not in STATUSES:
        raise ValueError(f"{status!r:.60} is no status")
    if len(errors) > _MOST_FAMILIES:
        raise ValueError(f"{len(errors)} input families")
    return Entry(
        spec=spec,
        plan=Plan.parse(bounded_text(name, _LONGEST_NAME)),
        status=status,
        time_ms=_time(facts.get("time_ms"), SHORTEST_MS),
        spread_ms=_time(facts.get("spread_ms"), 0.0),
        errors=_errors(errors),
        reason=None if "reason" not in facts else printable(bounded_text(facts["reason"], _LONGEST_REASON)),
        check=None if "check" not in facts else printable(bounded_text(facts["check"], _LONGEST_NAME)),
    )


def _errors(found: dict[str, Any]) -> dict[str, float]:
    errors: dict[str, float] = {}
    for name, value in found.items():
        family = printable(bounded_text(name, _LONGEST_NAME))
        error = math.inf if value == "inf" else _number(value, 0.0, math.inf)
        if error != 0:
            error = max(error, _LEAST_ERROR)
        errors[family] = max(error, errors.get(family, 0.0))  # names may differ in what is not printable alone
    return errors


def _time(value: Any, least: float) -> float | None:
    return None if value is None else _number(value, least, LONGEST_MS)


def _number(value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"{value!r:.60} is no number from {least:g} to {most:g}")
    if math.isinf(value):  # 1e999, which JSON has no number for either
        raise ValueError("an infinite number")
    return float(value)
