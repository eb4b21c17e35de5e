"""Parse JSON from untrusted files: bounded before parsing; invalid parts raise MalformedFileError.

Not with pydantic, which records use: importing it makes reading the shipped table 1.5 times as long (0.22 s).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..errors import AttnbenchError, MalformedFileError
from .untrusted import check_schema

__all__ = ["bounded_text", "decoded", "expected", "of_kind"]

_DEEPEST = 8  # brackets within brackets; a table has 6
_MOST_BRACKETS = 2**19
_MOST_VALUES = 2**20
_MOST_DIGITS = 18  # of a whole number


def decoded(path: Path, text: str, schema: str) -> dict[str, Any]:
    """The JSON object in the text.  Raises MalformedFileError if it is none, too large, or of another schema."""
    if not _bounded(text):
        raise MalformedFileError(
            path, f"expected a table, found JSON nested deeper than {_DEEPEST} or of too many parts"
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
    return data


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


@contextmanager
def expected(path: Path, what: str, line: Callable[[], int | None] = lambda: None) -> Iterator[None]:
    """Turn an exception from a part of the file into a MalformedFileError that says what was expected, and where."""
    try:
        yield
    except (AttnbenchError, KeyError, TypeError, ValueError, OverflowError) as error:
        found = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise MalformedFileError(path, f"expected {what}: {found}", line()) from None


def of_kind(kind: type, value: Any) -> Any:
    """The value.  Raises ValueError if it is not of that type."""
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} is not {kind.__name__}")
    return value


def bounded_text(value: Any, longest: int) -> str:
    """The value.  Raises ValueError if it is not a text of at most ``longest`` characters."""
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError(f"{value!r:.60} is no text of at most {longest} characters")
    return value
