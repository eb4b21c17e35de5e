"""How a table's file is read and replaced: bounded, one step at a time, by several processes at once."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from .errors import MalformedFileError, OutputError
from .untrusted import open_regular

__all__ = ["LARGEST", "locked", "read_text", "replace_text"]

LARGEST = 8 * 2**20  # bytes: sixty thousand measured plans; what is beyond is no table


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


def replace_text(path: Path, text: str) -> None:
    """Write beside the file and rename over it, so that a reader sees the old one or the new one, never half.

    Raises OutputError; the old file is untouched then.
    """
    content = text.encode("utf-8")
    if len(content) > LARGEST:
        raise OutputError(f"cannot write the table {path}: it has {len(content)} bytes, and at most {LARGEST} are read")
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=_scratch(path))
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException as error:
        if scratch is not None:
            with suppress(OSError):
                os.unlink(scratch)
        if not isinstance(error, OSError):
            raise
        raise OutputError(f"cannot write the table {path}: {error.strerror}") from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other writers of this file out, and clear away what killed ones have left.

    The lock is the kernel's and ends with the process, however that ends.  Where the file
    system has none (NFS without its lock service), nothing is kept out: files are whole all
    the same, but of two writers at one moment only the later one's entries stay.
    Raises OutputError where the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise OutputError(f"cannot write the table {path}: {error.strerror}") from None
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            for scratch in path.parent.glob(f"{escape(_scratch(path))}*"):
                scratch.unlink()
        yield
    finally:
        os.close(lock)


def _scratch(path: Path) -> str:
    return f".{path.name}.attnbench-"
