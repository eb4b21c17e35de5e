"""Decide which calls to keep if not all fit: some of every kind, layer and step, not the first ones."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Reservoir"]

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class _Place(Generic[_T]):
    """An item with the values that decide how long it stays."""

    item: _T
    kind: str
    source: str
    size: int
    rank: int


class Reservoir(Generic[_T]):
    """At most ``most`` items of at most ``max_bytes`` together, spread over kinds, each kind's sources, and time.

    To make room, an item is removed from the kind with the most items, there from the source with the most, and there
    the item with the highest rank.  Ranks are hashes of running numbers: each of n equal items is as likely to stay,
    and the same program keeps the same items.
    """

    def __init__(self, max_bytes: int, most: int) -> None:
        self.max_bytes, self.most = max_bytes, most
        self._places: list[_Place[_T]] = []
        self._offered = 0

    @property
    def items(self) -> list[_T]:
        """The kept items, in the order in which they were offered."""
        return [place.item for place in self._places]

    @property
    def held(self) -> int:
        """The bytes of the kept items."""
        return sum(place.size for place in self._places)

    def offer(self, item: _T, *, kind: str, source: str, size: int) -> list[_T]:
        """Keep the item if it fits; returns the items that do not stay: those that made room for it, or itself."""
        self._offered += 1
        new = _Place(item, kind, source, size, _rank(str(self._offered)))
        places, gone = [*self._places, new], []
        held = self.held + size
        while held > self.max_bytes or len(places) > self.most:
            last = _first_to_go(places)
            if last is new:  # it then displaces nothing
                return [item]
            places.remove(last)
            gone.append(last.item)
            held -= last.size
        self._places = places
        return gone

    def remove(self, item: _T) -> None:
        """Remove a kept item."""
        self._places = [place for place in self._places if place.item is not item]


def _first_to_go(places: list[_Place[_T]]) -> _Place[_T]:
    kinds = Counter(place.kind for place in places)
    kind = max(kinds, key=lambda each: (kinds[each], _rank(each)))
    sources = Counter(place.source for place in places if place.kind == kind)
    source = max(sources, key=lambda each: (sources[each], _rank(each)))
    return max((place for place in places if (place.kind, place.source) == (kind, source)), key=lambda each: each.rank)


def _rank(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
