"""First checks of every reader of a file: it is a regular file, and it has a schema that this version knows."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from .. import __version__
from ..errors import MalformedFileError, NewerFileError
from ..text.printable import brief

__all__ = ["check_schema", "is_newer", "open_regular", "read_regular"]

_SCHEMA = re.compile(r"(attnbench\.[a-z]{1,20})/([0-9]{1,9})", re.ASCII)
_RELEASE = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9}){1,3}", re.ASCII)
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, links followed, without waiting for a pipe.  Raises OSError or MalformedFileError."""
    try:
        # A pipe without a writer would keep a plain open() waiting for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:  # a zero byte in the path
        raise MalformedFileError(path, f"cannot be read: {error}") from None
    found = stat.S_IFMT(os.fstat(handle).st_mode)
    if found != stat.S_IFREG:
        os.close(handle)
        raise MalformedFileError(path, f"expected a file, not {_KINDS.get(found, 'a socket')}")
    return os.fdopen(handle, "rb")


def read_regular(path: Path, largest: int, what: str) -> bytes:
    """The bytes of a regular file of ``what``.

    Raises MalformedFileError if it cannot be read or has more than ``largest``.
    """
    try:
        with open_regular(path) as file:
            content = file.read(largest + 1)
    except OSError as error:
        raise MalformedFileError(path, f"cannot be read: {error.strerror}") from error
    if len(content) > largest:
        raise MalformedFileError(path, f"expected at most {largest} bytes of {what}")
    return content


def check_schema(path: Path, found: object, expected: str, line: int | None = None) -> None:
    """Raise MalformedFileError unless ``found``, the schema in the file, is ``expected``; NewerFileError if it is
    newer.

    A schema is written ``attnbench.table/2``: the kind of file and the version of its format.
    """
    if found == expected:
        return
    message = f'expected "schema": "{expected}"'
    known, given = _SCHEMA.fullmatch(expected), _SCHEMA.fullmatch(found) if isinstance(found, str) else None
    if known is None or given is None:
        raise MalformedFileError(path, message if found is None else f"{message}, found {brief(found)}", line)
    if known[1] != given[1]:
        raise MalformedFileError(path, f'{message}, found "{found}", which is another kind of file', line)
    if int(given[2]) < int(known[2]):
        raise MalformedFileError(
            path,
            f'{message}, found "{found}": an older attnbench wrote this file; make it again with {__version__}',
            line,
        )
    raise NewerFileError(
        path,
        f'{message}, found "{found}": a newer attnbench wrote this file, which {__version__} cannot read; '
        "upgrade attnbench",
        line,
    )


def is_newer(version: object) -> bool:
    """Whether this is the version of an attnbench that is newer than this one."""
    theirs = _RELEASE.match(version) if isinstance(version, str) else None
    ours = _RELEASE.match(__version__)
    return bool(theirs and ours and _numbers(theirs[0]) > _numbers(ours[0]))


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))
