"""The tables that come with attnbench: measured by its authors, one file for each device model."""

from __future__ import annotations

import re
from pathlib import Path

from .environment import Environment

__all__ = ["file_name", "shipped_table_path", "shipped_tables"]

_FOLDER = Path(__file__).parent


def file_name(environment: Environment) -> str:
    """What a table of this device is called: ``nvidia-h200.json``."""
    slug = re.sub(r"[^a-z0-9]+", "-", environment.device_name.lower()).strip("-")[:80]
    return f"{slug or 'device'}.json"


def shipped_table_path(environment: Environment) -> Path | None:
    """The table that attnbench ships for the device, or None.  There are none for CPUs, and nothing is looked for."""
    path = _FOLDER / file_name(environment)
    return path if environment.device_type == "cuda" and path.is_file() else None


def shipped_tables() -> list[Path]:
    """Every table that attnbench ships, by name."""
    return sorted(_FOLDER.glob("*.json"))
