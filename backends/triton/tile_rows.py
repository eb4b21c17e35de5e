"""The kernel that writes the table of ``tile_map``, and how other kernels read it."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["DRAWN", "ENDED", "ROW", "scale_of_keys", "write_rows"]

ROW = tl.constexpr(8)  # numbers of a tile: batch entry, first row, start and length of queries and of keys, two slots
# Beside the number of tiles, in the row before the first: how many programs drew and have ended, while a kernel runs.
DRAWN, ENDED = tl.constexpr(1), tl.constexpr(2)
_LANES = tl.constexpr(256)  # sequences looked at together


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
def write_rows(
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
        tl.store(table + DRAWN, 0)
        tl.store(table + ENDED, 0)
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
