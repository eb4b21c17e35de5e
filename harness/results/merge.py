"""Merge the parts of a sweep into one folder: every row once, missing parts reported, contradictions refused."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

from attnbench.errors import MalformedFileError, MisuseError, OutputError
from attnbench.files.lock import FileLock
from attnbench.kernels.plan import Plan
from attnbench.tables.environment import Environment
from attnbench.tables.table import Table

from .condense import condense, table_of
from .records import Measurement, read_measurements
from .shards import Shard
from .store import LOCK, MEASUREMENTS, TABLE, Store, measurements_file

__all__ = ["Merged", "Part", "merge"]

_MOST_NAMED = 16


@dataclass(frozen=True)
class Part:
    """One source folder or file: its rows, and what is missing from it, if anything is."""

    path: Path
    rows: list[Measurement]
    gap: str | None = None


@dataclass(frozen=True)
class Merged:
    """The contents of ``folder`` after a merge.

    ``rows`` are those that were written, ``repeated`` counts rows that an earlier part had.  ``gaps`` say what is
    missing, which only a partial merge allows; ``notes`` list harmless differences between the parts' environments.
    """

    folder: Path
    parts: list[Part]
    rows: list[Measurement]
    repeated: int
    gaps: list[str]
    notes: list[str]


def merge(out: Path, sources: Sequence[Path], *, partial: bool = False) -> Merged:
    """Merge results into ``out``, a new or empty folder, which afterwards is complete or unchanged.

    A source is a sweep's folder, its ``measurements.jsonl`` or another JSON Lines file of measurements, or a folder of
    ``part-*-of-*`` folders, which means all of them.  Rows come in the order of the parts, numbered ones first, then by
    path, and within a part in their own order.  Equal rows of one case and plan are written once.  ``partial`` accepts
    missing or unfinished parts; the result then has no ``table.json``, which marks a finished sweep, and `attnbench
    sweep --resume` can complete it.

    Raises MisuseError if ``out`` is not empty, or if parts are missing, unfinished, still being written, from
    environments that cannot be compared, or contradict each other; MalformedFileError if a source cannot be read or
    holds anything but measurements; OutputError if ``out`` cannot be written.  An error leaves nothing behind and
    changes no source.
    """
    target = _fresh(out)
    places = sorted(_places(sources), key=_order)
    with ExitStack() as locks:
        parts = [_read(place, locks) for place in places]
    gaps = [part.gap for part in parts if part.gap is not None] + _missing(places)
    if gaps and not partial:
        raise MisuseError(f"{'; '.join(gaps)}; finish these first (sweep --resume), or merge what there is (--partial)")
    rows = _united(parts)
    if not rows:
        raise MisuseError(f"there is no measurement in {_listed([str(source) for source in sources])}")
    environment, notes = _shared_environment(parts)
    _write(target, rows, environment, whole=not gaps)
    return Merged(out, parts, rows, sum(len(part.rows) for part in parts) - len(rows), gaps, notes)


def _fresh(out: Path) -> Path:
    """The real path of ``out``.  Raises MisuseError if something is there."""
    try:
        target = Path(os.path.realpath(out))
        if target == Path.cwd():
            raise MisuseError(f"{out} is the folder you are in; name one that can be made")
        if target.is_dir() and any(target.iterdir()):
            raise MisuseError(f"{out} is not empty; name a fresh folder for the merged results")
        if os.path.lexists(target) and not target.is_dir():
            raise MisuseError(f"{out} is no folder; name a fresh one for the merged results")
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}") from error
    return target


def _places(sources: Sequence[Path]) -> list[Path]:
    """The folders and files that the sources name, each once."""
    found: dict[str, Path] = {}
    for source in sources:
        for place in _parts_of(source):
            found.setdefault(os.path.realpath(place), place)
    return list(found.values())


def _parts_of(source: Path) -> list[Path]:
    with _reading(source):
        if not stat.S_ISDIR(source.stat().st_mode):
            # A sweep's file stands for its folder, whose lock, table and name matter.
            return [source.parent if source.name == MEASUREMENTS else source]
        names = os.listdir(source)
    numbered = [source / name for name in names if Shard.named(name) is not None]
    if numbered and MEASUREMENTS in names:
        raise MisuseError(
            f"{source} holds results of its own beside those of {numbered[0].name}; name the ones you mean"
        )
    if numbered or MEASUREMENTS in names or _shard(source) is not None:
        return numbered or [source]
    raise MisuseError(f"{source} holds neither {MEASUREMENTS} nor folders called like {Shard(0, 2).name}")


def _shard(place: Path) -> Shard | None:
    """The part that the name gives; ``.`` has the name of its folder."""
    return Shard.named(os.path.basename(os.path.abspath(place)).removesuffix(".jsonl"))


def _order(place: Path) -> tuple[bool, int, int, str]:
    shard = _shard(place)
    return shard is None, shard.count if shard else 0, shard.index if shard else 0, os.path.realpath(place)


def _read(place: Path, locks: ExitStack) -> Part:
    """The rows of a folder or file.  A folder's lock is kept until all parts are read."""
    with _reading(place):
        folder = stat.S_ISDIR(place.stat().st_mode)
        path = measurements_file(place)
        if folder:
            _lock(place, locks)
            if path.name not in os.listdir(place):
                return Part(place, [], f"{place} holds no {MEASUREMENTS} yet")
        if not stat.S_ISREG(path.stat().st_mode):
            raise MalformedFileError(path, "expected a file of measurements")
        torn: list[str] = []
        rows = list(read_measurements(path, torn.append))
    if torn:
        return Part(place, rows, torn[0])
    return Part(place, rows, _unfinished(place, rows) if folder else None)


def _lock(folder: Path, locks: ExitStack) -> None:
    """Keep every sweep from writing the folder; a folder without a lock file was never written by one."""
    if LOCK not in os.listdir(folder):
        return
    if not locks.enter_context(FileLock(folder / LOCK, read=True)).acquire(shared=True):
        raise MisuseError(f"a sweep is still writing {folder}; wait for it")


def _unfinished(folder: Path, rows: list[Measurement]) -> str | None:
    """Why the sweep is not complete, or None: a sweep writes its table when everything is measured."""
    if TABLE not in os.listdir(folder):
        return f"{folder} is unfinished, its sweep wrote no {TABLE}"
    if Table.load(folder / TABLE).entries.keys() != {(entry.spec, entry.plan) for entry in condense(rows)}:
        return f"{folder} is unfinished, its {TABLE} is of other rows"
    return None


def _missing(places: Sequence[Path]) -> list[str]:
    """The parts that other parts imply: part 3 of 8 implies 8 parts, for every sweep that was split in 8."""
    held = Counter(shard for place in places if (shard := _shard(place)) is not None)
    gaps = []
    for count in sorted({shard.count for shard in held}):
        sweeps = max(number for shard, number in held.items() if shard.count == count)
        number = count - sum(held[shard] == sweeps for shard in held if shard.count == count)
        absent = (shard for shard in (Shard(index, count) for index in range(count)) if held[shard] < sweeps)
        if number:
            named = [shard.name for shard in islice(absent, _MOST_NAMED)]
            gaps.append(f"{_listed(named, number)} {'is' if number == 1 else 'are'} missing")
    return gaps


def _united(parts: Sequence[Part]) -> list[Measurement]:
    """The rows of all parts, equal ones once.  Raises MisuseError if two contradict each other."""
    first: dict[tuple[str, Plan], tuple[Measurement, str]] = {}
    cases: dict[str, tuple[Measurement, str]] = {}
    families: dict[str, tuple[Set[str], str]] = {}
    for part in parts:
        for line, row in enumerate(part.rows, start=1):
            where = f"{part.path}, line {line}"
            named, elsewhere = cases.setdefault(row.case, (row, where))
            if row.spec != named.spec:
                raise MisuseError(
                    f"the case {row.case!r} is {named.spec} in {elsewhere}, but {row.spec} in {where}; "
                    "these are parts of different sweeps"
                )
            if row.lengths != named.lengths:
                raise MisuseError(
                    f"the sequences of the case {row.case!r} have other lengths in {elsewhere} than in {where}; these "
                    "are parts of different sweeps"
                )
            if row.measured:
                judged, there = families.setdefault(row.case, (row.error.keys(), where))
                if row.error.keys() != judged:
                    raise MisuseError(
                        f"the errors of the case {row.case!r} are on {', '.join(judged)} in {there}, but on "
                        f"{', '.join(row.error)} in {where}; these are parts of different sweeps"
                    )
            before, elsewhere = first.setdefault(row.key, (row, where))
            if contradiction := _contradiction(before, row):
                raise MisuseError(
                    f"the case {row.case!r} with the plan {row.plan} stands in {elsewhere}, and otherwise in {where}: "
                    f"{contradiction}; leave one of them out"
                )
    return [row for row, _ in first.values()]


def _contradiction(before: Measurement, row: Measurement) -> str | None:
    """How two rows of one case and plan differ, or None."""
    one, other = _facts(before), _facts(row)
    differing = [name for name in one | other if one.get(name) != other.get(name)]
    if before.status != row.status:
        return f"its status is {before.status}, then {row.status}"
    if before.measured:
        return f"it was measured twice, with another {' and another '.join(differing)}" if differing else None
    # Two refusals for one reason are equal, whenever and on whichever node of a kind they were written.
    differing = [name for name in differing if name not in ("started", "environment")]
    return f"it has another {' and another '.join(differing)}" if differing else None


def _facts(row: Measurement) -> dict[str, Any]:
    """A row's fields, with those of its nested records beside them."""
    facts = dict(row)
    correctness, performance = facts.pop("correctness_"), facts.pop("performance_")
    return dict(performance or ()) | dict(correctness or ()) | facts


def _shared_environment(parts: Sequence[Part]) -> tuple[Environment, list[str]]:
    """The environment that agrees with all rows, with all that any of them knows, and notes on soft differences.

    Raises MisuseError if two environments cannot be compared.
    """
    shared = next(row.environment for part in parts for row in part.rows)
    notes: dict[str, None] = {}
    for part in parts:
        for found in dict.fromkeys(row.environment for row in part.rows):
            hard, soft = shared.differences(found)
            if hard:
                raise MisuseError(
                    f"{part.path} was measured in another environment than the parts before it ({'; '.join(hard)}); "
                    "such results cannot be compared"
                )
            notes |= dict.fromkeys(f"{part.path}: {each}" for each in soft)
            shared = _join_environments(shared, found)
    return shared, list(notes)


def _join_environments(first: Environment, other: Environment) -> Environment:
    """All that either environment knows: a third may contradict what the first does not say."""
    facts: dict[str, Any] = {}
    for each in fields(Environment):
        mine, theirs = getattr(first, each.name), getattr(other, each.name)
        if isinstance(mine, Mapping):
            facts[each.name] = {**theirs, **mine}
        else:
            facts[each.name] = theirs if mine is None else mine
    return Environment(**facts)


def _write(target: Path, rows: Sequence[Measurement], environment: Environment, whole: bool) -> None:
    """Build the folder beside its final place and move it there in one step."""
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with Store(scratch, environment) as store:
            for row in rows:
                store.append(row)
        if whole:
            table_of(environment, rows).save(scratch / TABLE)
        scratch.rename(target)
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        # Messages of Store and Table name files that no longer exist.
        cause = error.__context__ if isinstance(error, OutputError) else error
        reason = cause.strerror if isinstance(cause, OSError) else cause
        raise OutputError(f"{target} cannot be written: {reason}; nothing was kept, the parts are untouched") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MalformedFileError(error.filename or path, f"cannot be read: {error.strerror}") from error


def _listed(names: Sequence[str], number: int | None = None) -> str:
    """Names with commas; ``number`` is the total if there are more than the names."""
    more = (number or len(names)) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
