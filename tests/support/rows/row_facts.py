"""Rows from flat keywords: each names a fact of a row, in whichever part of the record it is."""

from __future__ import annotations

from typing import Any

from attnbench.harness.results.records import Correctness, Measurement, Performance

PARTS = {"correctness_": Correctness, "performance_": Performance}


def _pop_part(facts: dict[str, Any], part: str) -> dict[str, Any]:
    return {name: facts.pop(name) for name in PARTS[part].model_fields if name in facts}


def measurement(**facts: Any) -> Measurement:
    """A record of these facts; parts without facts are absent."""
    for part, model in PARTS.items():
        values = _pop_part(facts, part)
        if any(value not in (None, {}, []) for value in values.values()):
            facts[part] = model(**values)
    return Measurement(**facts)


def with_facts(row: Measurement, **facts: Any) -> Measurement:
    """The row with other facts, which are not validated."""
    for part in PARTS:
        if values := _pop_part(facts, part):
            facts[part] = getattr(row, part).model_copy(update=values)
    return row.model_copy(update=facts)
