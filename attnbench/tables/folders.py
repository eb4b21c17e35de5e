"""Tables in the folders that ATTNBENCH_TABLES names: untrusted files, of any GPU."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Iterator
from heapq import nsmallest
from pathlib import Path

from ..errors import AttnbenchWarning, MalformedFileError
from ..state import Cache
from ..text.printable import printable
from .files import LARGEST
from .scaling import impossible
from .table import Table

__all__ = ["VARIABLE", "folder_tables"]

VARIABLE = "ATTNBENCH_TABLES"
_MOST_FILES = 256  # that are read of all folders; sorted by name within a folder
_MOST_BYTES = 4 * LARGEST  # of all files together, about three seconds to read
_MOST_NAMED = 8  # files that a warning names

_read: Cache[str, tuple[tuple[Path, Table], ...]] = Cache()


def folder_tables() -> tuple[tuple[Path, Table], ...]:
    """The tables of the folders' files, with their paths: folders in the given order, files by name.

    Every file ``*.json`` that is not hidden is read, once for all devices.  One warning for each folder names the files
    that are not used and says why: damaged, larger than a table, no regular file, faster than the GPU's peak, or beyond
    256 files or 32 MiB in all.
    """
    folders = os.environ.get(VARIABLE, "")
    return _read.of(folders, _tables, folders) if folders else ()


def _tables(folders: str) -> tuple[tuple[Path, Table], ...]:
    found: list[tuple[Path, Table]] = []
    files, size = _MOST_FILES, _MOST_BYTES
    for folder in dict.fromkeys(filter(None, folders.split(os.pathsep))):
        try:
            paths = _files(folder, files)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            _warn(f"{folder} cannot be read: {error}")
            continue
        refused: list[str] = []
        for path in paths[:files]:
            try:
                size -= min(_size(path), LARGEST)
                if size < 0:
                    refused.append(f"{path.name} and those after it: all files have more than {_MOST_BYTES} bytes")
                    break
                table = Table.load(path)
            except MalformedFileError as error:
                refused.append(f"{path.name}: {error.expected}")
            except OSError as error:
                refused.append(f"{path.name}: {error.strerror}")
            else:
                if (reason := impossible(table)) is None:
                    found.append((path, table))
                else:
                    refused.append(f"{path.name}: {reason}")
        if len(paths) > files:
            refused.append(f"{paths[files].name} and those after it: there are more than {_MOST_FILES} files")
        if refused:
            more = [f"and {len(refused) - _MOST_NAMED} more"] if len(refused) > _MOST_NAMED else []
            _warn(f"in {folder} are not used: {'; '.join([*refused[:_MOST_NAMED], *more])}")
        files = max(0, files - len(paths))
    return tuple(found)


def _files(folder: str, most: int) -> list[Path]:
    """The first files by name, one more than may be read."""

    def names() -> Iterator[str]:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".json") and not entry.name.startswith("."):
                    yield entry.name

    return [Path(folder, name) for name in nsmallest(most + 1, names())]


def _size(path: Path) -> int:
    found = path.stat()
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _warn(message: str) -> None:
    warnings.warn(f"{VARIABLE}: {printable(message)}", AttnbenchWarning, stacklevel=2)
