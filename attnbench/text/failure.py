"""An exception in one line: compilers and frameworks wrap the cause in messages that do not name it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import PurePath

__all__ = ["in_one_line"]

_LONGEST = 300  # characters of any one message
_DEEPEST = 10  # exceptions that are followed inwards
# What compilers for C++ and CUDA, assemblers and linkers write in the line that says what is wrong.
_COMPILER_ERROR = re.compile(r"\berror\b[^:]{0,20}: \S|\bld: (?!warning)\S", re.IGNORECASE)


def in_one_line(error: BaseException) -> str:
    """``Type: message``, or ``Outer: Inner: message`` where the outer exception only announces another.

    A message of many lines gives its first, and a compiler's the line with the error as well.  One without words
    gives the place it was raised at and the code there.  An explicit cause (``raise ... from``) that the message
    does not repeat follows in brackets.
    """
    chain = list(_inwards(error))
    last = chain[-1]
    names = [type(each).__name__ for each in ((error, last) if last is not error else (error,))]
    message = _message(last)
    line = ": ".join([*names, message]) if message else f"{': '.join(names)}{_place(last)}"
    cause = last.__cause__
    if cause is None or _COMPILER_ERROR.search(message):
        return line
    text = _message(cause)
    return line if text in str(last) else f"{line} (caused by {type(cause).__name__}: {text})"


def _inwards(error: BaseException) -> Iterator[BaseException]:
    """The exception, and the ones it only introduces: its first line ends in a colon."""
    for _ in range(_DEEPEST):
        yield error
        inner = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
        if not _first(error).endswith(":") or not isinstance(inner, BaseException):
            return
        error = inner


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()]


def _first(error: BaseException) -> str:
    return next(iter(_lines(error)), "")


def _message(error: BaseException) -> str:
    lines = _lines(error)
    compiler = next((line for line in lines[1:] if _COMPILER_ERROR.search(line)), None)
    words = [line[:_LONGEST] for line in (_first(error), compiler) if line]
    return ": ".join(word.rstrip(":") for word in words)


def _place(error: BaseException) -> str:
    """Where it was raised, and the code there, if Python knows."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    frame = frames[-1]
    return f" in {PurePath(frame.filename).name}:{frame.lineno}: {(frame.line or frame.name)[:_LONGEST]}"
