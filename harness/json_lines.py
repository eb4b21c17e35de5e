"""Read JSON Lines through a schema: one record at a time, with limits on size; every error names its line."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from attnbench import __version__
from attnbench.errors import MalformedFileError
from attnbench.files.json_text import validation_fault
from attnbench.files.untrusted import check_schema, is_newer, open_regular
from attnbench.text.printable import brief

__all__ = ["Form", "TornLineError", "lines_file", "read_lines"]

_Record = TypeVar("_Record", bound=BaseModel)


class TornLineError(MalformedFileError):
    """The last line is incomplete, as after a killed process; the records before it are complete."""


class Form(NamedTuple):
    """The format of a file: its schema, the names for one record and for many, and its limits in bytes.

    ``older`` maps each earlier schema to the function that converts its records to ``schema``.
    """

    schema: str
    one: str  # "a measurement"
    many: str  # "measurements"
    longest_line: int
    largest_file: int
    older: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = MappingProxyType({})


def lines_file(place: Path, name: str) -> Path:
    """The file of lines of a path: the file itself, or the one of this name in a folder, compressed or not."""
    if not os.path.isdir(place):
        return place
    plain, packed = place / name, place / f"{name}.gz"
    return packed if packed.exists() and not plain.exists() else plain


def read_lines(path: Path, record: type[_Record], form: Form) -> Iterator[_Record]:
    """The records of a file, one at a time; a name that ends in ``.gz`` means a compressed file.

    Raises MalformedFileError with the line and what was expected there; TornLineError, after the complete records, if
    the last line is the start of one.
    """
    too_large = MalformedFileError(path, f"expected at most {form.largest_file} bytes of {form.many}")
    try:
        with open_regular(path) as stored:
            if stored.seek(0, 2) > form.largest_file:
                raise too_large
            stored.seek(0)
            with gzip.open(stored) if path.suffix == ".gz" else stored as file:
                number, left = 0, form.largest_file
                while line := file.readline(form.longest_line + 1):
                    number += 1
                    left -= len(line)
                    if left < 0:  # a compressed file's own size tells too little
                        raise too_large
                    yield _parsed(path, number, line, record, form)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise MalformedFileError(path, f"expected {form.many} compressed by gzip: {error}") from error
    except OSError as error:
        raise MalformedFileError(path, f"cannot be read: {error.strerror}") from error


def _parsed(path: Path, number: int, line: bytes, record: type[_Record], form: Form) -> _Record:
    if len(line) > form.longest_line:
        raise MalformedFileError(path, f"expected at most {form.longest_line} bytes in a line", number)
    try:
        content = from_json(line)
    except ValueError as error:
        starts = [f'{{"schema":"{schema}",'.encode()[: len(line)] for schema in (form.schema, *form.older)]
        if not line.endswith(b"\n") and line.startswith(tuple(starts)):
            raise TornLineError(
                path, f"the last line is incomplete, {len(line)} bytes of {form.one}", number
            ) from error
        raise MalformedFileError(path, f"expected {form.one}, one JSON object a line", number) from error
    if not isinstance(content, dict):
        raise MalformedFileError(path, f'expected "schema": "{form.schema}"', number)
    schema = content.get("schema")
    renewed = form.older.get(schema) if isinstance(schema, str) else None
    if renewed is None:
        check_schema(path, schema, form.schema, number)
    try:
        return record.model_validate_json(line if renewed is None else to_json(renewed(content)))
    except ValidationError as error:
        message = f"expected {form.one}, but {validation_fault(error, 'the record')}"
        raise MalformedFileError(path, f"{message[:300]}{_written_by_a_newer(content)}", number) from error


def _written_by_a_newer(content: dict[str, Any]) -> str:
    """A hint if a newer attnbench wrote the record, according to its environment; else empty."""
    environment = content.get("environment")
    writer = environment.get("attnbench") if isinstance(environment, dict) else None
    if not is_newer(writer):
        return ""
    return f"; attnbench {brief(writer)} wrote this, which is newer than {__version__}: upgrade attnbench"
