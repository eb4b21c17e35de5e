"""Which tiles a program of the forward's Hopper kernel computes, in what order, and which keys each sees (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["after", "span_of_keys", "tile_at"]


@gluon.jit
def tile_at(place, seqlen_q, programs, section, block_m: gl.constexpr, right: gl.constexpr):
    """(batch · heads + head, first query) of the tile at ``place``: even rounds of programs go up, odd ones down."""
    first, programs_at_once = gl.program_id(0), gl.num_programs(0)
    blocks = gl.cdiv(seqlen_q, block_m)
    before = place - first
    whole = before + programs_at_once <= blocks * programs
    back = whole & ((before // programs_at_once) % 2 == 1)
    place = gl.where(back, before + programs_at_once - 1 - first, place)
    before = place // (section * blocks) * section
    width = gl.minimum(section, programs - before)
    place -= before * blocks
    block = place // width
    if right:  # the last queries see the most keys, and start first
        block = blocks - 1 - block
    return before + place % width, block * block_m


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
