"""The parts of a sweep joined into one folder: every row once, none missing unnoticed, nothing that contradicts."""

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

from .condense import condense
from .records import Measurement, read_measurements
from .shards import Shard
from .store import LOCK, MEASUREMENTS, TABLE, Store, recorded

__all__ = ["Merged", "Part", "merge"]

_MOST_NAMED = 16


@dataclass(frozen=True)
class Part:
    """What one folder or file gave: its rows, and what is wrong with it, if anything is."""

    path: Path
    rows: list[Measurement]
    gap: str | None = None


@dataclass(frozen=True)
class Merged:
    """What lies in ``folder`` now.

    ``rows`` are those that were written, ``repeated`` counts those that stood in a part
    before.  ``gaps`` say what is missing, and only a partial merge has some; ``notes`` how
    the environments of the parts differ without making them incomparable.
    """

    folder: Path
    parts: list[Part]
    rows: list[Measurement]
    repeated: int
    gaps: list[str]
    notes: list[str]


def merge(out: Path, sources: Sequence[Path], *, partial: bool = False) -> Merged:
    """Join results into ``out``, a fresh or empty folder, which afterwards is whole or as it was before.

    A source is a sweep's folder, its ``measurements.jsonl`` or another JSON Lines file of
    measurements, or a folder of ``part-*-of-*`` folders, which stands for these.  Rows come in
    the order of the parts, numbered ones first, then by path, and within a part in their own
    order, however the sources are listed.  Rows with the same case and plan are one where they
    say the same.  ``partial`` accepts parts that are missing or unfinished; the result then has
    no ``table.json``, the mark of a sweep that ended, and `attnbench sweep --resume` can complete it.

    Raises MisuseError where ``out`` holds anything, where parts are missing, unfinished or
    still being written, were measured in environments that cannot be compared, or contradict
    each other; MalformedFileError where a source holds anything but measurements or cannot be
    read; OutputError where ``out`` cannot be written.  No error leaves anything behind or
    touches a source.
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
    """Where ``out`` really lies.  Raises MisuseError where something is there."""
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
    """The folders and files that the sources stand for, each once however often it is named."""
    found: dict[str, Path] = {}
    for source in sources:
        for place in _parts_of(source):
            found.setdefault(os.path.realpath(place), place)
    return list(found.values())


def _parts_of(source: Path) -> list[Path]:
    with _reading(source):
        if not stat.S_ISDIR(source.stat().st_mode):
            # A sweep's file is its folder, so that the lock, the table and the name beside it count.
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
    """Which part the name says it is; ``.`` has the name of the folder that it is."""
    return Shard.named(os.path.basename(os.path.abspath(place)).removesuffix(".jsonl"))


def _order(place: Path) -> tuple[bool, int, int, str]:
    shard = _shard(place)
    return shard is None, shard.count if shard else 0, shard.index if shard else 0, os.path.realpath(place)


def _read(place: Path, locks: ExitStack) -> Part:
    """The rows of a folder or file, which is not changed; a folder's lock is kept until the others are read, too."""
    with _reading(place):
        folder = stat.S_ISDIR(place.stat().st_mode)
        path = recorded(place)
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
    """Keep every sweep from writing the folder; where there is no lock no sweep has ever done so."""
    if LOCK not in os.listdir(folder):
        return
    if not locks.enter_context(FileLock(folder / LOCK, read=True)).acquire(shared=True):
        raise MisuseError(f"a sweep is still writing {folder}; wait for it")


def _unfinished(folder: Path, rows: list[Measurement]) -> str | None:
    """A sweep writes its table when all is measured, so that a table tells how far it came."""
    if TABLE not in os.listdir(folder):
        return f"{folder} is unfinished, its sweep wrote no {TABLE}"
    if Table.load(folder / TABLE).entries.keys() != {(row.spec, row.plan) for row in rows}:
        return f"{folder} is unfinished, its {TABLE} is of other rows"
    return None


def _missing(places: Sequence[Path]) -> list[str]:
    """The parts that others imply: where there is part 3 of 8, there are 8, of every sweep that was cut in 8."""
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
    """The rows of all parts, those that say the same once.  Raises MisuseError where two contradict each other."""
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
            if row.measured:
                judged, there = families.setdefault(row.case, (row.error.keys(), where))
                if row.error.keys() != judged:
                    raise MisuseError(
                        f"the errors of the case {row.case!r} are on {', '.join(judged)} in {there}, but on "
                        f"{', '.join(row.error)} in {where}; these are parts of different sweeps"
                    )
            before, elsewhere = first.setdefault(row.key, (row, where))
            if said := _contradiction(before, row):
                raise MisuseError(
                    f"the case {row.case!r} with the plan {row.plan} stands in {elsewhere}, and otherwise in {where}: "
                    f"{said}; leave one of them out"
                )
    return [row for row, _ in first.values()]


def _contradiction(before: Measurement, row: Measurement) -> str | None:
    """What two rows of one case and plan disagree in, or None."""
    one, other = _facts(before), _facts(row)
    differing = [name for name in one | other if one.get(name) != other.get(name)]
    if before.status != row.status:
        return f"its status is {before.status}, then {row.status}"
    if before.measured:
        return f"it was measured twice, with another {' and another '.join(differing)}" if differing else None
    # Two refusals for one reason say the same, whenever and on whichever node of a kind they were written down.
    differing = [name for name in differing if name not in ("started", "environment")]
    return f"it has another {' and another '.join(differing)}" if differing else None


def _facts(row: Measurement) -> dict[str, Any]:
    """What a row says, its numbers beside the rest."""
    facts = dict(row)
    correctness, performance = facts.pop("correctness_"), facts.pop("performance_")
    return dict(performance or ()) | dict(correctness or ()) | facts


def _shared_environment(parts: Sequence[Part]) -> tuple[Environment, list[str]]:
    """The environment that all rows agree with, all that any of them knows, and what was not quite the same.

    Raises MisuseError where two environments cannot be compared.
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
            shared = _known(shared, found)
    return shared, list(notes)


def _known(first: Environment, other: Environment) -> Environment:
    """All that either knows: what the first does not tell may still be contradicted by a third."""
    facts: dict[str, Any] = {}
    for each in fields(Environment):
        mine, theirs = getattr(first, each.name), getattr(other, each.name)
        if isinstance(mine, Mapping):
            facts[each.name] = {**theirs, **mine}
        else:
            facts[each.name] = theirs if mine is None else mine
    return Environment(**facts)


def _write(target: Path, rows: Sequence[Measurement], environment: Environment, whole: bool) -> None:
    """Build the folder beside its place and move it there in one step."""
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with Store(scratch, environment) as store:
            for row in rows:
                store.append(row)
        if whole:
            Table.from_entries(environment, condense(rows)).save(scratch / TABLE)
        scratch.rename(target)
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        # Store and Table say what became of their own files, which nobody shall look for.
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
    """Names with commas; of ``number``, where there are more of them than names."""
    more = (number or len(names)) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
