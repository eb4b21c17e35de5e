"""Rows from keywords that name every fact of a row alone, whichever part of the record it stands in."""

from __future__ import annotations

from typing import Any

from attnbench.harness.results.records import Correctness, Measurement, Performance

PARTS = {"correctness_": Correctness, "performance_": Performance}


def _pop_part(facts: dict[str, Any], part: str) -> dict[str, Any]:
    return {name: facts.pop(name) for name in PARTS[part].model_fields if name in facts}


def measurement(**facts: Any) -> Measurement:
    """A record of these facts; a part of which nothing is said is absent."""
    for part, model in PARTS.items():
        said = _pop_part(facts, part)
        if any(value not in (None, {}, []) for value in said.values()):
            facts[part] = model(**said)
    return Measurement(**facts)


def with_facts(row: Measurement, **facts: Any) -> Measurement:
    """The row with other facts, none of which is checked."""
    for part in PARTS:
        if said := _pop_part(facts, part):
            facts[part] = getattr(row, part).model_copy(update=said)
    return row.model_copy(update=facts)
