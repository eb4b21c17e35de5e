"""The default folders of a user: the cache folder for tables, the data folder for results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from platformdirs import user_cache_path, user_data_path

from ..errors import OutputError

__all__ = ["cache_folder", "data_folder"]


def cache_folder() -> Path:
    """The folder of what can be measured again; it may not exist yet.  Raises OutputError without a home folder."""
    return _user_folder(user_cache_path, "XDG_CACHE_HOME")


def data_folder() -> Path:
    """The folder of results; it may not exist yet.  Raises OutputError without a home folder."""
    return _user_folder(user_data_path, "XDG_DATA_HOME")


def _user_folder(ask: Callable[[str], Path], variable: str) -> Path:
    try:
        path = ask("attnbench")
    except RuntimeError:  # platformdirs knows no home folder; its older versions answer ~
        path = Path("~")
    if path.parts[:1] == ("~",):
        raise OutputError(f"this user has no home folder to write in; set HOME or {variable}")
    return path
