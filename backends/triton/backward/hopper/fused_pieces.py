"""Operands of the fused Hopper kernel in one piece or two, because blocks have powers of two of columns (Gluon).

A tuple has the pieces: 64 columns and 32 of heads of 65 to 96, 128 and 64 of MLA's Q and K.  Their products follow each
other; one that sums over columns goes on in the same sum.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from .fused_tiles import add_queries, widen
from .shared import CONSUMERS, ROWS, operand, store, transposed_product

__all__ = [
    "add_dq",
    "add_products",
    "bring",
    "done",
    "done_with",
    "in_registers",
    "operands",
    "query_products",
    "scores",
    "scores_of",
    "slots",
    "store_pieces",
    "sums_of_keys",
    "widen_all",
]


@gluon.jit
def slots(x, count: gl.constexpr, rows: gl.constexpr):
    """Shared memory for so many blocks of rows."""
    return gl.allocate_shared_memory(x.dtype, [count, rows, x.block_type.shape[1]], x.layout)


@gluon.jit
def bring(tiles, row, full, places, slot):
    """Starts to bring the rows from ``row`` on to the ``slot`` of their places."""
    tma.async_copy_global_to_shared(tiles[0], [row, 0], full, places[0].index(slot))
    if len(tiles) > 1:
        column: gl.constexpr = tiles[0].block_type.shape[1]
        tma.async_copy_global_to_shared(tiles[1], [row, column], full, places[1].index(slot))


@gluon.jit
def widen_all(keys, wide_keys, which: gl.constexpr):
    """Lays a warpgroup's keys down in bf16."""
    for i in gl.static_range(len(keys)):
        widen(keys[i].index(which), wide_keys[i], which)


@gluon.jit
def sums_of_keys(wide):
    """Zeros for what a sum over rows like those of ``wide`` gives for a warpgroup's keys."""
    size: gl.constexpr = wide[0].shape[2]
    first = gl.zeros([ROWS, size], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, size, 16]))
    if len(wide) == 1:
        return (first,)
    else:  # noqa: RET505 (of a constant only one of the two is compiled)
        more: gl.constexpr = wide[1].shape[2]
        second = gl.zeros([ROWS, more], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, more, 16]))
        return (first, second)


@gluon.jit
def scores(keys, queries, slot, which: gl.constexpr, block_m: gl.constexpr, layout: gl.constexpr):
    """Starts K · Qᵀ of a warpgroup's keys."""
    s = transposed_product(keys[0].index(which), queries[0].index(slot), block_m, layout)
    if len(keys) > 1:
        s = warpgroup_mma(keys[1].index(which), queries[1].index(slot).permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def in_registers(tiles, which: gl.constexpr, layout: gl.constexpr):
    """A warpgroup's e4m3 rows as first operands of products whose result has this layout."""
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    if len(tiles) == 1:
        return (tiles[0].index(which).load(operand_layout),)
    else:  # noqa: RET505
        return (tiles[0].index(which).load(operand_layout), tiles[1].index(which).load(operand_layout))


@gluon.jit
def scores_of(rows, queries, slot, block_m: gl.constexpr, layout: gl.constexpr):
    """Starts the products of ``rows`` in registers with a block of queries, or of their gradients."""
    s = transposed_product(rows[0], queries[0].index(slot), block_m, layout)
    if len(rows) > 1:
        s = warpgroup_mma(rows[1], queries[1].index(slot).permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def operands(x, sums):
    """x in bf16 from registers as the first operand of each piece's product."""
    if len(sums) == 1:
        return (operand(x, gl.DotOperandLayout(0, sums[0].type.layout, 2)),)
    else:  # noqa: RET505
        return (
            operand(x, gl.DotOperandLayout(0, sums[0].type.layout, 2)),
            operand(x, gl.DotOperandLayout(0, sums[1].type.layout, 2)),
        )


@gluon.jit
def add_products(x, rows, slot, sums):
    """Starts to add x · rows to each piece's sum; ``x``: one operand for each piece."""
    if len(sums) == 1:
        return (warpgroup_mma(x[0], rows[0].index(slot), sums[0], is_async=True),)
    else:  # noqa: RET505
        return (
            warpgroup_mma(x[0], rows[0].index(slot), sums[0], is_async=True),
            warpgroup_mma(x[1], rows[1].index(slot), sums[1], is_async=True),
        )


@gluon.jit
def done(pending: gl.constexpr, sums):
    """The sums, when no more than ``pending`` products that started later are under way."""
    if len(sums) == 1:
        return (warpgroup_mma_wait(pending, [sums[0]]),)
    else:  # noqa: RET505
        return warpgroup_mma_wait(pending, [sums[0], sums[1]])


@gluon.jit
def done_with(x, sums):
    """(The first of x, the sums) when all products are done; what else x has was an operand."""
    if len(sums) == 1:
        x, first = warpgroup_mma_wait(0, [x[0], sums[0]])
        return x, (first,)
    elif len(x) == 1:  # noqa: RET505
        x, first, second = warpgroup_mma_wait(0, [x[0], sums[0], sums[1]])
        return x, (first, second)
    else:
        x, _more, first, second = warpgroup_mma_wait(0, [x[0], x[1], sums[0], sums[1]])
        return x, (first, second)


@gluon.jit
def _query_product(score_grads, keys):
    """Starts dS · K of some columns."""
    rows: gl.constexpr = score_grads.shape[1]
    columns: gl.constexpr = keys.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    zeros = gl.zeros([rows, columns], gl.float32, layout)
    return warpgroup_mma(score_grads.permute([1, 0]), keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def query_products(given, slot, which: gl.constexpr, with_values: gl.constexpr):
    """Starts a warpgroup's part of dQ: half the columns of each piece, half the rows, or one of two pieces."""
    score_grads = given.score_grads.index(slot)
    if len(given.keys) == 1 and given.wide_keys[0].shape[0] == 1:
        half: gl.constexpr = score_grads.shape[1] // CONSUMERS
        return (_query_product(score_grads.slice(which * half, half, 1), given.wide_keys[0].index(0)),)
    elif len(given.keys) == 1:  # noqa: RET505
        return (_query_product(score_grads, given.wide_keys[0].index(which)),)
    elif with_values:
        return (_query_product(score_grads, given.wide_keys[which].index(0)),)
    else:
        return (
            _query_product(score_grads, given.wide_keys[0].index(which)),
            _query_product(score_grads, given.wide_keys[1].index(which)),
        )


@gluon.jit
def add_dq(given, dq, turn, row, which: gl.constexpr, with_values: gl.constexpr):
    """Adds a warpgroup's part of a block's dQ to the sums of the block from ``row`` on."""
    part: gl.constexpr = given.wide_keys[0].shape[2]
    if len(given.keys) == 1 and given.wide_keys[0].shape[0] == 1:
        half: gl.constexpr = given.score_grads.shape[2] // CONSUMERS
        add_queries(given.dq_sums[0], dq[0], given.staged[0], turn, row + which * half, 0, which)
    elif len(given.keys) == 1:
        add_queries(given.dq_sums[0], dq[0], given.staged[0], turn, row, which * part, which)
    elif with_values:
        add_queries(given.dq_sums[which], dq[0], given.staged[which], turn, row, which * part, which)
    else:
        more: gl.constexpr = given.wide_keys[1].shape[2]
        add_queries(given.dq_sums[0], dq[0], given.staged[0], 0, row, which * part, which)
        add_queries(given.dq_sums[1], dq[1], given.staged[1], 0, row, CONSUMERS * part + which * more, which)


@gluon.jit
def store_pieces(out, sums, at, top, length, size):
    """As ``shared.store``, of two pieces."""
    columns: gl.constexpr = sums[0].shape[1]
    layout: gl.constexpr = sums[0].type.layout
    more_layout: gl.constexpr = sums[1].type.layout
    store(out, sums[0], at, top, length, 0, size, layout)
    store(out, sums[1], at, top, length, columns, size, more_layout)
