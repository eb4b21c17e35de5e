"""Process-wide state: what is open, what was found before, and how it is forgotten.

A slot or a cache belongs to the module that fills it and knows its type.  All of them are made of these two classes, so
that there is one way to open, to keep and to forget.
"""

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
    """What is open in this process (guards, a freeze, an autotune), in all of its threads.

    ``active`` is the one that was opened last, None when nothing is open.  Reading it loads no module and takes no
    lock.  Hold ``lock`` from looking at ``opened`` to opening.
    """

    def __init__(self) -> None:
        self.active: _Content | None = None
        self.opened: list[_Content] = []
        self.lock = threading.RLock()

    def open(self, content: _Content) -> None:
        """Make it the active one."""
        with self.lock:
            self.opened.append(content)
            self.active = content

    def close(self, content: _Content) -> None:
        """Take it out, wherever it stands; nothing happens if it is not open."""
        with self.lock:
            if content in self.opened:
                self.opened.remove(content)
            self.active = self.opened[-1] if self.opened else None


class Cache(Generic[_Key, _Value]):
    """Values by key, the newest ``size`` of them, until they are forgotten.

    ``entries`` may be read without a lock.  A cache is made when its module is imported, and so after those that its
    values rest on.  ``state.forget`` leaves a ``lasting`` one as it is.
    """

    def __init__(self, size: int = _LARGEST, *, lasting: bool = False) -> None:
        self.entries: dict[_Key, _Value] = {}
        self._size = size
        self._lock = threading.Lock()
        if not lasting:
            _caches.append(self)

    def of(self, key: _Key, make: Callable[..., _Value], *arguments: Any) -> _Value:
        """The value under the key, made with the arguments if there is none: of several threads the first one's."""
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
    """Choose anew, and compile anew, at the next call; backwards that are still to come keep their plans."""
    global era
    for cache in _caches:  # in the order of the layers: an answer that rests on forgotten facts must not stay
        cache.forget()
    era = str(int(era) + 1)
