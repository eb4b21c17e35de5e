"""The tables that choices on a device use: the user's own, measured there, and the one that attnbench ships."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import AttnbenchWarning, InputError, MalformedFileError, NewerFileError, OutputError
from ..files.user_folders import cache_folder
from ..kernels.plan import Plan
from ..kernels.registry import registry
from ..problem.spec import AttentionSpec
from ..state import Cache
from .binding import Binding
from .environment import Environment
from .files import check_writable, locked
from .shipped import file_name, shipped_table_path
from .table import Entry, Table

__all__ = ["Known", "check_user_table", "known_tables", "update_user_table", "user_table_path"]


@dataclass(frozen=True)
class Known:
    """The measurements usable on a device.

    ``tables``: the user's first, then the shipped one, without unusable entries.  A spec is in one of them only,
    because times of two machines must not be compared in a choice.  ``note``: what to report about them, or None.
    ``dropped`` maps a backend to why its entries are not used.
    """

    tables: tuple[Table, ...] = ()
    note: str | None = None
    dropped: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, table: Table) -> Known:
        """One table, used as it is."""
        return cls((table,))

    def at(self, spec: AttentionSpec) -> dict[Plan, Entry]:
        """The entries measured at this very spec, by plan; none where it was not measured."""
        return next((found for table in self.tables if (found := table.at(spec))), {})


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
            new = Binding.between(before, table.environment, registry()).usable(before).merged(new)
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
    here = Environment.detect(device, registry())
    tables: list[Table] = []
    notes: list[str] = []
    dropped: dict[str, str] = {}
    try:
        own = user_table_path(here)
    except OutputError:  # there is no folder where one could be
        own = None
    shipped = shipped_table_path(here)
    for whose, path in (("your table", own), ("the table that attnbench ships", shipped)):
        table = None if path is None else _loaded(whose, path)
        if table is None:
            continue
        binding = Binding.between(table, here, registry())
        usable = binding.usable(table)
        unused = [*binding.refused, *dict.fromkeys(binding.dropped.values())]
        if usable.entries:
            others = {spec for each in tables for spec in each.specs}
            tables.append(
                Table(usable.environment, {key: entry for key, entry in usable.entries.items() if key[0] not in others})
            )
            notes += [f"{whose} was measured where {'; '.join(binding.soft)}"] if binding.soft else []
            notes += [f"{whose} is used in part: {'; '.join(unused)}"] if unused else []
        elif unused:
            notes.append(f"{whose} ({path}) is not used, run `attnbench sweep` for one of here: {'; '.join(unused)}")
            if path == own:
                warnings.warn(notes[-1], AttnbenchWarning, stacklevel=4)
        dropped = {**binding.dropped, **dropped}
    return Known(tuple(tables), "; ".join(notes) or None, dropped)


def _loaded(whose: str, path: Path) -> Table | None:
    try:
        return Table.load(path)
    except FileNotFoundError:
        return None
    except (OSError, MalformedFileError) as error:
        warnings.warn(f"{whose} cannot be used: {error}", AttnbenchWarning, stacklevel=5)
        return None
