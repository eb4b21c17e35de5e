"""Measurements condensed for choosing: one entry for each (spec, plan), bound to the environment they come from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ..kernels.plan import Plan, backend_of
from ..problem.spec import AttentionSpec
from ..text.digits import three_digits
from .entry import HOST_DIGITS, Entry, nearest
from .environment import Environment
from .files import read_text, replace_text
from .text import parse_table, table_text

__all__ = ["Entry", "Table"]


@dataclass(frozen=True)
class Table:
    """Entries by (spec, plan), and the environment in which they were measured.

    ``launch_ms`` is what the host needs to start a small kernel, the speed that ``host_ms`` of the entries is for; None
    if it was not measured.
    ``scaled_from`` names the GPU whose times were scaled to the environment's (``scaling``), None if it was measured;
    ``time_error`` is then the standard error that this adds to the logarithm of a time.
    """

    environment: Environment
    entries: dict[tuple[AttentionSpec, Plan], Entry]
    launch_ms: float | None = None
    scaled_from: str | None = None
    time_error: float = 0.0

    @classmethod
    def from_entries(cls, environment: Environment, entries: Iterable[Entry], launch_ms: float | None = None) -> Table:
        """A table of the entries; of two for the same spec and plan, the later counts."""
        return cls(environment, {(entry.spec, entry.plan): entry for entry in entries}, launch_ms)

    @classmethod
    def load(cls, path: str | Path) -> Table:
        """Read a table file.  Raises MalformedFileError if it is not one, or OSError if it cannot be read."""
        return cls.from_entries(*parse_table(Path(path), read_text(Path(path))))

    def save(self, path: str | Path) -> None:
        """Write the table, one plan a line in a fixed order, in one step.  Raises OutputError."""
        replace_text(Path(path), self.file_text())

    def file_text(self) -> str:
        """What ``save`` writes."""
        return table_text(self.environment, self.entries.values(), self.launch_ms)

    def condensed(self) -> Table:
        """The entries needed to choose, with few digits: see ``Entry.kept`` and ``Entry.shortened``."""
        kept = [entry.shortened() for entry in self.entries.values() if entry.kept]
        return Table.from_entries(self.environment, kept, nearest(self.launch_ms, HOST_DIGITS))

    def on_host(self, launch_ms: float | None) -> Table:
        """The table as on a host that needs ``launch_ms`` to start a small kernel; itself where either is not known.

        Only the hosts' parts of calls change, all in the same proportion.
        """
        if launch_ms is None or self.launch_ms is None or launch_ms == self.launch_ms:
            return self
        slower = launch_ms / self.launch_ms
        entries = {key: entry.on_host(slower) for key, entry in self.entries.items()}
        return replace(self, entries=entries, launch_ms=launch_ms)

    def merged(self, newer: Table) -> Table:
        """Both tables' entries, the newer one's counting (``Entry.renewed``), and its environment with missing versions
        added.

        Both are brought to the host's speed of the larger table (of those that know it): a few rows say little of it.
        """
        launches = [(len(each.entries), each.launch_ms) for each in (self, newer) if each.launch_ms is not None]
        launch_ms = max(launches)[1] if launches else None
        entries = dict(self.on_host(launch_ms).entries)
        for key, entry in newer.on_host(launch_ms).entries.items():
            entries[key] = entries[key].renewed(entry) if key in entries else entry
        older, later = self.environment, newer.environment
        used = {backend_of(kernel) for _, plan in self.entries for kernel in plan.kernels} - later.backends.keys()
        environment = replace(
            later,
            backends={**_of(used, older.backends), **later.backends},
            origins={**_of(used, older.origins), **later.origins},
        )
        return Table(environment, entries, launch_ms)

    @property
    def origin(self) -> str:
        """Where the times come from: ``measured on NVIDIA H200`` or ``scaled from NVIDIA H200``."""
        if self.scaled_from is not None:
            return f"scaled from {self.scaled_from}"
        return f"measured on {self.environment.device_name}"

    @property
    def specs(self) -> Iterable[AttentionSpec]:
        """Every spec that has an entry, once."""
        return self._by_spec.keys()

    def at(self, spec: AttentionSpec) -> dict[Plan, Entry]:
        """The entries measured at this very spec."""
        return self._by_spec.get(spec, {})

    @cached_property
    def _by_spec(self) -> dict[AttentionSpec, dict[Plan, Entry]]:
        found: dict[AttentionSpec, dict[Plan, Entry]] = {}
        for (spec, plan), entry in self.entries.items():
            found.setdefault(spec, {})[plan] = entry
        return found

    def to_text(self) -> str:
        """The entries for a terminal, fastest first within a spec."""
        from tabulate import tabulate  # only printing a table needs it

        def rank(entry: Entry) -> tuple[str, float, str]:
            return str(entry.spec), math.inf if entry.time_ms is None else entry.time_ms, str(entry.plan)

        rows = [
            [
                str(entry.spec),
                str(entry.plan),
                entry.status,
                "" if entry.time_ms is None else three_digits(entry.time_ms),
                ", ".join(f"{family} {_error_text(error)}" for family, error in sorted(entry.errors.items())),
            ]
            for entry in sorted(self.entries.values(), key=rank)
            if entry.time_ms is not None
        ]
        torch = self.environment.torch
        head = f"{self.environment.device_name}, torch {torch}: {len(rows)} plans, {self.origin}"
        return head + "\n\n" + tabulate(rows, ["spec", "plan", "status", "call ms", "errors"], disable_numparse=True)


def _error_text(error: float) -> str:
    return f"{error:.2g}" if math.isfinite(error) else "infinite"


def _of(names: Iterable[str], facts: Mapping[str, str]) -> dict[str, str]:
    return {name: facts[name] for name in names if name in facts}
