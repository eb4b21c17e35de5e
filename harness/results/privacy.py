"""Find what a shared file must not tell: paths, addresses, and names of users and hosts."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

__all__ = ["local_names", "private_part"]

_PATH = re.compile(r"(?<![\w.)\]/\\])(?:[A-Za-z]:|~\w*|\.{1,2})?(?:[/\\]+[\w.@+~-]+)+")
_ADDRESS = re.compile(
    r"""\w+://\S+                                                             # URL
    | [\w.+-]+@[\w-][\w.-]*                                                   # mail, user@host
    | \b(?:10|127|172|192)(?:\.\d{1,3}){3}\b                                  # a private network's or this machine's
    | \b(?:[\w-]+\.)+(?:com|corp|edu|internal|intranet|lan|local|net|org)\b   # full name of a host
    """,
    re.VERBOSE | re.IGNORECASE,
)
# Accounts and hosts of images and services: they identify no person, and some are words of error messages.
_ANYBODY = {"admin", "gpu", "jovyan", "linux", "localhost", "nobody", "nvidia", "root", "runner", "ubuntu", "user"}
_SHORTEST_NAME = 3


def local_names() -> frozenset[str]:
    """The names of this user and this host that would identify the machine; empty if the system has none."""
    host = socket.gethostname()
    found = {host, host.partition(".")[0]}
    with suppress(KeyError, OSError, RuntimeError):  # a container runs with a number that no account has
        found |= {getpass.getuser(), Path.home().name}
    return frozenset(name for name in found if len(name) >= _SHORTEST_NAME and name.lower() not in _ANYBODY)


def private_part(text: str, names: Collection[str] = ()) -> str | None:
    """The first path, address or one of ``names`` (whole words, in any case) in the text; None if there is none.

    A host or a user that is not among ``names`` is found only as part of a path or an address.
    """
    for form in (_PATH, _ADDRESS):
        if found := form.search(text):
            return found[0]
    for name in sorted(names):
        if found := re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.IGNORECASE):
            return found[0]
    return None
