"""How a table's file is read and replaced: bounded, one step at a time, by several processes at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import MalformedFileError, OutputError
from ..files.atomic import Draft, clear_drafts, replace_file
from ..files.lock import FileLock
from ..files.untrusted import open_regular

__all__ = ["LARGEST", "check_writable", "locked", "read_text", "replace_text"]

LARGEST = 8 * 2**20  # bytes: sixty thousand measured plans; what is beyond is no table
_ROOM = 2**16  # bytes that a disk must have for a place to count as writable


def read_text(path: Path) -> str:
    """The text of a regular file of at most ``LARGEST`` bytes, or of one that a link names.

    Raises OSError where it cannot be opened, MalformedFileError where it is no file, too
    large, no UTF-8, or was changed meanwhile.
    """
    with open_regular(path) as file:
        before = os.fstat(file.fileno())
        content = b"" if before.st_size > LARGEST else file.read(LARGEST + 1)
        after = os.fstat(file.fileno())
    if max(before.st_size, len(content)) > LARGEST:
        raise MalformedFileError(path, f"expected a table of at most {LARGEST} bytes")
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise MalformedFileError(path, "expected a file that stays as it is while it is read")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedFileError(path, f"expected UTF-8 text: {error.reason} at byte {error.start}") from None


def replace_text(path: Path, text: str) -> os.stat_result | None:
    """Replace the file in one step (``draft.replace_file``), its folder made where it is missing.

    Raises OutputError, also for more than ``LARGEST`` bytes; the old file is untouched then.
    """
    content = text.encode("utf-8")
    if len(content) > LARGEST:
        raise OutputError(f"{path} cannot be written: it has {len(content)} bytes, and at most {LARGEST} are read")
    _make_folder(path)
    return replace_file(path, content)


def check_writable(path: Path) -> None:
    """Raise OutputError where ``replace_text`` could not write a small file now: better known before measuring."""
    _make_folder(path)
    draft = Draft(path)
    draft.write(bytes(_ROOM))
    draft.discard()


@contextmanager
def locked(path: Path, place: Path | None = None) -> Iterator[None]:
    """Keep other writers of this file out, and clear away what killed ones have left.

    ``place`` is the file that is locked, beside ``path`` with the suffix .lock unless given.

    Where the file system has no locks, nothing is kept out: files are whole all the same, but of two writers at one
    moment only the later one's entries stay.  Raises OutputError where the folder cannot be written.
    """
    _make_folder(path)
    try:
        lock = FileLock(place or path.with_suffix(".lock"))
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None
    with lock:
        with suppress(OSError):
            lock.acquire(wait=True)
            clear_drafts(path)
        yield


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None
