"""Which tokens each program has where sequences have lengths of their own: a table that a small kernel writes.

Nothing is read back: a grid has as many programs as there can be tiles, and those beyond the real number end at once.
The longest sequences come first, so that the last programs to start have little to do.

A kernel reads whole tiles through TMA, and so may read what lies behind a sequence.  Where numbers that are not its own
would do harm (0 · NaN is NaN), it reads copies in which every sequence has a slot: it begins at a multiple of some
number of tokens, with zeros behind its end.  The table says where.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attnbench.graph_pools import current_stream, recording
from attnbench.problem.lengths import Lengths

from .launching import Launches, on
from .tile_rows import ROW, write_rows

__all__ = ["Slots", "Tiled", "capacity", "one_sided", "sequences_of", "tile_map"]

_MOST = 64  # tables kept of one tensor of lengths

Slots = tuple[int, int]  # tokens that the slots of queries and of keys begin at multiples of


class Tiled(NamedTuple):
    """What a table depends on besides the lengths.

    Tiles have ``block`` tokens of one side; with ``whole`` they cover that side's slots and not only its sequences.
    ``stored`` are the tokens of a batch entry in the tensors of queries and of keys.
    """

    side: Literal["q", "kv"]
    block: int
    slots: Slots
    stored: tuple[int, int]
    whole: bool = False

    def capacity(self, sequences: int, batch: int) -> int:
        """How many tiles there are at most."""
        side = 0 if self.side == "q" else 1
        step = self.slots[side] if self.whole else self.block
        return capacity(sequences, batch, self.stored[side], step) * (step // self.block)


def one_sided(lengths: Lengths, side: Literal["q", "kv"]) -> Lengths:
    """The lengths with one side's as both sides'."""
    own, longest = (lengths.q, lengths.longest_q) if side == "q" else (lengths.kv, lengths.longest_kv)
    return Lengths(lengths.batch, own, own, longest, longest)


class _Kept(NamedTuple):
    versions: tuple[int, int]
    other: weakref.ref[Tensor] | None
    tables: dict[Any, Tensor]


_kept: MutableMapping[Tensor, _Kept] = WeakTensorKeyDictionary()
_TABLES = Launches(write_rows)


def sequences_of(lengths: Lengths, batch: int) -> int:
    """How many there are, in a batch of so many entries."""
    if lengths.batch != "packed":
        return batch
    assert lengths.q is not None, "a packed batch has cumulative lengths"
    return lengths.q.shape[0] - 1


def capacity(sequences: int, batch: int, stored: int, block: int) -> int:
    """How many blocks the sequences of one side have at most, each at least one: ``batch`` entries of ``stored``."""
    return batch * (stored // block) + sequences


def tile_map(lengths: Lengths, batch: int, tiled: Tiled, device: torch.device) -> Tensor:
    """(1 + capacity, ROW) int32: the number of tiles, then a row for each, of which those beyond are undefined.

    Kept as long as the lengths live and are not changed in place, except while a CUDA graph is recorded: a replay
    makes it of the lengths that are there then.  Each stream has its own: while a kernel runs, it counts drawn tiles in
    the table's first row.
    """
    if recording():
        return _build_table(lengths, batch, tiled, device)
    first, other = lengths.q if lengths.q is not None else lengths.kv, lengths.kv
    if first is None:  # all rows are full on this side
        return _build_table(lengths, batch, tiled, device)
    if first.is_inference() or (other is not None and other.is_inference()):  # no version tells of changes
        return _build_table(lengths, batch, tiled, device)
    versions = first._version, -1 if other is None else other._version
    kept = _kept.get(first)
    if kept is None or kept.versions != versions or (kept.other and kept.other()) is not other:
        kept = _kept[first] = _Kept(versions, None if other is None else weakref.ref(other), {})
    key = lengths.batch, lengths.q is None, batch, tiled, current_stream(device)
    table = kept.tables.get(key)
    if table is None:
        if len(kept.tables) >= _MOST:
            kept.tables.clear()
        table = kept.tables[key] = _build_table(lengths, batch, tiled, device)
    return table


def _build_table(lengths: Lengths, batch: int, tiled: Tiled, device: torch.device) -> Tensor:
    count = sequences_of(lengths, batch)
    bound = tiled.capacity(count, batch)
    table = torch.empty(bound + 1, ROW.value, dtype=torch.int32, device=device)
    memory = lengths.q, lengths.kv, table
    constants = (
        count, *tiled.stored, bound,
        tiled.block, *tiled.slots, lengths.batch == "packed", lengths.batch == "left-padded",
        tiled.side == "kv", tiled.whole,
    )  # fmt: skip
    dtypes = lengths.q is None, lengths.kv is None
    with on(device):
        _TABLES((count, 1, 1), constants, dtypes, num_warps=4).on(device, memory)
    return table
