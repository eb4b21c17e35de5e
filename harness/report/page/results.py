"""The results for a report: sweeps and training runs from folders and files, limited in size."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from attnbench.errors import MisuseError
from attnbench.files.untrusted import open_regular

from ...json_lines import lines_file
from ...results.records import Measurement, read_measurements
from ...results.store import measurements_file
from ...training.rows import ROWS, TrainingRun, read_runs

__all__ = ["Results", "read_results"]

_MOST_ROWS = 50_000  # measured and not; a page of more can no longer be read
_MOST_RUNS = 1_000
_TRAINING = re.compile(rb'"schema"\s*:\s*"attnbench\.training/')
_SNIFFED = 4096
_Row = TypeVar("_Row")


@dataclass
class Results:
    """``sweeps`` by the name of their folder, ``runs`` of all training together."""

    sweeps: dict[str, list[Measurement]] = field(default_factory=dict)
    runs: list[TrainingRun] = field(default_factory=list)


def read_results(paths: Sequence[Path]) -> Results:
    """Everything in the folders and files: measurements, training runs, or folders that hold these.

    Raises MisuseError if a path holds nothing, or if there is more than a page can show; MalformedFileError if a file
    is not valid.
    """
    results = Results()
    left = _MOST_ROWS
    for place in dict.fromkeys(found for path in paths for found in _files(path)):
        if _holds_training(place):
            results.runs += _bounded(read_runs(place), _MOST_RUNS - len(results.runs), "training runs", _MOST_RUNS)
        else:
            rows = _bounded(read_measurements(place), left, "measurements", _MOST_ROWS)
            left -= len(rows)
            results.sweeps[_name(place, results.sweeps)] = rows
    if not results.runs and not any(results.sweeps.values()):
        raise MisuseError(f"there is neither a measurement nor a training run in {', '.join(map(str, paths))}")
    return results


def _bounded(rows: Iterable[_Row], left: int, what: str, most: int) -> list[_Row]:
    kept: list[_Row] = []
    for row in rows:
        if len(kept) == left:
            raise MisuseError(f"a report is on at most {most} {what}; name fewer results")
        kept.append(row)
    return kept


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = _in(path)
    if not found:
        try:
            found = [file for folder in sorted(path.iterdir()) if folder.is_dir() for file in _in(folder)]
        except OSError as error:
            raise MisuseError(f"{path} cannot be read: {error.strerror}") from error
    if not found:
        raise MisuseError(f"{path} holds no results: neither a sweep's nor a training run's, nor folders with these")
    return found


def _in(folder: Path) -> list[Path]:
    return [file for file in (measurements_file(folder), lines_file(folder, ROWS)) if file.is_file()]


def _holds_training(path: Path) -> bool:
    """Decided by the start of the file; an unreadable file is left to the reader of measurements, which reports why."""
    try:
        with open_regular(path) as stored, gzip.open(stored) if path.suffix == ".gz" else stored as file:
            return _TRAINING.search(file.read(_SNIFFED)) is not None
    except (OSError, EOFError, zlib.error):
        return False


def _name(path: Path, taken: Iterable[str]) -> str:
    """The folder's name if it says more than the file's; never the whole path, which is private."""
    stem = path.name.partition(".")[0]
    name = path.resolve().parent.name if stem == "measurements" else stem
    number, named, taken = 1, name or stem, set(taken)
    while named in taken:
        number += 1
        named = f"{name} ({number})"
    return named
