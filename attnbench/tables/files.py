"""Read and replace table files: bounded, in one step, by several processes at once."""

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
    """The text of a regular file of at most ``LARGEST`` bytes; links are followed.

    Raises OSError if it cannot be opened, MalformedFileError if it is not a file, too large, not UTF-8, or being
    changed.
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
    """Replace the file in one step, making its folder.  Raises OutputError, also for more than ``LARGEST`` bytes."""
    content = text.encode("utf-8")
    if len(content) > LARGEST:
        raise OutputError(f"{path} cannot be written: it has {len(content)} bytes, and at most {LARGEST} are read")
    _make_folder(path)
    return replace_file(path, content)


def check_writable(path: Path) -> None:
    """Raise OutputError if ``replace_text`` could not write a small file now."""
    _make_folder(path)
    draft = Draft(path)
    draft.write(bytes(_ROOM))
    draft.discard()


@contextmanager
def locked(path: Path, place: Path | None = None) -> Iterator[None]:
    """Exclude other writers of this file, and remove the drafts of killed ones; ``place`` is the lock file.

    On a file system without locks nothing is excluded: files stay whole, but of two simultaneous writers the later
    wins.  Raises OutputError if the folder cannot be written.
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
