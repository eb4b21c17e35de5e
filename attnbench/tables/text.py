"""A table as text: one plan a line below its spec, in a fixed order, so that two tables can be compared by eye.

What is read is data from anywhere: bounded, checked field by field, and never more than data.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from ..errors import AttnbenchError, MalformedFileError
from ..files.untrusted import check_schema
from ..kernels.plan import Plan
from ..problem.mask import Mask
from ..problem.spec import AttentionSpec
from ..text.printable import printable
from .entry import LONGEST_MS, SHORTEST_MS, STATUSES, Entry
from .environment import Environment

__all__ = ["SCHEMA", "parsed", "written"]

SCHEMA = "attnbench.table/2"
_DEEPEST = 8  # brackets within brackets; a table has 6
_MOST_BRACKETS = 2**19
_MOST_VALUES = 2**20
_MOST_FAMILIES = 64
_LONGEST_NAME, _LONGEST_REASON = 200, 2000
_MOST_DIGITS = 18  # of a whole number
_LEAST_ERROR = 1e-100  # below it, and above 0, ratios and logarithms leave the range of floats
_FACTS = {"status", "time_ms", "spread_ms", "errors", "check", "reason"}
_SIZES = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_kv", "head_dim", "head_dim_v")
_SPEC = {*_SIZES, "dtype", "mask", "scale", "softcap", "direction", "return_lse", "descale"}


def written(environment: Environment, entries: Iterable[Entry]) -> str:
    """The text of a table; the same for the same entries in any order."""
    facts = {name: value for name, value in environment.to_dict().items() if value is not None}
    facts |= {name: dict(sorted(facts[name].items())) for name in ("backends", "origins")}
    head = json.dumps({"schema": SCHEMA, "environment": facts}, indent=1)
    ordered = sorted(entries, key=lambda entry: (_order(entry.spec), str(entry.plan)))
    specs = [_block(spec, plans) for spec, plans in groupby(ordered, key=lambda entry: entry.spec)]
    return head[:-2] + ',\n "specs": [\n' + ",\n".join(specs) + "\n]}\n"


def parsed(path: Path, text: str) -> tuple[Environment, list[Entry]]:
    """What ``written`` wrote; ``path`` is named in errors.  Raises MalformedFileError on anything else."""
    data = _decoded(path, text)
    if not isinstance(data, dict):
        raise MalformedFileError(path, f'expected an object with "schema": "{SCHEMA}"')
    check_schema(path, data.get("schema"), SCHEMA)
    with _expected(path, "an environment"):
        environment = Environment.from_dict(data["environment"])
    with _expected(path, "a list of specs"):
        specs = _of(list, data["specs"])
    entries: dict[AttentionSpec, list[Entry]] = {}
    for number, each in enumerate(specs):
        with _expected(path, f"a spec at specs[{number}]"):
            spec, plans = _spec(_of(dict, each)["spec"]), _of(dict, each["plans"])
            if spec in entries:
                raise ValueError(f"{spec} stands there twice")
        entries[spec] = []
        for name, facts in plans.items():
            with _expected(path, f"an entry at specs[{number}], {name!r:.60}"):
                entries[spec].append(_entry(spec, name, _of(dict, facts)))
    return environment, [entry for found in entries.values() for entry in found]


def _order(spec: AttentionSpec) -> tuple[object, ...]:
    """What is compared stands together: direction, type, head size and mask first, then from small to large."""
    shape = tuple(getattr(spec, name) for name in ("batch", *_SIZES[1:5]))
    return spec.direction, spec.dtype, spec.head_dim, spec.head_dim_v, str(spec.mask), shape, str(spec)


def _block(spec: AttentionSpec, entries: Iterable[Entry]) -> str:
    plans = [f" {json.dumps(str(entry.plan))}: {json.dumps(_facts(entry), allow_nan=False)}" for entry in entries]
    return f'{{"spec": {json.dumps(_short(spec))}, "plans": {{\n' + ",\n".join(plans) + "\n}}"


def _short(spec: AttentionSpec) -> dict[str, Any]:
    """The fields of a spec that ``AttentionSpec.make`` would not fill in by itself."""
    fields = spec.to_dict()
    mask = {side: reach for side, reach in fields["mask"].items() if reach not in (None, "top-left")}
    usual = {
        "kv_heads": spec.heads, "seqlen_kv": spec.seqlen_q, "head_dim_v": spec.head_dim, "scale": spec.head_dim**-0.5,
        "mask": {}, "softcap": 0.0, "return_lse": False, "descale": None,
    }  # fmt: skip
    return {
        name: value for name, value in {**fields, "mask": mask}.items() if name not in usual or value != usual[name]
    }


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


def _decoded(path: Path, text: str) -> Any:
    if not _bounded(text):
        raise MalformedFileError(
            path, f"expected a table, found JSON nested deeper than {_DEEPEST} or of too many parts"
        )
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_whole, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise MalformedFileError(path, f"expected JSON: {error.msg}", error.lineno) from None
    except ValueError as error:
        raise MalformedFileError(path, f"expected JSON: {error}") from None


def _bounded(text: str) -> bool:
    """Whether the text has no more parts, and no deeper ones, than a table.

    Asked before the parser, which takes a level of C's stack for each bracket.  Only what the
    parser would get to needs to be right: up to the first mistake every backslash is in a string.
    """
    if text.count(",") > _MOST_VALUES:
        return False
    outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    brackets = re.sub(r"[^][{}]+", "", outside)
    if len(brackets) > _MOST_BRACKETS:
        return False
    depth = accumulate(1 if bracket in "[{" else -1 for bracket in brackets)
    return max(depth, default=0) <= _DEEPEST


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twice!r:.60} stands twice in one object")
    return found


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


@contextmanager
def _expected(path: Path, what: str) -> Iterator[None]:
    """Turns whatever a part of the file provokes into a MalformedFileError that says what should have stood there."""
    try:
        yield
    except (AttnbenchError, KeyError, TypeError, ValueError, OverflowError) as error:
        found = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise MalformedFileError(path, f"expected {what}: {found}") from None


def _spec(fields: Any) -> AttentionSpec:
    given = dict(_of(dict, fields))
    if unknown := given.keys() - _SPEC:
        raise ValueError(f"a spec has no entry {min(unknown)!r:.60}")
    return AttentionSpec.make(**{**given, "mask": Mask(**_of(dict, given.get("mask", {})))})


def _entry(spec: AttentionSpec, name: str, facts: dict[str, Any]) -> Entry:
    if unknown := facts.keys() - _FACTS:
        raise ValueError(f"an entry has no {min(unknown)!r:.60}")
    status, errors = facts.get("status", "ok"), _of(dict, facts.get("errors", {}))
    if status not in STATUSES:
        raise ValueError(f"{status!r:.60} is no status")
    if len(errors) > _MOST_FAMILIES:
        raise ValueError(f"{len(errors)} input families")
    return Entry(
        spec=spec,
        plan=Plan.parse(_text(name, _LONGEST_NAME)),
        status=status,
        time_ms=_time(facts.get("time_ms"), SHORTEST_MS),
        spread_ms=_time(facts.get("spread_ms"), 0.0),
        errors=_errors(errors),
        reason=None if "reason" not in facts else printable(_text(facts["reason"], _LONGEST_REASON)),
        check=None if "check" not in facts else printable(_text(facts["check"], _LONGEST_NAME)),
    )


def _errors(found: dict[str, Any]) -> dict[str, float]:
    errors: dict[str, float] = {}
    for name, value in found.items():
        family = printable(_text(name, _LONGEST_NAME))
        error = math.inf if value == "inf" else _number(value, 0.0, math.inf)
        if error != 0:
            error = max(error, _LEAST_ERROR)
        errors[family] = max(error, errors.get(family, 0.0))  # names may differ in what is not printable alone
    return errors


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} is not {kind.__name__}")
    return value


def _text(value: Any, longest: int) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError(f"{value!r:.60} is no text of at most {longest} characters")
    return value


def _time(value: Any, least: float) -> float | None:
    return None if value is None else _number(value, least, LONGEST_MS)


def _number(value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"{value!r:.60} is no number from {least:g} to {most:g}")
    if math.isinf(value):  # 1e999, which JSON has no number for either
        raise ValueError("an infinite number")
    return float(value)
