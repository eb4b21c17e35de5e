"""Scales of the forward's Hopper kernel: one for a head, or those that it finds or follows itself, Q's by row, K's and
V's by block of keys (Gluon).

Q comes in 16 bits and is cast from shared memory into shared memory, a row's largest magnitude becoming e4m3's: what
would be a pass over memory is a beginning of each tile.  K and V have a scale for each block of keys that the kernel
takes at once, which one pass finds, where one for a head takes two.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .softmax import ROWS, to_e4m3

__all__ = ["LOG2_E", "at_least", "cast_rows", "factors_of_heads", "number", "set_numbers", "unit_of"]

LOG2_E = gl.constexpr(1.4426950408889634)
_INFINITY = gl.constexpr(0x7F800000)  # its bits, and no number's are greater
_TINY = gl.constexpr(2.0**-126)  # below it a reciprocal is infinite
_NEXT_TO_NOTHING = gl.constexpr(2.0**-80)
_PROPAGATED = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def _divided(x, divisor, inverse):
    """As ``quantise_numbers.divided``, so that a row is the same numbers as if it had been quantised before."""
    quotient = x * inverse
    return gl.fma(gl.fma(quotient, divisor, x * -1.0), inverse * -1.0, quotient)


@gluon.jit
def cast_rows(wide, narrow, head_dim: gl.constexpr, layout: gl.constexpr):
    """Writes the rows of ``wide`` to ``narrow`` in e4m3, and returns what each is to be multiplied by.

    Both are chunks of the rows in shared memory, perhaps at the same place.  ``layout`` is that of a matrix with the
    same rows.  From column ``head_dim`` on, where another head may lie, zeros are written.  A row that holds something
    not finite is NaN, or is multiplied by NaN or infinity.
    """
    across: gl.constexpr = wide[0].shape[1] // 8
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    parts = ()
    bits = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, blocked))
    for chunk in gl.static_range(len(wide)):
        x = wide[chunk].load(blocked).to(gl.float32)
        if (chunk + 1) * wide[0].shape[1] > head_dim:
            column = chunk * wide[0].shape[1] + gl.arange(0, wide[0].shape[1], gl.SliceLayout(0, blocked))
            x = gl.where((column < head_dim)[None, :], x, 0.0)
        parts = parts + (x,)  # noqa: RUF005
        bits = gl.maximum(bits, gl.max(x.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1))
    largest = bits.to(gl.float32, bitcast=True)
    descale = gl.maximum(_divided(largest, 448.0, 1.0 / 448.0), _TINY)
    descale = gl.where(bits == 0, 1.0, gl.where(bits < _INFINITY, descale, largest))
    inverse = (1.0 / descale)[:, None]
    for chunk in gl.static_range(len(wide)):
        narrow[chunk].store(to_e4m3(_divided(parts[chunk], descale[:, None], inverse)))
    fence_async_shared()
    return gl.convert_layout(descale, gl.SliceLayout(1, layout))


@gluon.jit
def factors_of_heads(given, here, tiles):
    """What turns a tile's scores into exponents of 2, and V's descale, where each head has one of Q, K and V."""
    batch, kv_head = here.batch.to(gl.int64), here.head // given.group
    q_factor = given.q_factors + batch * given.q_batch + here.head * given.q_head
    k_factor = given.k_factors + batch * given.k_batch + kv_head * given.k_head
    v_factor = given.v_factors + batch * given.v_batch + kv_head * given.v_head
    if tiles is not None:  # which have each token's place, one behind the other; a sequence may have no keys
        q_factor, k_factor, v_factor = q_factor + here.q_start, k_factor + here.k_start, v_factor + here.k_start
    some = tiles is None or here.keys > 0
    factor = gl.load(q_factor, mask=some, other=1.0) * (given.scale * LOG2_E)
    factor = at_least(factor * gl.load(k_factor, mask=some, other=1.0))
    return factor, gl.load(v_factor, mask=some, other=1.0)


@gluon.jit
def at_least(factor):
    """A factor of scores above 0, because minus infinity times 0 is no number."""
    return gl.maximum(factor, 1e-37, propagate_nan=_PROPAGATED)


@gluon.jit
def unit_of(most, descale):
    """(the unit of what is summed from a block of this descale on, the largest descale so far).

    Sums of P·V are in units of V's descale in the block that was added last.  A block next to nothing beside one
    before it, 2^80 times smaller, counts as that much, so that sums in its unit, of 2^30 keys, stay numbers.
    NaN stays, and makes what is summed NaN.
    """
    most = gl.maximum(most, descale)
    return gl.maximum(descale, most * _NEXT_TO_NOTHING, propagate_nan=_PROPAGATED), most


@gluon.jit
def set_numbers(given, slot, of_keys, unit, change):
    """Writes the numbers of a block of keys to shared memory, for one warp.

    Only threads read them, and the warp's next arrival at a barrier makes them visible, so no fence is needed.
    """
    _set_number(given.of_keys.index(slot), of_keys)
    _set_number(given.units.index(slot), unit)
    _set_number(given.changes.index(slot), change)


@gluon.jit
def _set_number(place, x):
    place.store(gl.full([1], x, gl.float32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def number(place):
    """One of what ``set_numbers`` wrote, for four warps."""
    return gl.max(place.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
