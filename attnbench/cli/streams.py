"""Standard streams of a command, which may be closed, not UTF-8, on a full disk, or a pipe without a reader."""

from __future__ import annotations

import errno
import io
import os
import sys

__all__ = ["flush_streams", "is_lost_output", "prepare_streams"]

_LOST = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def prepare_streams() -> None:
    """Make the standard streams usable by everything that follows.

    A closed stream (``>&-``) is opened on the null device: otherwise the next opened file would get its number.  A
    character that the encoding of an output lacks becomes a question mark.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115, it stays open
        elif mode == "w" and isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def is_lost_output(error: OSError) -> bool:
    """Whether printing failed because of a closed pipe or a full disk; errors of a file have a file name."""
    return error.filename is None and error.errno in _LOST


def flush_streams() -> OSError | None:
    """Flush the streams; returns the first error, and leaves nothing for the interpreter to report at its end."""
    first = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            first = first or error
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return first
