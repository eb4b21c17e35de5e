"""The matrix products of the Hopper kernel, Q·Kᵀ in chunks of the head dimension and P·V in parts of V's columns, and
what becomes of those.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .softmax import HEADROOM, MINUS_INFINITY, ROWS, spread

__all__ = ["add_products", "rows_at", "start_scores", "store_tile"]

_LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def rows_at(source, copy, chunks: gl.constexpr):
    """A warpgroup's queries in shared memory, chunk by chunk."""
    rows = ()
    for chunk in gl.static_range(chunks):
        rows = rows + (source.index(copy * chunks + chunk),)  # noqa: RUF005
    return rows


@gluon.jit
def start_scores(
    tile, keys, full, slot, phase, block_n: gl.constexpr, chunks: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Starts Q·Kᵀ of the block in ``slot``, chunk by chunk of the head dimension."""
    mbarrier.wait(full.index(slot), phase)
    scores = gl.zeros([ROWS, block_n], gl.float32, layout)
    for chunk in gl.static_range(chunks):
        of_keys = keys.index(slot * chunks + chunk).permute([1, 0])
        scores = warpgroup_mma(tile[chunk], of_keys, scores, use_acc=chunk > 0, is_async=True)
    return scores


@gluon.jit
def _products(
    p, values, slot, part: gl.constexpr, index: gl.constexpr, chunks: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Starts P·V of the block in ``slot`` for a part of V's columns, which lie in chunks as well."""
    zeros = gl.zeros([ROWS, part], gl.float32, layout)
    height: gl.constexpr = values.shape[1]
    chunk: gl.constexpr = index * part // height
    columns = values.index(slot * chunks + chunk).slice(index * part % height, part, 0).permute([1, 0])
    return warpgroup_mma(p, columns, zeros, use_acc=False, is_async=True)


@gluon.jit
def _added(summed, product, decay):
    """What was summed so far, decayed, and a block's product."""
    return summed * spread(decay, summed) + product


@gluon.jit
def add_products(
    sums, p, decay, values, slot, part: gl.constexpr, parts: gl.constexpr, chunks: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """The sums with P·V of a block, two parts of V's columns under way at a time."""
    added = ()
    product = _products(p, values, slot, part, 0, chunks, layout)
    for i in gl.static_range(1, parts):
        following = _products(p, values, slot, part, i, chunks, layout)
        product = warpgroup_mma_wait(1, [product])
        added = added + (_added(sums[i - 1], product, decay),)  # noqa: RUF005
        product = following
    product = warpgroup_mma_wait(0, [product])
    return added + (_added(sums[parts - 1], product, decay),)  # noqa: RUF005


@gluon.jit
def _store(out, o, at, top, column, seqlen_q, head_dim_v, full_width: gl.constexpr):
    """o as the rows of a head from ``top`` on and the columns from ``column`` on."""
    across: gl.constexpr = min(o.shape[1] // 8, 16)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    o = gl.convert_layout(o, layout)
    row = top + gl.arange(0, o.shape[0], gl.SliceLayout(1, layout))
    column += gl.arange(0, o.shape[1], gl.SliceLayout(0, layout))
    inside = (row < seqlen_q)[:, None]
    if not full_width:
        inside = inside & (column < head_dim_v)[None, :]
    gl.store(out + at * head_dim_v + row[:, None] * head_dim_v + column[None, :], o, mask=inside)


@gluon.jit
def store_tile(
    given, here, row, which: gl.constexpr, sums, total, peak, unit, layout: gl.constexpr, part: gl.constexpr,
    parts: gl.constexpr, full_width: gl.constexpr,
):  # fmt: skip
    """A warpgroup's rows of O and their log-sum-exp; ``layout`` is that of the scores."""
    query = here.top + row
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, layout))
    empty = total < 1.0  # a row's greatest P is 2^8
    share = unit / gl.where(empty, 1.0, total)
    logarithm = (peak - HEADROOM + gl.log2(gl.where(empty, 1.0, total))) * _LN_2
    at = (here.batch * given.heads + here.head).to(gl.int64) * given.seqlen_q + here.q_start
    gl.store(given.lse + at + query, gl.where(empty, MINUS_INFINITY, logarithm), mask=query < here.queries)
    for i in gl.static_range(parts):
        o = (sums[i] * spread(share, sums[i])).to(given.out.dtype.element_ty)
        _store(given.out, o, at, here.top + which * ROWS, i * part, here.queries, given.head_dim_v, full_width)
