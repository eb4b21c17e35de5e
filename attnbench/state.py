"""Process-wide state: slots for what is open and caches for what was found, each in the module that fills it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["Cache", "Slot", "forget"]

_Content = TypeVar("_Content")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_LARGEST = 4096  # entries, of about a KiB each for a question: more than a program asks that does not ask ever new ones


class Slot(Generic[_Content]):
    """What is open in this process (guards, a freeze, an autotune), for all threads.

    ``active`` is the one opened last, None if nothing is open; reading it takes no lock.  Hold ``lock`` while checking
    ``opened`` and opening.
    """

    def __init__(self) -> None:
        self.active: _Content | None = None
        self.opened: list[_Content] = []
        self.lock = threading.RLock()

    def open(self, content: _Content) -> None:
        """Make this the active one."""
        with self.lock:
            self.opened.append(content)
            self.active = content

    def close(self, content: _Content) -> None:
        """Remove it, wherever it is in the order; does nothing if it is not open."""
        with self.lock:
            if content in self.opened:
                self.opened.remove(content)
            self.active = self.opened[-1] if self.opened else None


class Cache(Generic[_Key, _Value]):
    """The newest ``size`` values by key, until ``state.forget``, which keeps ``lasting`` caches.

    ``entries`` may be read without a lock.  A cache is made on import, hence after those that its values depend on.
    """

    def __init__(self, size: int = _LARGEST, *, lasting: bool = False) -> None:
        self.entries: dict[_Key, _Value] = {}
        self._size = size
        self._lock = threading.Lock()
        if not lasting:
            _caches.append(self)

    def of(self, key: _Key, make: Callable[..., _Value], *arguments: Any) -> _Value:
        """The value under the key, made from the arguments if it is missing; if several threads make it, the first one
        counts.
        """
        entries = self.entries  # a value that is made across a ``forget`` may be old: it is left behind with these
        found = entries.get(key)
        if found is not None:
            return found
        value = make(*arguments)
        with self._lock:
            if key not in entries and len(entries) >= self._size:
                del entries[next(iter(entries))]
            return entries.setdefault(key, value)

    def forget(self) -> None:
        """Drop all entries."""
        self.entries = {}


_caches: list[Cache[Any, Any]] = []
era = "0"  # a constant of every compiled graph, guarded: what was compiled before a ``forget`` keeps its own


def forget() -> None:
    """Choose and compile anew at the next call; backwards of earlier calls keep their plans."""
    global era
    for cache in _caches:  # in the order of the layers: an answer that rests on forgotten facts must not stay
        cache.forget()
    era = str(int(era) + 1)
