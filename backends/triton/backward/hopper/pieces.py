"""The Hopper kernel that makes dQ, dK and dV of heads in two pieces, because blocks have powers of two (Gluon).

As ``hopper.fused``, for heads of 96 as 64 and 32 columns (``with_values``), and for the 192 and 128 of MLA, whose Q and
K are 128 and 64.  There dV has a kernel of its own: its sums would not fit the registers beside those of dK, nor dO in
bf16 shared memory.  A warpgroup then keeps its values in registers, which they reach by way of the memory where dQ is
staged later.

Of dQ a warpgroup makes one of the pieces of 64 and 32, for which the matrix instruction is fastest, or half the columns
of each.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..layout import BLOCK
from .fused_tiles import STAGED, add_queries, times, widen
from .shared import (
    CONSUMERS,
    ROWS,
    block_and_head,
    operand,
    span_of_queries,
    store,
    transposed_product,
    visible_part,
)

__all__ = ["all_gradients_in_pieces_hopper"]

_NEVER = gl.constexpr(1 << 30)  # behind every query
_SHARED = gl.constexpr(BLOCK.bit_length() - 1)  # so many bits of a query are its place among those with one factor

# ``more_...`` are the second pieces.
_Given = namedtuple(
    "_Given",
    "dq_sums more_dq_sums dk_out dv_out row_values factors k_descale "
    "q more_q do more_do k more_k v more_v q_wide more_q_wide do_wide more_do_wide rows "
    "keys more_keys value_blocks more_values wide_keys more_wide_keys queries more_queries grads more_grads "
    "wide_queries more_wide_queries wide_grads more_wide_grads bases deltas score_grads staged more_staged "
    "held narrow wide wide_free grads_made grads_free "
    "k_batch k_head kv_heads seqlen_q seqlen_kv padded_q padded_kv plane size size_v exponent before after",
)


@gluon.jit
def _copy(first, second, row, full, place, more_place):
    """Starts to bring both pieces of the rows from ``row`` on."""
    columns: gl.constexpr = first.block_type.shape[1]
    tma.async_copy_global_to_shared(first, [row, 0], full, place)
    tma.async_copy_global_to_shared(second, [row, columns], full, more_place)


@gluon.jit
def _load(
    given, group: gl.constexpr, shares: gl.constexpr, block_m: gl.constexpr, left: gl.constexpr, right: gl.constexpr,
    with_values: gl.constexpr,
):  # fmt: skip
    """Brings K and V of the program's keys, then block after block of the queries that see one of them."""
    of_keys: gl.constexpr = given.k.block_type.nbytes + given.more_k.block_type.nbytes
    of_values: gl.constexpr = given.v.block_type.nbytes + (given.more_v.block_type.nbytes if with_values else 0)
    of_queries: gl.constexpr = given.q.block_type.nbytes + given.more_q.block_type.nbytes
    of_grads: gl.constexpr = given.do.block_type.nbytes + (given.more_do.block_type.nbytes if with_values else 0)
    block, share = block_and_head()
    first_key = block * (CONSUMERS * ROWS)
    row = share // shares * given.padded_kv + first_key
    mbarrier.expect(given.held, CONSUMERS * (of_keys + of_values))
    for i in gl.static_range(CONSUMERS):
        at = row + i * ROWS
        _copy(given.k, given.more_k, at, given.held, given.keys.index(i), given.more_keys.index(i))
        if with_values:
            _copy(given.v, given.more_v, at, given.held, given.value_blocks.index(i), given.more_values.index(i))
        else:
            tma.async_copy_global_to_shared(given.v, [at, 0], given.held, given.value_blocks.index(i))
    span = span_of_queries(first_key, given.seqlen_q, given.seqlen_kv, given.before, given.after, block_m, left, right)
    first, blocks = span[0], span[3]
    turns = 0
    for member in range(group):
        row = (share * group + member) * given.padded_q + first
        for _step in range(blocks):
            slot, phase = turns & 1, (turns >> 1) & 1 ^ 1
            # The slot's last block has its dS: nothing reads its e4m3 tiles any more.
            mbarrier.wait(given.grads_made.index(slot), phase)
            full = given.narrow.index(slot)
            mbarrier.expect(full, of_queries + of_grads + 2 * given.rows.block_type.nbytes)
            _copy(given.q, given.more_q, row, full, given.queries.index(slot), given.more_queries.index(slot))
            tma.async_copy_global_to_shared(given.rows, [row], full, given.bases.index(slot))
            if with_values:
                _copy(given.do, given.more_do, row, full, given.grads.index(slot), given.more_grads.index(slot))
            else:
                tma.async_copy_global_to_shared(given.do, [row, 0], full, given.grads.index(slot))
            tma.async_copy_global_to_shared(given.rows, [given.plane + row], full, given.deltas.index(slot))
            mbarrier.wait(given.wide_free.index(slot), phase)
            full = given.wide.index(slot)
            mbarrier.expect(full, 2 * (of_queries + (of_grads if with_values else 0)))
            if with_values:
                _copy(
                    given.do_wide, given.more_do_wide, row, full,
                    given.wide_grads.index(slot), given.more_wide_grads.index(slot),
                )  # fmt: skip
            _copy(
                given.q_wide, given.more_q_wide, row, full,
                given.wide_queries.index(slot), given.more_wide_queries.index(slot),
            )  # fmt: skip
            row += block_m
            turns += 1


@gluon.jit
def _scores(given, slot, which: gl.constexpr, block_m: gl.constexpr, layout: gl.constexpr):
    """Starts K · Qᵀ of a warpgroup's keys."""
    s = transposed_product(given.keys.index(which), given.queries.index(slot), block_m, layout)
    more = given.more_queries.index(slot).permute([1, 0])
    return warpgroup_mma(given.more_keys.index(which), more, s, is_async=True)


@gluon.jit
def _query_product(score_grads, keys, layout: gl.constexpr):
    """Starts dS · K of some columns."""
    rows: gl.constexpr = score_grads.shape[1]
    columns: gl.constexpr = keys.shape[1]
    zeros = gl.zeros([rows, columns], gl.float32, layout)
    return warpgroup_mma(score_grads.permute([1, 0]), keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def _own_queries(given, slot, which: gl.constexpr, with_values: gl.constexpr):
    """Starts a warpgroup's part of dQ, one or two products."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, given.wide_keys.shape[2], 16])
    more: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, given.more_wide_keys.shape[2], 16])
    score_grads = given.score_grads.index(slot)
    if with_values:
        if which == 0:
            return (_query_product(score_grads, given.wide_keys.index(0), layout),)
        else:  # noqa: RET505 (of a constant only one of the two is compiled)
            return (_query_product(score_grads, given.more_wide_keys.index(0), more),)
    else:
        return (
            _query_product(score_grads, given.wide_keys.index(which), layout),
            _query_product(score_grads, given.more_wide_keys.index(which), more),
        )


@gluon.jit
def _add(given, dq, turn, row, which: gl.constexpr, with_values: gl.constexpr):
    """Adds a warpgroup's part of a block's dQ to the sums from ``row`` on."""
    part: gl.constexpr = given.wide_keys.shape[2]
    more: gl.constexpr = given.more_wide_keys.shape[2]
    if with_values:
        if which == 0:
            add_queries(given.dq_sums, dq[0], given.staged, turn, row, 0, which)
        else:
            add_queries(given.more_dq_sums, dq[0], given.more_staged, turn, row, part, which)
    else:
        add_queries(given.dq_sums, dq[0], given.staged, 0, row, which * part, which)
        add_queries(given.more_dq_sums, dq[1], given.more_staged, 0, row, CONSUMERS * part + which * more, which)


@gluon.jit
def _waited(pending: gl.constexpr, dq):
    """dQ's products, when no more than ``pending`` of those that started later are under way."""
    if len(dq) == 1:
        return (warpgroup_mma_wait(pending, [dq[0]]),)
    else:  # noqa: RET505
        return warpgroup_mma_wait(pending, [dq[0], dq[1]])


@gluon.jit
def _sum_up(
    which: gl.constexpr, given, group: gl.constexpr, shares: gl.constexpr, block_m: gl.constexpr, left: gl.constexpr,
    right: gl.constexpr, ragged: gl.constexpr, with_values: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys, and a part of the columns of what 128 keys add to dQ."""
    seqlen_q, seqlen_kv, before, after = given.seqlen_q, given.seqlen_kv, given.before, given.after
    size: gl.constexpr = given.wide_queries.shape[2]
    more: gl.constexpr = given.more_wide_queries.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_m, 32])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, size, 16])
    more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, more, 16])
    block, share = block_and_head()
    kv_head = share // shares
    first_key = block * (CONSUMERS * ROWS)
    batch, own = (kv_head // given.kv_heads).to(gl.int64), kv_head % given.kv_heads
    first, whole, parted, blocks = span_of_queries(first_key, seqlen_q, seqlen_kv, before, after, block_m, left, right)
    key = first_key + which * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    since, upto = key - after if right else key * 0, key + before
    if ragged:  # what lies behind the last key is seen by no query, in any block
        since = gl.where(key < seqlen_kv, since, _NEVER)
        whole = gl.where(first_key + CONSUMERS * ROWS > seqlen_kv, _NEVER, whole)
    k_own = gl.load(given.k_descale + batch * given.k_batch + own * given.k_head)
    factor = given.exponent * k_own

    dk, more_dk = gl.zeros([ROWS, size], gl.float32, layout), gl.zeros([ROWS, more], gl.float32, more_layout)
    if with_values:  # its pieces are as wide
        dv, more_dv = gl.zeros([ROWS, size], gl.float32, layout), gl.zeros([ROWS, more], gl.float32, more_layout)
    turns, last_row, blocks_of_all = 0, 0, group * blocks
    if group > 1:
        of_head = share * group * given.padded_q
        row = of_head + first
    # Before the first block there is none whose dS to multiply: zeros, with the queries that are there.
    given.score_grads.index(1).slice(which * ROWS, ROWS, 0).store(gl.zeros([ROWS, block_m], gl.bfloat16, s_layout))
    mbarrier.wait(given.held, 0)
    mbarrier.wait(given.narrow.index(0), 0)
    s = _scores(given, 0, which, block_m, s_layout)
    v = given.value_blocks.index(which)
    if not with_values:
        v = v.load(gl.DotOperandLayout(0, s_layout, 4))
    # The other warpgroup's keys are there when its first dS is.
    widen(given.keys.index(which), given.wide_keys, which)
    widen(given.more_keys.index(which), given.more_wide_keys, which)
    fence_async_shared()
    s = warpgroup_mma_wait(0, [s])
    mbarrier.wait(given.wide.index(0), 0)
    if group == 1:
        q_own = gl.load(given.row_values + 2 * given.plane + share * given.padded_q)
        own_factor = factor * q_own
    # One loop for all query heads, and one unit for the dK of all: loops in each other, and a dK that is rescaled where
    # the next head begins, spill registers.  Of one head alone the same code is up to 5 % slower on an H100.
    for step in range(blocks_of_all):
        if group == 1:
            start = first + step * block_m
            row = share * given.padded_q + start
        else:
            turns = step
        slot, phase = turns & 1, (turns >> 1) & 1
        other, other_phase = slot ^ 1, ((turns - 1) >> 1) & 1
        # Early: it comes from memory, though it is the same for the next block or was for the last.
        grad_factor = gl.load(given.factors + (row >> _SHARED))
        if group > 1:
            own_factor = factor * gl.load(given.row_values + 2 * given.plane + row)
        dp = transposed_product(v, given.grads.index(slot), block_m, s_layout)
        if with_values:
            grads = given.more_grads.index(slot).permute([1, 0])
            dp = warpgroup_mma(given.more_values.index(which), grads, dp, is_async=True)
        # dK of the block before: dS out of registers would take twice as many, in halves, from turn to turn.
        ds = given.score_grads.index(other).slice(which * ROWS, ROWS, 0)
        last = gl.where(turns > 0, other, slot)
        dk = warpgroup_mma(ds, given.wide_queries.index(last), dk, is_async=True)
        more_dk = warpgroup_mma(ds, given.more_wide_queries.index(last), more_dk, is_async=True)
        base = given.bases.index(slot).load(gl.SliceLayout(0, s_layout))
        p = gl.exp2(s * own_factor - base[None, :])
        if group > 1:
            start = row - of_head
        if left or right or ragged:  # noqa: SIM102 (where no block has an edge, there is no branch)
            if (start < whole) | (start >= parted):
                p = visible_part(p, start, since, upto, right or ragged, left)
        mbarrier.wait(given.wide.index(slot), phase)
        p16 = p.to(gl.bfloat16)
        if with_values:
            p_operand = operand(p16, gl.DotOperandLayout(0, layout, 2))
            more_operand = operand(p16, gl.DotOperandLayout(0, more_layout, 2))
        dp, dk, more_dk = warpgroup_mma_wait(0, [dp, dk, more_dk])
        mbarrier.arrive(given.wide_free.index(other), count=1, pred=turns > 0)
        if with_values:
            dv = warpgroup_mma(p_operand, given.wide_grads.index(slot), dv, is_async=True)
            more_dv = warpgroup_mma(more_operand, given.more_wide_grads.index(slot), more_dv, is_async=True)
        delta = given.deltas.index(slot).load(gl.SliceLayout(0, s_layout))
        ds16 = times(p16, dp * grad_factor - delta[None, :])
        mbarrier.wait(given.grads_free.index(slot), phase ^ 1)
        given.score_grads.index(slot).slice(which * ROWS, ROWS, 0).store(ds16)
        fence_async_shared()
        mbarrier.arrive(given.grads_made.index(slot), count=1)
        if with_values:
            dv, more_dv, p_operand, more_operand = warpgroup_mma_wait(0, [dv, more_dv, p_operand, more_operand])
        # dQ of the block before, which the first turn does not add; any numbers are multiplied then.
        mbarrier.wait(given.grads_made.index(other), other_phase)
        dq = _own_queries(given, other, which, with_values)
        # After the last block its own scores are computed again, and nothing reads them.
        if group == 1:
            next_turns = gl.where(step == blocks - 1, turns, turns + 1)
        else:
            next_turns = gl.minimum(turns + 1, blocks_of_all - 1)
        mbarrier.wait(given.narrow.index(next_turns & 1), (next_turns >> 1) & 1)
        s = _scores(given, next_turns & 1, which, block_m, s_layout)
        dq = _waited(2, dq)
        mbarrier.arrive(given.grads_free.index(other), count=1, pred=turns > 0)
        if turns > 0:
            _add(given, dq, other, last_row, which, with_values)
        s = warpgroup_mma_wait(0, [s])
        last_row = row
        if group == 1:
            turns += 1
        else:
            row += block_m
            if row == of_head + first + blocks * block_m:  # the next query head
                of_head += given.padded_q
                row = of_head + first
    if group > 1:
        turns = blocks_of_all
    last = (turns - 1) & 1
    ds = given.score_grads.index(last).slice(which * ROWS, ROWS, 0)
    dk = warpgroup_mma(ds, given.wide_queries.index(last), dk, is_async=True)
    more_dk = warpgroup_mma(ds, given.more_wide_queries.index(last), more_dk, is_async=True)
    mbarrier.wait(given.grads_made.index(last), ((turns - 1) >> 1) & 1)
    dq = _own_queries(given, last, which, with_values)
    dk, more_dk = warpgroup_mma_wait(0, [dk, more_dk])
    mbarrier.arrive(given.wide_free.index(last), count=1)
    _add(given, _waited(0, dq), last, last_row, which, with_values)

    top, at = first_key + which * ROWS, share.to(gl.int64) * seqlen_kv
    # Where heads share a key head the wide Q bears its descale.
    unit = (q_own if shares == 1 else 1.0) / k_own if group == 1 else given.exponent / factor
    store(given.dk_out, dk * unit, at, top, seqlen_kv, 0, given.size, layout)
    store(given.dk_out, more_dk * unit, at, top, seqlen_kv, size, given.size, more_layout)
    if with_values:
        store(given.dv_out, dv, at, top, seqlen_kv, 0, given.size_v, layout)
        store(given.dv_out, more_dv, at, top, seqlen_kv, size, given.size_v, more_layout)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "k_batch", "k_head", "kv_heads", "seqlen_q", "seqlen_kv", "padded_q", "padded_kv", "plane", "before", "after",
    ]
)  # fmt: skip
def all_gradients_in_pieces_hopper(
    q, more_q, do, more_do, k, more_k, v, more_v, q_wide, more_q_wide, do_wide, more_do_wide, rows,
    dq_sums, more_dq_sums, row_values, factors, k_descale, dk_out, dv_out,
    k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size, size_v, exponent, before, after,
    group: gl.constexpr, shares: gl.constexpr, left: gl.constexpr, right: gl.constexpr, ragged: gl.constexpr,
    with_values: gl.constexpr, registers: gl.constexpr,
):  # fmt: skip
    """dK and, ``with_values``, dV of 128 keys and ``group`` query heads of a key head, and their part of dQ.

    Arguments as of ``fused.all_gradients_hopper``; ``more_...`` read or add to the second piece.  Without dV, V and dO
    are in one piece, and nothing reads ``more_v``, ``more_do``, ``do_wide`` and ``more_do_wide``.
    """
    block_m: gl.constexpr = q.block_type.shape[0]
    columns: gl.constexpr = k.block_type.shape[1]
    more: gl.constexpr = more_k.block_type.shape[1]
    columns_v: gl.constexpr = v.block_type.shape[1]
    part: gl.constexpr = dq_sums.block_type.shape[1]
    more_part: gl.constexpr = more_dq_sums.block_type.shape[1]
    keys = gl.allocate_shared_memory(k.dtype, [CONSUMERS, ROWS, columns], k.layout)
    more_keys = gl.allocate_shared_memory(k.dtype, [CONSUMERS, ROWS, more], more_k.layout)
    wide_keys = gl.allocate_shared_memory(
        gl.bfloat16, [columns // part, CONSUMERS * ROWS, part],
        gl.NVMMASharedLayout(swizzle_byte_width=2 * part, element_bitwidth=16, rank=2),
    )  # fmt: skip
    more_wide_keys = gl.allocate_shared_memory(
        gl.bfloat16, [more // more_part, CONSUMERS * ROWS, more_part],
        gl.NVMMASharedLayout(swizzle_byte_width=2 * more_part, element_bitwidth=16, rank=2),
    )  # fmt: skip
    queries = gl.allocate_shared_memory(q.dtype, [2, block_m, columns], q.layout)
    more_queries = gl.allocate_shared_memory(q.dtype, [2, block_m, more], more_q.layout)
    grads = gl.allocate_shared_memory(do.dtype, [2, block_m, columns_v], do.layout)
    wide_queries = gl.allocate_shared_memory(q_wide.dtype, [2, block_m, columns], q_wide.layout)
    more_wide_queries = gl.allocate_shared_memory(q_wide.dtype, [2, block_m, more], more_q_wide.layout)
    bases = gl.allocate_shared_memory(rows.dtype, [2, block_m], rows.layout)
    deltas = gl.allocate_shared_memory(rows.dtype, [2, block_m], rows.layout)
    score_grads = gl.allocate_shared_memory(
        gl.bfloat16, [2, CONSUMERS * ROWS, block_m],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
    )  # fmt: skip
    # Of a warpgroup's dQ as much as is under way: two blocks, or two pieces.
    blocks: gl.constexpr = STAGED if with_values else 1
    staged = gl.allocate_shared_memory(dq_sums.dtype, [CONSUMERS * blocks, block_m, part], dq_sums.layout)
    more_staged = gl.allocate_shared_memory(
        dq_sums.dtype, [CONSUMERS * blocks, block_m, more_part], more_dq_sums.layout
    )
    if with_values:
        value_blocks = gl.allocate_shared_memory(v.dtype, [CONSUMERS, ROWS, columns], v.layout)
        more_values = gl.allocate_shared_memory(v.dtype, [CONSUMERS, ROWS, more], more_v.layout)
        more_grads = gl.allocate_shared_memory(do.dtype, [2, block_m, more], more_do.layout)
        wide_grads = gl.allocate_shared_memory(do_wide.dtype, [2, block_m, columns], do_wide.layout)
        more_wide_grads = gl.allocate_shared_memory(do_wide.dtype, [2, block_m, more], more_do_wide.layout)
    else:
        value_blocks = staged._reinterpret(v.dtype, [CONSUMERS, ROWS, columns_v], v.layout)
        more_values, more_grads, wide_grads, more_wide_grads = value_blocks, grads, wide_queries, more_wide_queries
    held = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    narrow = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    wide = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    wide_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    grads_made = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    grads_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(held, count=1)
    for i in gl.static_range(2):
        mbarrier.init(narrow.index(i), count=1)
        mbarrier.init(wide.index(i), count=1)
        mbarrier.init(wide_free.index(i), count=CONSUMERS)
        mbarrier.init(grads_made.index(i), count=CONSUMERS)
        mbarrier.init(grads_free.index(i), count=CONSUMERS)

    given = _Given(
        dq_sums, more_dq_sums, dk_out, dv_out, row_values, factors, k_descale,
        q, more_q, do, more_do, k, more_k, v, more_v, q_wide, more_q_wide, do_wide, more_do_wide, rows,
        keys, more_keys, value_blocks, more_values, wide_keys, more_wide_keys, queries, more_queries, grads, more_grads,
        wide_queries, more_wide_queries, wide_grads, more_wide_grads, bases, deltas, score_grads, staged, more_staged,
        held, narrow, wide, wide_free, grads_made, grads_free,
        k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size, size_v, exponent, before,
        after,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_sum_up, (0, given, group, shares, block_m, left, right, ragged, with_values)),
            (_sum_up, (1, given, group, shares, block_m, left, right, ragged, with_values)),
            (_load, (given, group, shares, block_m, left, right, with_values)),
        ],
        [4, 1],
        [registers, 24],
    )  # fmt: skip
