"""Parse JSON from untrusted files, bounded before parsing, and validate it by a pydantic type."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ..errors import MalformedFileError
from .untrusted import check_schema

__all__ = ["read_json", "validation_fault"]

_Content = TypeVar("_Content")
_Place = tuple[int | str, ...]

_DEEPEST = 8  # brackets within brackets; a table has 6
_MOST_BRACKETS = 2**19
_MOST_VALUES = 2**20
_MOST_DIGITS = 18  # of a whole number


def read_json(
    path: Path,
    text: str,
    schema: str,
    kind: TypeAdapter[_Content],
    line: Callable[[_Place], int | None] = lambda place: None,
) -> _Content:
    """The content of a file: the JSON object in the text, as ``kind`` validates it.

    Raises MalformedFileError if it is none, too large, of another schema or not of that kind; ``line`` finds the line
    of a place in the object, such as ("choices", 3, "plan").
    """
    _check(path, text, schema)
    try:
        return kind.validate_json(text)
    except ValidationError as error:
        place = error.errors(include_url=False, include_input=False)[0]["loc"]
        raise MalformedFileError(path, f"expected {validation_fault(error, 'the file')}", line(place)) from None


def validation_fault(error: ValidationError, whole: str) -> str:
    """The first fault that pydantic found: its place and what is wrong; ``whole`` is what the content is called."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(f"{part:.60}" if isinstance(part, str) else str(part) for part in first["loc"])
    return f"{place or whole}: {first['msg'].removeprefix('Value error, ')}"


def _check(path: Path, text: str, schema: str) -> None:
    """Raise MalformedFileError for what pydantic's parser lets pass: too many parts, a name twice, another schema."""
    if not _bounded(text):
        raise MalformedFileError(
            path, f"expected JSON of at most {_MOST_VALUES} values, nested {_DEEPEST} deep at most"
        )
    try:
        data = json.loads(text, object_pairs_hook=_object, parse_int=_whole, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise MalformedFileError(path, f"expected JSON: {error.msg}", error.lineno) from None
    except ValueError as error:
        raise MalformedFileError(path, f"expected JSON: {error}") from None
    if not isinstance(data, dict):
        raise MalformedFileError(path, f'expected an object with "schema": "{schema}"')
    check_schema(path, data.get("schema"), schema)


def _bounded(text: str) -> bool:
    """Whether the text is small and shallow enough for the parser, which uses C stack for each bracket."""
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
        raise ValueError(f"{twice!r:.60} occurs twice in one object")
    return found


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")
