"""The Hopper kernel that makes dK and dQ of heads wider than 128 (Gluon); dV has a kernel of its own.

As ``hopper.fused``, in which dV's sums would not fit the registers beside those of a wider dK, nor dO in bf16 shared
memory.  Q and K are in two pieces, 128 columns and the rest of them, because blocks have powers of two.  A warpgroup
keeps its values in registers, which they reach by way of the memory where dQ is staged later.
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
from .fused_tiles import add_queries, times, widen
from .shared import CONSUMERS, ROWS, block_and_head, span_of_queries, store, transposed_product, visible_part

__all__ = ["key_gradients_wide_hopper"]

_NEVER = gl.constexpr(1 << 30)  # behind every query
_SHARED = gl.constexpr(BLOCK.bit_length() - 1)  # so many bits of a query are its place among those with one factor

_Given = namedtuple(
    "_Given",
    "dq_sums dq_rest dk_out row_values factors k_descale q q_rest do k k_rest v q_wide q_wide_rest rows "
    "keys more_keys value_blocks wide_keys more_wide_keys queries more_queries grads wide_queries more_wide_queries "
    "bases deltas score_grads staged more_staged "
    "held narrow wide wide_free grads_made grads_free "
    "k_batch k_head kv_heads seqlen_q seqlen_kv padded_q padded_kv plane size exponent before after",
)


@gluon.jit
def _load(
    given, group: gl.constexpr, shares: gl.constexpr, block_m: gl.constexpr, left: gl.constexpr, right: gl.constexpr
):
    """Brings K and V of the program's keys, then block after block of the queries that see one of them."""
    block, share = block_and_head()
    first_key = block * (CONSUMERS * ROWS)
    row = share // shares * given.padded_kv + first_key
    first_columns: gl.constexpr = given.k.block_type.shape[1]
    bytes_of_keys: gl.constexpr = given.k.block_type.nbytes + given.k_rest.block_type.nbytes + given.v.block_type.nbytes
    mbarrier.expect(given.held, CONSUMERS * bytes_of_keys)
    for i in gl.static_range(CONSUMERS):
        tma.async_copy_global_to_shared(given.k, [row + i * ROWS, 0], given.held, given.keys.index(i))
        tma.async_copy_global_to_shared(
            given.k_rest, [row + i * ROWS, first_columns], given.held, given.more_keys.index(i)
        )
        tma.async_copy_global_to_shared(given.v, [row + i * ROWS, 0], given.held, given.value_blocks.index(i))
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
            bytes_of_queries: gl.constexpr = (
                given.q.block_type.nbytes + given.q_rest.block_type.nbytes + given.do.block_type.nbytes
            )
            mbarrier.expect(full, bytes_of_queries + 2 * given.rows.block_type.nbytes)
            tma.async_copy_global_to_shared(given.q, [row, 0], full, given.queries.index(slot))
            tma.async_copy_global_to_shared(given.q_rest, [row, first_columns], full, given.more_queries.index(slot))
            tma.async_copy_global_to_shared(given.rows, [row], full, given.bases.index(slot))
            tma.async_copy_global_to_shared(given.do, [row, 0], full, given.grads.index(slot))
            tma.async_copy_global_to_shared(given.rows, [given.plane + row], full, given.deltas.index(slot))
            mbarrier.wait(given.wide_free.index(slot), phase)
            full = given.wide.index(slot)
            mbarrier.expect(full, given.q_wide.block_type.nbytes + given.q_wide_rest.block_type.nbytes)
            tma.async_copy_global_to_shared(given.q_wide, [row, 0], full, given.wide_queries.index(slot))
            tma.async_copy_global_to_shared(
                given.q_wide_rest, [row, first_columns], full, given.more_wide_queries.index(slot)
            )
            row += block_m
            turns += 1


@gluon.jit
def _scores(given, slot, which: gl.constexpr, block_m: gl.constexpr, layout: gl.constexpr):
    """Starts K · Qᵀ of a warpgroup's keys."""
    s = transposed_product(given.keys.index(which), given.queries.index(slot), block_m, layout)
    rest = given.more_queries.index(slot).permute([1, 0])
    return warpgroup_mma(given.more_keys.index(which), rest, s, is_async=True)


@gluon.jit
def _query_products(given, slot, which: gl.constexpr, layout: gl.constexpr, rest_layout: gl.constexpr):
    """Starts dS · K for a warpgroup's half of the columns of each piece."""
    score_grads = given.score_grads.index(slot).permute([1, 0])
    keys, more_keys = given.wide_keys.index(which), given.more_wide_keys.index(which)
    rows: gl.constexpr = score_grads.shape[0]
    columns: gl.constexpr = keys.shape[1]
    more: gl.constexpr = more_keys.shape[1]
    zeros = gl.zeros([rows, columns], gl.float32, layout)
    more_zeros = gl.zeros([rows, more], gl.float32, rest_layout)
    dq = warpgroup_mma(score_grads, keys, zeros, use_acc=False, is_async=True)
    return dq, warpgroup_mma(score_grads, more_keys, more_zeros, use_acc=False, is_async=True)


@gluon.jit
def _add(given, dq, dq_rest, row, which: gl.constexpr):
    """Adds a warpgroup's parts of a block's dQ to the sums from ``row`` on."""
    part: gl.constexpr = given.wide_keys.shape[2]
    rest: gl.constexpr = given.more_wide_keys.shape[2]
    add_queries(given.dq_sums, dq, given.staged, 0, row, which * part, which)
    add_queries(given.dq_rest, dq_rest, given.more_staged, 0, row, CONSUMERS * part + which * rest, which)


@gluon.jit
def _sum_up(
    which: gl.constexpr, given, group: gl.constexpr, shares: gl.constexpr, block_m: gl.constexpr, left: gl.constexpr,
    right: gl.constexpr, ragged: gl.constexpr,
):  # fmt: skip
    """dK of 64 keys, and half the columns of what 128 keys add to dQ."""
    seqlen_q, seqlen_kv, before, after = given.seqlen_q, given.seqlen_kv, given.before, given.after
    size: gl.constexpr = given.keys.shape[2]
    rest: gl.constexpr = given.more_keys.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_m, 32])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, size // CONSUMERS, 16])
    dq_rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rest // CONSUMERS, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, size, 16])
    dk_rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rest, 16])
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

    dk = gl.zeros([ROWS, size], gl.float32, dk_layout)
    dk_rest = gl.zeros([ROWS, rest], gl.float32, dk_rest_layout)
    turns, last_row = 0, 0
    q_own = 1.0
    # Before the first block there is none whose dS to multiply: zeros, with the queries that are there.
    given.score_grads.index(1).slice(which * ROWS, ROWS, 0).store(gl.zeros([ROWS, block_m], gl.bfloat16, s_layout))
    mbarrier.wait(given.held, 0)
    mbarrier.wait(given.narrow.index(0), 0)
    s = _scores(given, 0, which, block_m, s_layout)
    v = given.value_blocks.index(which).load(gl.DotOperandLayout(0, s_layout, 4))
    # The other warpgroup's keys are there when its first dS is.
    widen(given.keys.index(which), given.wide_keys, which)
    widen(given.more_keys.index(which), given.more_wide_keys, which)
    fence_async_shared()
    s = warpgroup_mma_wait(0, [s])
    mbarrier.wait(given.wide.index(0), 0)
    for member in range(group):
        following = gl.load(given.row_values + 2 * given.plane + (share * group + member) * given.padded_q)
        change = q_own / following
        q_own = following
        own_factor = factor * q_own
        for step in range(blocks):
            slot, phase = turns & 1, (turns >> 1) & 1
            other, other_phase = slot ^ 1, ((turns - 1) >> 1) & 1
            start = first + step * block_m
            row = (share * group + member) * given.padded_q + start
            # Early: it comes from memory, though it is the same for the next block or was for the last.
            grad_factor = gl.load(given.factors + (row >> _SHARED))
            zeros = gl.zeros([ROWS, block_m], gl.float32, s_layout)
            grads = given.grads.index(slot).permute([1, 0])
            dp = warpgroup_mma(v, grads, zeros, use_acc=False, is_async=True)
            # dK of the block before: dS out of registers would take twice as many, in halves, from turn to turn.
            ds = given.score_grads.index(other).slice(which * ROWS, ROWS, 0)
            last = gl.where(turns > 0, other, slot)
            dk = warpgroup_mma(ds, given.wide_queries.index(last), dk, is_async=True)
            dk_rest = warpgroup_mma(ds, given.more_wide_queries.index(last), dk_rest, is_async=True)
            base = given.bases.index(slot).load(gl.SliceLayout(0, s_layout))
            p = gl.exp2(s * own_factor - base[None, :])
            if left or right or ragged:  # noqa: SIM102 (where no block has an edge, there is no branch)
                if (start < whole) | (start >= parted):
                    p = visible_part(p, start, since, upto, right or ragged, left)
            mbarrier.wait(given.wide.index(slot), phase)
            p16 = p.to(gl.bfloat16)
            dp, dk, dk_rest = warpgroup_mma_wait(0, [dp, dk, dk_rest])
            mbarrier.arrive(given.wide_free.index(other), count=1, pred=turns > 0)
            if group > 1:  # noqa: SIM102 (of one head alone there is no branch)
                if step == 0:  # so far dK is in units of the last head's descale
                    dk, dk_rest = dk * change, dk_rest * change
            delta = given.deltas.index(slot).load(gl.SliceLayout(0, s_layout))
            ds16 = times(p16, dp * grad_factor - delta[None, :])
            mbarrier.wait(given.grads_free.index(slot), phase ^ 1)
            given.score_grads.index(slot).slice(which * ROWS, ROWS, 0).store(ds16)
            fence_async_shared()
            mbarrier.arrive(given.grads_made.index(slot), count=1)
            # dQ of the block before, which the first turn does not add; any numbers are multiplied then.
            mbarrier.wait(given.grads_made.index(other), other_phase)
            dq, dq_rest = _query_products(given, other, which, dq_layout, dq_rest_layout)
            # After the last block its own scores are computed again, and nothing reads them.
            over = (step == blocks - 1) & (member == group - 1)
            next_turns = gl.where(over, turns, turns + 1)
            mbarrier.wait(given.narrow.index(next_turns & 1), (next_turns >> 1) & 1)
            s = _scores(given, next_turns & 1, which, block_m, s_layout)
            dq, dq_rest = warpgroup_mma_wait(2, [dq, dq_rest])
            mbarrier.arrive(given.grads_free.index(other), count=1, pred=turns > 0)
            if turns > 0:
                _add(given, dq, dq_rest, last_row, which)
            s = warpgroup_mma_wait(0, [s])
            last_row = row
            turns += 1
    last = (turns - 1) & 1
    ds = given.score_grads.index(last).slice(which * ROWS, ROWS, 0)
    dk = warpgroup_mma(ds, given.wide_queries.index(last), dk, is_async=True)
    dk_rest = warpgroup_mma(ds, given.more_wide_queries.index(last), dk_rest, is_async=True)
    mbarrier.wait(given.grads_made.index(last), ((turns - 1) >> 1) & 1)
    dq, dq_rest = _query_products(given, last, which, dq_layout, dq_rest_layout)
    dk, dk_rest, dq, dq_rest = warpgroup_mma_wait(0, [dk, dk_rest, dq, dq_rest])
    mbarrier.arrive(given.wide_free.index(last), count=1)
    _add(given, dq, dq_rest, last_row, which)

    top, at = first_key + which * ROWS, share.to(gl.int64) * seqlen_kv
    unit = q_own / k_own
    store(given.dk_out, dk * unit, at, top, seqlen_kv, 0, given.size, dk_layout)
    store(given.dk_out, dk_rest * unit, at, top, seqlen_kv, size, given.size, dk_rest_layout)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "k_batch", "k_head", "kv_heads", "seqlen_q", "seqlen_kv", "padded_q", "padded_kv", "plane", "before", "after",
    ]
)  # fmt: skip
def key_gradients_wide_hopper(
    q, q_rest, do, k, k_rest, v, q_wide, q_wide_rest, rows, dq_sums, dq_rest, row_values, factors, k_descale, dk_out,
    k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size, exponent, before, after,
    group: gl.constexpr, shares: gl.constexpr, left: gl.constexpr, right: gl.constexpr, ragged: gl.constexpr,
    registers: gl.constexpr,
):  # fmt: skip
    """dK (B, Hkv · shares, Skv, D) of 128 keys and ``group`` query heads of a key head, and their part of dQ.

    Arguments as of ``fused.all_gradients_hopper``; ``..._rest`` are the columns of Q, K, dQ behind the first 128.
    """
    block_m: gl.constexpr = q.block_type.shape[0]
    columns: gl.constexpr = k.block_type.shape[1]
    more: gl.constexpr = k_rest.block_type.shape[1]
    size_v: gl.constexpr = v.block_type.shape[1]
    part: gl.constexpr = columns // CONSUMERS
    part_more: gl.constexpr = more // CONSUMERS
    keys = gl.allocate_shared_memory(k.dtype, [CONSUMERS, ROWS, columns], k.layout)
    more_keys = gl.allocate_shared_memory(k.dtype, [CONSUMERS, ROWS, more], k_rest.layout)
    wide_keys = gl.allocate_shared_memory(
        gl.bfloat16, [CONSUMERS, CONSUMERS * ROWS, part],
        gl.NVMMASharedLayout(swizzle_byte_width=2 * part, element_bitwidth=16, rank=2),
    )  # fmt: skip
    more_wide_keys = gl.allocate_shared_memory(
        gl.bfloat16, [CONSUMERS, CONSUMERS * ROWS, part_more],
        gl.NVMMASharedLayout(swizzle_byte_width=2 * part_more, element_bitwidth=16, rank=2),
    )  # fmt: skip
    queries = gl.allocate_shared_memory(q.dtype, [2, block_m, columns], q.layout)
    more_queries = gl.allocate_shared_memory(q.dtype, [2, block_m, more], q_rest.layout)
    grads = gl.allocate_shared_memory(do.dtype, [2, block_m, size_v], do.layout)
    wide_queries = gl.allocate_shared_memory(q_wide.dtype, [2, block_m, columns], q_wide.layout)
    more_wide_queries = gl.allocate_shared_memory(q_wide.dtype, [2, block_m, more], q_wide_rest.layout)
    bases = gl.allocate_shared_memory(rows.dtype, [2, block_m], rows.layout)
    deltas = gl.allocate_shared_memory(rows.dtype, [2, block_m], rows.layout)
    score_grads = gl.allocate_shared_memory(
        gl.bfloat16, [2, CONSUMERS * ROWS, block_m],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
    )  # fmt: skip
    staged = gl.allocate_shared_memory(dq_sums.dtype, [CONSUMERS, block_m, part], dq_sums.layout)
    more_staged = gl.allocate_shared_memory(dq_sums.dtype, [CONSUMERS, block_m, part_more], dq_rest.layout)
    value_blocks = staged._reinterpret(v.dtype, [CONSUMERS, ROWS, size_v], v.layout)
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
        dq_sums, dq_rest, dk_out, row_values, factors, k_descale, q, q_rest, do, k, k_rest, v, q_wide, q_wide_rest,
        rows, keys, more_keys, value_blocks, wide_keys, more_wide_keys, queries, more_queries, grads, wide_queries,
        more_wide_queries, bases, deltas, score_grads, staged, more_staged,
        held, narrow, wide, wide_free, grads_made, grads_free,
        k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size, exponent, before, after,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_sum_up, (0, given, group, shares, block_m, left, right, ragged)),
            (_sum_up, (1, given, group, shares, block_m, left, right, ragged)),
            (_load, (given, group, shares, block_m, left, right)),
        ],
        [4, 1],
        [registers, 24],
    )  # fmt: skip
