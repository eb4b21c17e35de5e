"""Which block of tokens and which head a program of the backward has."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

__all__ = ["AT_ONCE", "block_and_head", "in_order", "query_heads"]

AT_ONCE = tl.constexpr(128)  # programs, each with a Hopper multiprocessor to itself: an H100 and an H200 have 132


@triton.jit
def block_and_head():
    """Of a grid (blocks, heads), whose programs start in the order of the first axis.

    Under a causal mask the first blocks take the longest.  If heads took turns, each would begin with those, and the
    GPU would wait for the last head's; of all heads together the L2 holds too little.  So of as many heads as run at
    once anyway, a section, the first blocks start first.
    """
    blocks, heads = tl.num_programs(0), tl.num_programs(1)
    number = tl.program_id(1) * blocks + tl.program_id(0)
    section = tl.maximum(AT_ONCE // blocks, 1)
    before = number // (section * blocks) * section
    width = tl.minimum(section, heads - before)
    number -= before * blocks
    return number // width, before + number % width


@triton.jit
def query_heads(share, group: tl.constexpr, shares: tl.constexpr):
    """The first query head of a share, and how many it has.

    A key head's ``group`` query heads are divided into ``shares`` of one size; the last may be smaller.  Kernels in
    Gluon, which has functions of its own, call this too, so it computes with operators alone.
    """
    each: tl.constexpr = (group + shares - 1) // shares
    lacking: tl.constexpr = each * shares - group
    first, count = share * each, each
    if lacking > 0:
        first -= share // shares * lacking
        count = each - (share % shares + 1) // shares * lacking
    return first, count


def in_order(blocks: int, heads: int) -> Iterator[int]:
    """The block of each program, in the order in which they start."""
    section = max(AT_ONCE.value // blocks, 1)
    for before in range(0, heads, section):
        for block in range(blocks):
            yield from [block] * min(section, heads - before)
