"""How many programs share a key head's query heads, where key heads are so few that a GPU would wait for the longest.

A program has a block of keys and, one after another, the query heads of their key head.  Under a causal mask the first
keys' program takes twice as long as the mean, with a window the last ones' take less.  With few key heads there are too
few programs for a GPU to even that out.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

from torch import Tensor

from ..launching import KEPT
from .operands import Layout
from .place import AT_ONCE, in_order

__all__ = ["shares_of", "summed"]

# In queries, each with a program's block of keys, which is what a program's time is measured in here.
_START = 256  # of a program, with what it loads and writes at its end
_WRITE = 512  # more where the gradients of shares are written, to be read again
_SUMS = 2048  # the kernels that sum them
_EVEN = 4 * AT_ONCE.value  # so many programs leave little to even out
_MOST = 8 * AT_ONCE.value  # programs of a split: more take memory, and the host's time here
_ENOUGH = 1.05  # times the shortest time


@lru_cache(maxsize=KEPT)
def shares_of(layout: Layout, block: int) -> int:
    """The fewest shares of nearly the shortest time, for a kernel whose programs have ``block`` keys each.

    Sequences of unequal length are taken to be as long as the longest.
    """
    spec, extent = layout.spec, layout.extent
    programs = extent.tiles("kv", block) * extent.entries * spec.kv_heads
    if spec.group == 1 or programs >= _EVEN:
        return 1
    queries = [_queries(layout, key, min(key + block, spec.seqlen_kv)) for key in range(0, spec.seqlen_kv, block)]
    heads = -(-programs // len(queries))
    most = max(_MOST // programs, 1)
    times = {each: _time(queries, heads, spec.group, each) for each in _parts(spec.group) if each <= most}
    return next(each for each, time in times.items() if time <= _ENOUGH * min(times.values()))


def _parts(group: int) -> list[int]:
    """The numbers of shares that a group can be divided into, all of one size but the last, which may be smaller."""
    return sorted({-(-group // each) for each in range(1, group + 1)})


def _queries(layout: Layout, key: int, end: int) -> int:
    """How many queries see one of the keys from ``key`` to before ``end``."""
    left, right = layout.edges
    first = max(key - layout.after, 0) if right else 0
    last = min(end + layout.before, layout.spec.seqlen_q) if left else layout.spec.seqlen_q
    return max(last - first, 0)


def _time(queries: list[int], heads: int, group: int, shares: int) -> float:
    """Until all programs, each of which starts where the first before it ends, and the sums are done."""
    more = _START if shares == 1 else _START + _WRITE
    ends = [0.0] * AT_ONCE.value
    for block in in_order(len(queries), heads * shares):
        heapq.heapreplace(ends, ends[0] + queries[block] * -(-group // shares) + more)
    return max(ends) + (0 if shares == 1 else _SUMS)


def summed(x: Tensor, kv_heads: int) -> Tensor:
    """A gradient (B, Hkv, Skv, D) from those of each share (B, Hkv · shares, Skv, D), in their dtype."""
    batch, heads, *rest = x.shape
    return x if heads == kv_heads else x.view(batch, kv_heads, -1, *rest).sum(2)
