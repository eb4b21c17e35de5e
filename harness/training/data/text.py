"""A text of many files as one sequence of byte tokens, read on demand, so that its size needs no memory."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnbench.errors import InputError

__all__ = ["BOUNDARY", "BYTE_TOKENS", "File", "Text", "files_under"]

BOUNDARY = 256  # follows each file
BYTE_TOKENS = 257
_PROBED = 8192


class File(NamedTuple):
    """A file of the text: its name below the folder with slashes, where it is, and its bytes."""

    name: str
    path: Path
    size: int


class Text:
    """Tokens ``start`` to ``stop`` (None: the end) of the joined files: bytes 0 to 255, a boundary after each."""

    def __init__(self, files: Sequence[File], start: int = 0, stop: int | None = None) -> None:
        self.files = tuple(files)
        self._ends = list(accumulate(each.size + 1 for each in self.files))
        whole = self._ends[-1] if self._ends else 0
        self._start, self._stop = min(start, whole), whole if stop is None else min(stop, whole)

    def __len__(self) -> int:
        return max(0, self._stop - self._start)

    def part(self, start: int, stop: int) -> Text:
        """The tokens from ``start`` to ``stop`` of this text as a text."""
        return Text(self.files, self._start + start, self._start + stop)

    def spans(self) -> NDArray[np.int64]:
        """(files, 2): where each file's part begins in this text, and its tokens with the boundary that follows."""
        sizes, ends = np.array([each.size + 1 for each in self.files], np.int64), np.array(self._ends, np.int64)
        first, last = (each.clip(self._start, self._stop) - self._start for each in (ends - sizes, ends))
        return np.stack([first, last - first], axis=1)

    def read(self, start: int, length: int) -> NDArray[np.int64]:
        """``length`` tokens from ``start`` on.  Raises InputError if a file has changed."""
        assert 0 <= start <= len(self) - length, "a window lies inside its text"
        tokens = np.empty(length, np.int64)
        at, filled = self._start + start, 0
        while filled < length:
            number = bisect_right(self._ends, at)
            file = self.files[number]
            offset = at - (self._ends[number] - file.size - 1)
            count = min(length - filled, file.size - offset)
            if count:
                tokens[filled : filled + count] = _bytes_of(file, offset, count)
            if filled + count < length:
                tokens[filled + count] = BOUNDARY
                count += 1
            at, filled = at + count, filled + count
        return tokens

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of the files' names and sizes and of the part taken."""
        listed = [f"{each.name}\0{each.size}" for each in self.files]
        text = "\n".join([*listed, f"{self._start}:{self._stop}"])
        return blake2b(text.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _bytes_of(file: File, offset: int, count: int) -> NDArray[np.uint8]:
    try:
        with open(file.path, "rb") as stream:
            stream.seek(offset)
            data = stream.read(count)
    except OSError as error:
        raise InputError(f"{file.path} cannot be read: {error.strerror}") from None
    if len(data) != count:
        raise InputError(f"{file.path} has become shorter than the {file.size} bytes it had when training began")
    return np.frombuffer(data, np.uint8)


def files_under(root: Path) -> list[File]:
    """The text files of a folder sorted by name, without hidden and empty ones; or the one file.

    Links to folders are not followed.  Raises InputError if there is no file, an unreadable file, or a file that is not
    text (a zero byte in its first 8 KiB).
    """
    if os.path.isdir(root):  # Path.is_dir raises on a name that no file system takes
        found = []
        for folder, folders, names in os.walk(root, onerror=_unreadable):
            folders[:] = [each for each in folders if not each.startswith(".")]  # os.walk continues with these
            paths = [Path(folder, name) for name in names if not name.startswith(".")]
            found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    elif os.path.isfile(root):
        found = [(root.name, root)]
    else:
        raise InputError(f"there is no text file or folder {root}")
    files = [File(name, path, _size_of_text(path)) for name, path in sorted(found)]
    files = [each for each in files if each.size]
    if not files:
        raise InputError(f"{root} holds no text: {'its files are empty' if found else 'no file in it'}")
    return files


def _unreadable(error: OSError) -> None:
    raise InputError(f"{error.filename} cannot be read: {error.strerror}")


def _size_of_text(path: Path) -> int:
    try:
        with open(path, "rb") as stream:
            start = stream.read(_PROBED)
            size = os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if b"\0" in start:
        raise InputError(f"{path} is no text: there is a zero byte in it; name a folder of text files alone")
    return size
