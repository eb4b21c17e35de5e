"""The table measured on this user's own device: where it lies, how it grows, when it may be used."""

from __future__ import annotations

import fcntl
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from platformdirs import user_cache_path

from .environment import Environment
from .errors import AttnbenchWarning, MalformedFileError, OutputError
from .registry import registry
from .table import Table

__all__ = ["forget", "update_user_table", "user_table", "user_table_path"]


def user_table_path(environment: Environment) -> Path:
    """Where the table measured on this user's device lies: one file for each device model, in the cache folder."""
    slug = re.sub(r"[^a-z0-9]+", "-", environment.device_name.lower()).strip("-")[:80]
    return user_cache_path("attnbench") / "tables" / f"{slug or 'device'}.json"


def update_user_table(table: Table) -> Path:
    """Merge the table into the user's own and return its path; several processes may do so at once.

    Entries of another environment (hard difference) or an unreadable file are replaced, never mixed.
    Raises OutputError where the folder cannot be written.
    """
    path = user_table_path(table.environment)
    with _locked(path):
        try:
            before = Table.load(path)
        except (OSError, MalformedFileError):
            before = None
        if before is not None and not before.environment.differences(table.environment)[0]:
            table = before.merged(table)
        table.save(path)
    forget()
    return path


@cache
def user_table(device: torch.device) -> tuple[Table | None, str | None]:
    """(the user's table for this device, what there is to say of it), read once a process.

    None where there is no table that may be used.  A damaged file and one from another
    environment (hard difference) are misses with a warning; a soft difference is used and said.
    """
    here = Environment.detect(device, registry())
    path = user_table_path(here)
    try:
        table = Table.load(path)
    except FileNotFoundError:
        return None, None
    except (OSError, MalformedFileError) as error:
        return None, _warned(f"the table cannot be used: {error}")
    hard, soft = table.environment.differences(here)
    if hard:
        return None, _warned(f"the table {path} is not used, run `attnbench sweep` again: {'; '.join(hard)}")
    return table, f"measured where {'; '.join(soft)}" if soft else None


def _warned(message: str) -> str:
    warnings.warn(message, AttnbenchWarning, stacklevel=2)
    return message


def forget() -> None:
    """Read the table again when it is next needed."""
    user_table.cache_clear()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_suffix(".lock"), "w")  # noqa: SIM115  closed below, outside the try
    except OSError as error:
        raise OutputError(f"cannot write the table {path}: {error.strerror}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
