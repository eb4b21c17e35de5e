"""Measurements condensed for choosing: one entry for each (spec, plan), bound to the environment they come from."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .environment import Environment
from .errors import AttnbenchError, MalformedFileError, OutputError
from .plan import Plan
from .spec import AttentionSpec

__all__ = ["Entry", "Table"]

_SCHEMA = "attnbench.table/1"
_LARGEST_FILE = 64 * 2**20  # a table of every case that anybody sweeps is far below this; beyond it, it is no table


@dataclass(frozen=True)
class Entry:
    """What was found out about one plan at one spec.

    ``time_ms`` is the median of the whole call and ``spread_ms`` its interquartile range,
    both None unless ``status`` is ``ok`` or ``inaccurate``.  ``errors`` maps an input family
    to the worst relative L2 over out (and dq, dk, dv in training); infinite where something
    was not finite.  ``reason`` says why the status is not ``ok``.
    """

    spec: AttentionSpec
    plan: Plan
    status: str
    time_ms: float | None = None
    spread_ms: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    reason: str | None = None

    @property
    def usable(self) -> bool:
        """Whether it was timed and its error is known, so that it can be chosen."""
        return self.time_ms is not None and bool(self.errors)

    @property
    def worst(self) -> tuple[float, str]:
        """The largest error and the input family it was seen in."""
        return max((error, family) for family, error in self.errors.items())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; an infinite error is the string ``inf``."""
        return {
            "plan": str(self.plan),
            "status": self.status,
            "time_ms": self.time_ms,
            "spread_ms": self.spread_ms,
            "errors": {family: error if math.isfinite(error) else "inf" for family, error in self.errors.items()},
            "reason": self.reason,
            "spec": self.spec.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Entry:
        """The entry that ``to_dict`` wrote.  Raises ValueError, TypeError or KeyError on anything else."""
        if not isinstance(data, dict) or set(data) != {
            "plan",
            "status",
            "time_ms",
            "spread_ms",
            "errors",
            "reason",
            "spec",
        }:
            raise ValueError("its fields are not an entry's")
        return cls(
            spec=AttentionSpec.from_dict(data["spec"]),
            plan=Plan.parse(_text(data["plan"])),
            status=_text(data["status"]),
            time_ms=_time(data["time_ms"]),
            spread_ms=_time(data["spread_ms"]),
            errors={_text(family): _error(error) for family, error in dict(data["errors"]).items()},
            reason=None if data["reason"] is None else _text(data["reason"]),
        )


@dataclass(frozen=True)
class Table:
    """Entries by (spec, plan), and the environment in which they were measured."""

    environment: Environment
    entries: dict[tuple[AttentionSpec, Plan], Entry]

    @classmethod
    def from_entries(cls, environment: Environment, entries: Iterable[Entry]) -> Table:
        """A table of the entries; of two for the same spec and plan, the later counts."""
        return cls(environment, {(entry.spec, entry.plan): entry for entry in entries})

    @classmethod
    def load(cls, path: str | Path) -> Table:
        """Read a table file.  Raises MalformedFileError with the line, or OSError where it cannot be read."""
        path = Path(path)
        if path.stat().st_size > _LARGEST_FILE:
            raise MalformedFileError(path, f"expected a table of at most {_LARGEST_FILE} bytes")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise MalformedFileError(path, f"expected UTF-8 text: {error}") from None
        except json.JSONDecodeError as error:
            raise MalformedFileError(path, f"expected JSON: {error.msg}", error.lineno) from None
        except RecursionError:
            raise MalformedFileError(path, "expected a table, found JSON nested without end") from None
        if not isinstance(data, dict) or data.get("schema") != _SCHEMA:
            raise MalformedFileError(path, f'expected an object with "schema": "{_SCHEMA}"')
        try:
            environment = Environment.from_dict(data["environment"])
        except (AttnbenchError, KeyError, TypeError, ValueError) as error:
            raise MalformedFileError(path, f"expected an environment: {error}") from None
        entries = []
        if not isinstance(data.get("entries"), list):
            raise MalformedFileError(path, "expected a list of entries")
        for number, each in enumerate(data["entries"]):
            try:
                entries.append(Entry.from_dict(each))
            except (AttnbenchError, KeyError, TypeError, ValueError) as error:
                raise MalformedFileError(path, f"expected an entry at entries[{number}]: {error}") from None
        return cls.from_entries(environment, entries)

    def save(self, path: str | Path) -> None:
        """Write the table, one entry a line in a fixed order, replacing the file in one step.  Raises OutputError."""
        lines = sorted(json.dumps(entry.to_dict(), allow_nan=False) for entry in self.entries.values())
        head = json.dumps({"schema": _SCHEMA, "environment": self.environment.to_dict()}, indent=1)
        _replace(Path(path), head[:-2] + ',\n "entries": [\n' + ",\n".join(lines) + "\n]}\n")

    def merged(self, newer: Table) -> Table:
        """Both tables' entries, the newer one's where both have one."""
        return Table(newer.environment, {**self.entries, **newer.entries})

    def at(self, spec: AttentionSpec) -> dict[Plan, Entry]:
        """The entries measured at this very spec."""
        return {plan: entry for (each, plan), entry in self.entries.items() if each == spec}

    def to_text(self) -> str:
        """The entries for a terminal, fastest first within a spec."""
        from tabulate import tabulate  # only people who look at tables need it

        def rank(entry: Entry) -> tuple[str, float, str]:
            return str(entry.spec), math.inf if entry.time_ms is None else entry.time_ms, str(entry.plan)

        rows = [
            [
                str(entry.spec),
                str(entry.plan),
                entry.status,
                "" if entry.time_ms is None else f"{entry.time_ms:.3f}",
                ", ".join(f"{family} {error:.2g}" for family, error in sorted(entry.errors.items())),
            ]
            for entry in sorted(self.entries.values(), key=rank)
            if entry.usable
        ]
        head = f"{self.environment.device_name}, torch {self.environment.torch}: {len(rows)} measured plans"
        return head + "\n\n" + tabulate(rows, ["spec", "plan", "status", "call ms", "errors"], disable_numparse=True)


def _replace(path: Path, text: str) -> None:
    """Write beside the file and rename over it, so that a reader sees the old table or the new one, never half."""
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except OSError as error:
        if scratch is not None and os.path.exists(scratch):
            os.unlink(scratch)
        raise OutputError(f"cannot write the table {path}: {error.strerror}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 2000:
        raise ValueError(f"{value!r:.60} is no short text")
    return value


def _time(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r:.60} is no time in milliseconds")
    return float(value)


def _error(value: Any) -> float:
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r:.60} is no error")
    return float(value)
