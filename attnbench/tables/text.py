"""A table as text: one plan a line below its spec, in a fixed order.  Parsing is bounded and checks every field."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from ..errors import MalformedFileError
from ..files.json_text import read_json
from ..problem.spec import AttentionSpec
from ..problem.spec_text import short_fields, spec_order
from .entry import LONGEST_MS, SHORTEST_MS, Entry, Status
from .environment import Environment
from .record_fields import NumberOrInf, PlanField, Printable, SpecField

__all__ = ["SCHEMA", "parse_table", "table_text"]

SCHEMA = "attnbench.table/2"
_LEAST_ERROR = 1e-100  # below it, and above 0, ratios and logarithms leave the range of floats
_SHORTEST_LAUNCH_MS, _LONGEST_LAUNCH_MS = 1e-4, 10.0
_STRICT = ConfigDict(strict=True, extra="forbid")

_Name = Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\pC\p{Zl}\p{Zp}]*$")]
_Time = Annotated[float, Field(ge=SHORTEST_MS, le=LONGEST_MS)]
_Error = Annotated[NumberOrInf, Field(ge=0), AfterValidator(lambda error: error and max(error, _LEAST_ERROR))]


class _Facts(BaseModel):
    """A plan's entry, without what is as usual."""

    model_config = _STRICT

    status: Status = "ok"
    time_ms: _Time | None = None
    spread_ms: Annotated[float, Field(ge=0, le=LONGEST_MS)] | None = None
    host_ms: _Time | None = None
    device_ms: _Time | None = None
    errors: Annotated[dict[_Name, _Error], Field(max_length=64)] = {}
    check: Annotated[Printable, Field(max_length=200)] | None = None
    reason: Annotated[Printable, Field(max_length=2000)] | None = None


class _Plans(BaseModel):
    model_config = _STRICT

    spec: SpecField
    plans: dict[PlanField, _Facts]


class _Content(BaseModel):
    model_config = _STRICT

    schema_: str = Field(alias="schema")
    environment: Environment
    launch_ms: Annotated[float, Field(ge=_SHORTEST_LAUNCH_MS, le=_LONGEST_LAUNCH_MS)] | None = None
    specs: list[_Plans]


_CONTENT = TypeAdapter(_Content)


def table_text(environment: Environment, entries: Iterable[Entry], launch_ms: float | None) -> str:
    """The text of a table; the same for the same entries in any order."""
    facts = {name: value for name, value in environment.to_dict().items() if value is not None}
    facts |= {name: dict(sorted(facts[name].items())) for name in ("backends", "origins")}
    known = {} if launch_ms is None else {"launch_ms": launch_ms}
    head = json.dumps({"schema": SCHEMA, "environment": facts, **known}, indent=1)
    ordered = sorted(entries, key=lambda entry: (spec_order(entry.spec), str(entry.plan)))
    specs = [_block(spec, plans) for spec, plans in groupby(ordered, key=lambda entry: entry.spec)]
    return head[:-2] + ',\n "specs": [\n' + ",\n".join(specs) + "\n]}\n"


def parse_table(path: Path, text: str) -> tuple[Environment, list[Entry], float | None]:
    """What ``table_text`` wrote; ``path`` is named in errors.  Raises MalformedFileError on anything else."""
    content = read_json(path, text, SCHEMA, _CONTENT)
    if len({each.spec for each in content.specs}) < len(content.specs):
        ((twice, _),) = Counter(each.spec for each in content.specs).most_common(1)
        raise MalformedFileError(path, f"expected each spec once, and {twice} occurs twice")
    entries = [Entry(each.spec, plan, **vars(facts)) for each in content.specs for plan, facts in each.plans.items()]
    return content.environment, entries, content.launch_ms


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
        "host_ms": entry.host_ms,
        "device_ms": entry.device_ms,
        "errors": errors or None,
        "check": entry.check,
        "reason": entry.reason,
    }
    return {name: value for name, value in facts.items() if value is not None}
