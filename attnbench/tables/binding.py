"""Which entries of a table may be used in an environment, and which differences to report.

``Environment.differences`` says whether two measurements may be compared, for which every version counts; this says,
plan by plan, whether a measurement is still the best guess here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..kernels.plan import backend_of
from ..kernels.registry import Registry
from ..text.printable import printable
from .environment import Environment, text_of
from .table import Table

__all__ = ["Binding", "release_of"]

# What may differ, and is said where both sides know it.  Which GPU of its model it was, and
# which commit of attnbench, differ nearly always and say nothing.
_SOFT = (
    "driver", "cuda", "torch", "cudnn", "triton", "attnbench", "clock_mhz", "power_cap_w", "memory_bytes",
    "device_count", "threads", "cpu", "python", "platform",
)  # fmt: skip
# A final release, as 2.20.1, 0.4.2.post2 or 2.11.0+cu130.
_RELEASE = re.compile(r"(\d{1,9})\.(\d{1,9})(\.\d{1,9})*(\.post\d{1,9})?(\+.*)?")
_CUDNN = re.compile(r"\b9\d{4}\b")  # 91900 is 9.19.0


@dataclass(frozen=True)
class Binding:
    """How a table relates to the environment in which it is used.

    ``refused`` says why none of it may be used (another device), ``dropped`` maps a backend to why its entries may not
    (another version), ``soft`` are differences to report that do not matter.
    """

    refused: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    soft: tuple[str, ...] = ()

    @classmethod
    def between(cls, table: Table, here: Environment, known: Registry) -> Binding:
        """Compare the table's environment with ``here``, whose backends are those of ``known``.

        Another device (type, model, compute capability; on a CPU the number of threads too) refuses the table.  A
        backend's entries depend on its release and origin, and on the releases of the libraries that it is built on
        (``release_of``).  Entries of a backend with an unknown version are dropped.
        """
        there = table.environment
        names = ["device_type", "device_name", "capability", *(["threads"] if here.device_type == "cpu" else [])]
        refused = tuple(_differing(names, there, here))
        if refused:
            return cls(refused)
        dropped: dict[str, str] = {}
        soft = list(_differing([name for name in _SOFT if name not in names], there, here, known=True))
        for backend in sorted({backend_of(kernel) for _, plan in table.entries for kernel in plan.kernels}):
            if backend in here.backends:
                built_on = known.backends[backend].built_on if backend in known.backends else ()
                hard, gentle = _of_backend(backend, built_on, there, here)
                soft += gentle
                if hard:
                    dropped[backend] = hard[0]
        return cls((), dropped, tuple(dict.fromkeys(soft)))

    def usable(self, table: Table) -> Table:
        """The table without the entries that may not be used."""
        if self.refused:
            return replace(table, entries={})
        kept = {
            (spec, plan): entry
            for (spec, plan), entry in table.entries.items()
            if not any(backend_of(kernel) in self.dropped for kernel in plan.kernels)
        }
        return replace(table, entries=kept)


def release_of(version: str) -> str:
    """The release within which kernels count as the same: ``2.20`` of ``2.20.1+cu130``; pre-releases are kept whole."""
    match = _RELEASE.fullmatch(version)
    return f"{int(match[1])}.{int(match[2])}" if match else version


def _of_backend(
    backend: str, built_on: tuple[str, ...], there: Environment, here: Environment
) -> tuple[list[str], list[str]]:
    """(hard, soft) differences of a backend that is installed here."""
    before, now = there.backends.get(backend), here.backends[backend]
    if before is None:
        return [f"measured with an unknown version of {backend}, here is {printable(now)}"], []
    hard, soft = [], []
    pairs: list[tuple[str, str | None, str | None]] = [(backend, before, now)]
    pairs += [(name, getattr(there, name), getattr(here, name)) for name in built_on]
    for name, old, new in pairs:
        if _release(old) != _release(new):
            hard.append(f"measured with {name} {text_of(old)}, here is {text_of(new)}")
        elif old != new and name == backend and _plain(before) != there.torch:  # what is torch's is said of torch
            soft.append(f"{name} was {text_of(old)}, is {text_of(new)}")
    came, comes = there.origins.get(backend), here.origins.get(backend)
    if came is not None and comes is not None and _unnumbered(came) != _unnumbered(comes):
        hard.append(f"measured with {backend} from {text_of(came)}, here it comes from {text_of(comes)}")
    return hard, soft


def _differing(names: list[str], there: Environment, here: Environment, known: bool = False) -> Iterator[str]:
    """A sentence for each fact that differs; with ``known``, of those that both sides know."""
    for name in names:
        old, new = getattr(there, name), getattr(here, name)
        if old != new and not (known and None in (old, new)):
            yield f"{name} was {text_of(old)}, is {text_of(new)}"


def _release(version: str | None) -> str | None:
    return None if version is None else release_of(version)


def _unnumbered(origin: str) -> str:
    """The origin with releases in place of versions: ``transformer-engine 2.20 on cuDNN 9.19``."""
    named = _CUDNN.sub(lambda found: f"{found[0][0]}.{int(found[0][1:3])}", origin)
    return " ".join(release_of(word) for word in named.split())


def _plain(version: str) -> str:
    return version.partition("+")[0]
