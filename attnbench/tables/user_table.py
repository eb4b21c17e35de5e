"""The tables that choices on a device use: the user's own, those of ATTNBENCH_TABLES, and the shipped ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..errors import AttnbenchWarning, InputError, MalformedFileError, NewerFileError, OutputError
from ..files.user_folders import cache_folder
from ..kernels.plan import Plan
from ..kernels.registry import registry
from ..problem.spec import AttentionSpec
from ..state import Cache
from ..text.printable import printable
from .binding import Binding
from .environment import Environment
from .files import check_writable, locked
from .folders import VARIABLE, folder_tables
from .gpu_models import GPU_MODELS
from .scaling import scaled
from .shipped import file_name, shipped_table_path, shipped_tables
from .table import Entry, Table

__all__ = ["Known", "check_user_table", "known_tables", "tables_for", "update_user_table", "user_table_path"]


@dataclass(frozen=True)
class Known:
    """The measurements usable on a device.

    ``tables``: the user's first, then those of ``ATTNBENCH_TABLES``, then the shipped one, then those of both that can
    be scaled to this model; without unusable entries.  Of several that have a spec only the first is asked for it,
    because measured times of two machines must not be compared in a choice.  Tables of one GPU model have no spec
    twice.  A scaled table keeps the specs that this GPU's own have: a model of the few others promised more than the
    datasheet's rate.  ``note``: what to report about them, or None.  ``dropped`` maps a backend to why its entries are
    not used.
    """

    tables: tuple[Table, ...] = ()
    note: str | None = None
    dropped: Mapping[str, str] = field(default_factory=dict)

    @property
    def launch_ms(self) -> float | None:
        """The speed of the host that all are given for: what the first that knows it needs to start a small kernel."""
        return next((table.launch_ms for table in self.tables if table.launch_ms is not None), None)

    @classmethod
    def of(cls, table: Table) -> Known:
        """One table, used as it is."""
        return cls((table,))

    def table_of(self, spec: AttentionSpec) -> Table | None:
        """The table in which this very spec was measured, None if it was in none."""
        return next((table for table in self.tables if table.at(spec)), None)

    def at(self, spec: AttentionSpec) -> dict[Plan, Entry]:
        """The entries measured at this very spec, by plan; none where it was not measured."""
        table = self.table_of(spec)
        return {} if table is None else table.at(spec)


_SHIPPED = "the table that attnbench ships"
_MOST_NOTES = 8  # a folder may hold many tables, each with something to report
_known: Cache[torch.device, Known] = Cache()


def user_table_path(environment: Environment) -> Path:
    """The path of this user's table: one file for each device model, in the cache folder.  Raises OutputError without
    one.
    """
    return cache_folder() / "tables" / file_name(environment)


def check_user_table(environment: Environment) -> None:
    """Raise OutputError if ``update_user_table`` could not write now."""
    path = user_table_path(environment)
    check_writable(path)
    with locked(path):
        pass


def update_user_table(table: Table) -> Path:
    """Merge the table into the user's own and return its path; several processes may do so at once.

    Entries of the file that are not usable in the new environment (``Binding``), and a file that cannot be read, are
    replaced.  Raises OutputError if the folder cannot be written, or the file is from a newer attnbench.
    """
    path = user_table_path(table.environment)
    new = table.condensed()
    with locked(path):
        try:
            before = Table.load(path)
            new = Binding.between(before, table.environment, registry()).usable(before).merged(new).condensed()
        except NewerFileError as error:
            raise OutputError(f"your table stays as it is: {error}") from None
        except (OSError, MalformedFileError, InputError):
            pass  # none yet, or damaged
        new.save(path)
    _known.forget()
    return path


def known_tables(device: torch.device) -> Known:
    """The measurements usable on this device, cached; warns of a damaged file or a table without usable entries."""
    return _known.of(device, _read, device)


def _read(device: torch.device) -> Known:
    return tables_for(Environment.detect(device, registry()))


def tables_for(here: Environment) -> Known:
    """The measurements usable in an environment; warns as ``known_tables``."""
    kept = _Kept(here)
    with suppress(OutputError):  # there is no folder where one could be
        kept.add("your table", user_table_path(here), warned=True)
    others = [(f"{printable(path.name)} of {VARIABLE}", path, table) for path, table in folder_tables()]
    for whose, path, table in others:
        if table.environment.device_name == here.device_name:
            kept.use(whose, path, table)
    shipped = shipped_table_path(here)
    if shipped is not None:
        kept.add(_SHIPPED, shipped)
    if here.device_name in GPU_MODELS:
        tables = ((_SHIPPED, path, _loaded(_SHIPPED, path)) for path in shipped_tables() if path != shipped)
        for whose, path, found in (*others, *tables):
            moved = None if found is None else scaled(found, here)
            if moved is not None:
                kept.use(f"{whose}, scaled from {moved.scaled_from},", path, moved)
    return kept.known()


class _Kept:
    """Collects the tables that are usable here, in the order of their precedence."""

    def __init__(self, here: Environment) -> None:
        self._here = here
        self._tables: list[Table] = []
        self._notes: list[str] = []
        self._dropped: dict[str, str] = {}

    def add(self, whose: str, path: Path, warned: bool = False) -> None:
        """Use what the file holds; ``warned``: a file of which nothing is used gets a warning."""
        table = _loaded(whose, path)
        if table is not None:
            self.use(whose, path, table, warned)

    def use(self, whose: str, path: Path, table: Table, warned: bool = False) -> None:
        """Use those of the table's entries that hold here."""
        binding = Binding.between(table, self._here, registry())
        usable = binding.usable(table)
        unused = [*binding.refused, *dict.fromkeys(binding.dropped.values())]
        if usable.entries:
            alike = [each for each in self._tables if each.scaled_from == usable.scaled_from]
            measured = {spec for each in alike for spec in each.specs}
            left = {key: entry for key, entry in usable.entries.items() if key[0] not in measured}
            if left:
                self._tables.append(replace(usable, entries=left))
            self._notes += [f"{whose} was measured where {'; '.join(binding.soft)}"] if binding.soft else []
            self._notes += [f"{whose} is used in part: {'; '.join(unused)}"] if unused else []
        elif unused:
            where = f"{whose} ({printable(str(path))})"
            note = f"{where} is not used, run `attnbench sweep` for one of here: {'; '.join(unused)}"
            self._notes.append(note)
            if warned:
                warnings.warn(note, AttnbenchWarning, stacklevel=6)
        self._dropped = {**binding.dropped, **self._dropped}

    def known(self) -> Known:
        more = [f"and {len(self._notes) - _MOST_NOTES} more notes"] if len(self._notes) > _MOST_NOTES else []
        launch_ms = Known(tuple(self._tables)).launch_ms
        tables = tuple(table.on_host(launch_ms) for table in self._tables)
        return Known(tables, "; ".join([*self._notes[:_MOST_NOTES], *more]) or None, self._dropped)


def _loaded(whose: str, path: Path) -> Table | None:
    try:
        return Table.load(path)
    except FileNotFoundError:
        return None
    except (OSError, MalformedFileError) as error:
        warnings.warn(f"{whose} cannot be used: {error}", AttnbenchWarning, stacklevel=6)
        return None
