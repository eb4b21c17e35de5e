"""A folder of results: each measurement is one complete line, or absent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from attnbench.errors import MalformedFileError, MisuseError, OutputError
from attnbench.files.lock import FileLock
from attnbench.kernels.plan import Plan
from attnbench.tables.environment import Environment

from ..json_lines import lines_file
from .records import MEASUREMENTS, Measurement, read_measurements

__all__ = ["LOCK", "MEASUREMENTS", "TABLE", "Store", "measurements_file"]

TABLE = "table.json"  # the condensed measurements, written once all are there
LOCK = ".lock"
_PAGE = 2**12  # bytes
_ROOM = 16 * _PAGE  # bytes that must be free when a sweep begins: some rows, or its table


def measurements_file(place: Path) -> Path:
    """The file of measurements of a path: the file itself, or the one in a folder, compressed or not."""
    return lines_file(place, MEASUREMENTS)


class Store:
    """``folder/measurements.jsonl``, written by one sweep at a time, which holds the folder's lock.

    A compressed file (see ``measurements_file``) is never added to.  Opening first repairs the file: a half-written
    last line is cut off, and ``notes`` says so.  ``rows`` are the measurements in the order in which they were written.

    Raises MisuseError if the folder has results and ``resume`` is not set, if another sweep is writing it, or if its
    results come from an environment that cannot be compared with this one; MalformedFileError if it holds anything but
    measurements; OutputError if it cannot be written.  No error changes what is already there.
    """

    def __init__(self, folder: Path, environment: Environment, *, resume: bool = False) -> None:
        self.folder = folder
        self.path = folder / MEASUREMENTS
        self.notes: list[str] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder / LOCK)
        except OSError as error:
            raise OutputError(f"{folder} cannot be written: {error.strerror}; name another with --out") from error
        try:
            self._open(environment, resume)
        except BaseException:
            self._lock.close()
            raise

    def _open(self, environment: Environment, resume: bool) -> None:
        try:
            ours = self._lock.acquire()
        except OSError as error:
            message = f"{self.folder} cannot be locked: {error.strerror}; name a folder on another disk"
            raise OutputError(message) from error
        if not ours:
            raise MisuseError(f"another sweep is writing {self.folder}; wait for it or name another folder with --out")
        if measurements_file(self.folder) != self.path:
            raise MisuseError(f"{self.folder} holds compressed results, to be kept; name another folder with --out")
        if self.path.exists():
            if not resume and self.path.stat().st_size:
                raise MisuseError(
                    f"{self.folder} already holds results; add to them with --resume or name another folder with --out"
                )
            self._repair()
        self.rows = list(read_measurements(self.path)) if self.path.exists() else []
        self._check(environment)
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise OutputError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            self._check_room()
        except OSError as error:
            os.close(self._file)
            raise OutputError(
                f"{self.path} cannot be written: {error.strerror}; name a folder on another disk"
            ) from error

    def _check_room(self) -> None:
        """Raise OSError if the disk is full: better now than after the first row is measured."""
        try:
            for start in range(0, _ROOM, _PAGE):
                os.pwrite(self._lock.handle, bytes(_PAGE), start)
            os.fsync(self._lock.handle)
        finally:
            os.ftruncate(self._lock.handle, 0)

    def _repair(self) -> None:
        try:
            with self.path.open("r+b") as file:
                torn = _torn(file.read())
                if torn:
                    file.seek(-torn, os.SEEK_END)
                    file.truncate()
                    os.fsync(file.fileno())
                    self.notes.append(f"cut off a half-written last line of {torn} bytes; it will be measured again")
        except OSError as error:
            raise OutputError(f"{self.path} cannot be written: {error.strerror}") from error

    def _check(self, environment: Environment) -> None:
        seen: dict[tuple[str, Plan], int] = {}
        for number, row in enumerate(self.rows, start=1):
            if row.key in seen:
                message = f"expected each case and plan once, line {seen[row.key]} has these too"
                raise MalformedFileError(self.path, message, number)
            seen[row.key] = number
        for found in dict.fromkeys(row.environment for row in self.rows):
            hard, soft = found.differences(environment)
            if hard:
                raise MisuseError(
                    f"{self.folder} was measured in another environment ({'; '.join(hard)}); "
                    "name another folder with --out"
                )
            self.notes += [note for note in soft if note not in self.notes]

    @property
    def done(self) -> Mapping[tuple[str, Plan], Measurement]:
        """The rows by case and plan."""
        return {row.key: row for row in self.rows}

    def append(self, row: Measurement) -> None:
        """Write one row completely, or nothing of it.  Raises OutputError."""
        line = (row.to_line() + "\n").encode()
        before = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            while written < len(line):  # a full disk takes a part first and reports the error on the next write
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, before)
            raise OutputError(
                f"{self.path} cannot be written: {error.strerror}; the {len(self.rows)} rows before are safe, "
                f"go on with --resume --out {self.folder} once there is room"
            ) from error
        self.rows.append(row)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        self._lock.close()


def _torn(content: bytes) -> int:
    """The number of bytes after the last line end."""
    return len(content) - (content.rfind(b"\n") + 1)
