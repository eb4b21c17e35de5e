"""Which tiles a program of the forward's Hopper kernel computes, in what order, and which keys each sees (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile_rows import ROW

__all__ = ["after", "blocks_of", "sequence_at", "span_of_keys", "tile_at"]

_ROW = gl.constexpr(ROW.value)


@gluon.jit
def blocks_of(seqlen_q, tiles, block_m: gl.constexpr):
    """How many blocks of queries a head has: those of all sequences in the table, where there is one."""
    return gl.cdiv(seqlen_q, block_m) if tiles is None else gl.load(tiles)


@gluon.jit
def tile_at(place, blocks, programs, section, backwards: gl.constexpr):
    """(batch · heads + head, block of queries) at ``place``: even rounds of programs go up, odd ones down.

    ``backwards``: a head's last blocks come first, as the table of ``tile_map`` has them anyway.
    """
    first, programs_at_once = gl.program_id(0), gl.num_programs(0)
    before = place - first
    whole = before + programs_at_once <= blocks * programs
    back = whole & ((before // programs_at_once) % 2 == 1)
    place = gl.where(back, before + programs_at_once - 1 - first, place)
    before = place // (section * blocks) * section
    width = gl.minimum(section, programs - before)
    place -= before * blocks
    block = place // width
    if backwards:  # the last queries see the most keys, and start first
        block = blocks - 1 - block
    return before + place % width, block


@gluon.jit
def sequence_at(tiles, block, low, high, aligned: gl.constexpr):
    """A row of the table, and its sequence's own ``low`` and ``high``.

    (batch entry, first query, where its queries start and their number, the same of its keys, V's slot, low, high).
    """
    row = tiles + (1 + block) * _ROW
    queries, keys = gl.load(row + 3), gl.load(row + 5)
    if aligned:
        low, high = low + keys - queries, high + keys - queries
    return (
        gl.load(row), gl.load(row + 1), gl.load(row + 2), queries, gl.load(row + 4), keys, gl.load(row + 7), low, high
    )  # fmt: skip


@gluon.jit
def span_of_keys(
    top, seqlen_q, seqlen_kv, low, high,
    block_m: gl.constexpr, block_n: gl.constexpr, left: gl.constexpr, right: gl.constexpr,
):  # fmt: skip
    """(first, whole, parted, blocks): where a tile's keys start, where all queries see all keys, how many blocks.

    There is one block at least, in which no query need see a key.
    """
    bottom = gl.minimum(top + block_m, seqlen_q) - 1
    first, whole = 0, 0
    last, parted = seqlen_kv, seqlen_kv // block_n * block_n
    if right:
        last = gl.minimum(last, gl.maximum(bottom + high + 1, 0))
        parted = gl.minimum(parted, gl.maximum(top + high + 1, 0) // block_n * block_n)
    if left:
        first = gl.minimum(gl.maximum(top + low, 0), last) // block_n * block_n
        whole = gl.minimum(gl.cdiv(gl.maximum(bottom + low, 0), block_n) * block_n, gl.cdiv(last, block_n) * block_n)
        parted = gl.maximum(parted, whole)
    return first, whole, parted, gl.maximum(gl.cdiv(last - first, block_n), 1)


@gluon.jit
def after(slot, phase, stages: gl.constexpr):
    """The next slot of a ring, and the phase of its barriers."""
    last = slot == stages - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)
