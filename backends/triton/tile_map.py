"""Which tokens each program has where sequences have lengths of their own: a table that a small kernel writes.

Nothing is read back: a grid has as many programs as there can be tiles, and those beyond the real number end at once.
The longest sequences come first, so that the last programs to start have little to do.

A kernel reads whole tiles through TMA, and so may read what lies behind a sequence.  Where numbers that are not its own
would do harm (0 · NaN is NaN), it reads copies in which every sequence has a slot: it begins at a multiple of some
number of tokens, with zeros behind its end.  The table says where.
"""

from __future__ import annotations

import weakref
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attnbench.graph_pools import current_stream, recording
from attnbench.problem.lengths import Lengths

from .launching import Launches, addresses, on

__all__ = ["ROW", "Slots", "Tiled", "capacity", "one_sided", "scale_of_keys", "sequences_of", "tile_map"]

ROW = tl.constexpr(8)  # numbers of a tile: batch entry, first row, start and length of queries and of keys, two slots
_LANES = tl.constexpr(256)  # sequences looked at together
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


_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


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
    makes it of the lengths that are there then.
    """
    if recording():
        return _made(lengths, batch, tiled, device)
    first, other = lengths.q if lengths.q is not None else lengths.kv, lengths.kv
    if first is None:  # all rows are full on this side
        return _made(lengths, batch, tiled, device)
    if first.is_inference() or (other is not None and other.is_inference()):  # no version tells of changes
        return _made(lengths, batch, tiled, device)
    versions = first._version, -1 if other is None else other._version
    kept = _kept.get(first)
    if kept is None or kept.versions != versions or (kept.other and kept.other()) is not other:
        kept = _kept[first] = _Kept(versions, None if other is None else weakref.ref(other), {})
    key = lengths.batch, lengths.q is None, batch, tiled, current_stream(device)
    table = kept.tables.get(key)
    if table is None:
        if len(kept.tables) >= _MOST:
            kept.tables.clear()
        table = kept.tables[key] = _made(lengths, batch, tiled, device)
    return table


def _made(lengths: Lengths, batch: int, tiled: Tiled, device: torch.device) -> Tensor:
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
        _TABLES((count, 1, 1), constants, dtypes, num_warps=4)(memory, addresses(memory))
    return table


@triton.jit
def _extent(lengths, sequence, there, stored, packed: tl.constexpr, left: tl.constexpr):
    """Where sequences start in their batch entry, and their lengths; 0 for those that are not ``there``."""
    if packed:
        start = tl.load(lengths + sequence, mask=there, other=0)
        size = tl.load(lengths + sequence + 1, mask=there, other=0) - start
    elif lengths is None:
        size = tl.where(there, stored, 0)
        start = size * 0
    else:
        size = tl.load(lengths + sequence, mask=there, other=0)
        start = tl.where(there, stored - size, 0) if left else size * 0
    return start, size


@triton.jit
def _tiles(size, block: tl.constexpr, slot: tl.constexpr, whole: tl.constexpr):
    """How many tiles a sequence has."""
    return tl.maximum(tl.cdiv(size, slot), 1) * (slot // block) if whole else tl.cdiv(size, block)


@triton.jit(do_not_specialize=["count", "stored_q", "stored_kv", "bound"])
def _write_table(
    q, kv, table, count, stored_q, stored_kv, bound,
    block: tl.constexpr, slot_q: tl.constexpr, slot_kv: tl.constexpr, packed: tl.constexpr, left: tl.constexpr,
    over_keys: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """The rows of one sequence's tiles; of queries the last, which under a causal mask see the most keys, come first.

    Each program goes through all lengths: the sequences before its own in memory, and those that come first.
    """
    own = tl.program_id(0)
    start_q, size_q = _extent(q, own, own >= 0, stored_q, packed, left)
    start_kv, size_kv = _extent(kv, own, own >= 0, stored_kv, packed, left)
    size = size_kv if over_keys else size_q
    slot: tl.constexpr = slot_kv if over_keys else slot_q
    lane = tl.arange(0, _LANES)
    before, total = tl.zeros([_LANES], tl.int32), tl.zeros([_LANES], tl.int32)
    first_q, first_kv = tl.zeros([_LANES], tl.int32), tl.zeros([_LANES], tl.int32)
    begin = 0
    while begin < count:
        each = begin + lane
        there = each < count
        each_q = _extent(q, each, there, stored_q, packed, left)[1]
        each_kv = _extent(kv, each, there, stored_kv, packed, left)[1]
        other = each_kv if over_keys else each_q
        tiles = tl.where(there, _tiles(other, block, slot, whole), 0)
        total += tiles
        before += tl.where((other > size) | ((other == size) & (each < own)), tiles, 0)
        earlier = each < own
        first_q += tl.where(earlier, tl.maximum(tl.cdiv(each_q, slot_q), 1) * slot_q, 0)
        first_kv += tl.where(earlier, tl.maximum(tl.cdiv(each_kv, slot_kv), 1) * slot_kv, 0)
        begin += _LANES
    if own == 0:
        tl.store(table, tl.sum(total, 0))
    tiles_here = _tiles(size, block, slot, whole)
    first_row = tl.sum(before, 0)
    place_q, place_kv = tl.sum(first_q, 0), tl.sum(first_kv, 0)
    begin = 0
    while begin < tiles_here:
        step = begin + lane
        mask = (step < tiles_here) & (first_row + step < bound)
        row = table + (1 + first_row + step) * ROW
        tile = step if over_keys else tiles_here - 1 - step
        tl.store(row, own * 0 if packed else own, mask)
        tl.store(row + 1, tile * block, mask)
        tl.store(row + 2, start_q, mask)
        tl.store(row + 3, size_q, mask)
        tl.store(row + 4, start_kv, mask)
        tl.store(row + 5, size_kv, mask)
        tl.store(row + 6, place_q, mask)
        tl.store(row + 7, place_kv, mask)
        begin += _LANES


@triton.jit
def scale_of_keys(place, seqlen_kv, tiles):
    """What all keys of a head, or of a sequence's, share; 1 where there is none.  ``tiles``: a table, or None."""
    return tl.load(place) if tiles is None else tl.load(place, mask=seqlen_kv > 0, other=1.0)


_TABLES = Launches(_write_table)
