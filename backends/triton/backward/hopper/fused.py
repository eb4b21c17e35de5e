"""The Hopper kernel that makes dQ, dK and dV: one pass over the products for all three (Gluon).

As in ``hopper.keys`` a warp loads and two warpgroups with 64 keys each compute dK and dV.  What they have of
dS serves for dQ too: five products where two kernels take seven.  dQ = dS·K sums over keys, and so over programs: each
adds what its 128 keys give to a sum in global memory, in no order.  The additions are in bf16: half the bytes of FP32,
in which the kernel waits for the L2, and a rounding at each, which is why dQ differs from run to run.

As little as can be stands before and behind it in memory.  dO is read as it came where TMA can; a warpgroup widens the
keys that it has, for dQ, in shared memory; and dS bears every factor of dQ, so that its sum is dQ itself.

dS reaches the tensor cores through shared memory, for dQ transposed and from both warpgroups: of dQ each warpgroup
makes half of the columns, or half of the rows where a block has 128 queries.  A block's dQ waits until the next block's
dS is there: so neither warpgroup waits for the other, and they may be half a block apart, one with its exponentials and
the other with its products.
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

from ...tile_rows import ROW as TABLE_ROW
from ..layout import BLOCK
from .fused_tiles import STAGED, add_queries, clear_behind, first_rows, store_whole, times, widen
from .shared import (
    CONSUMERS,
    ROWS,
    barrier_where,
    block_and_head,
    load_keys,
    load_queries,
    load_wide,
    operand,
    span_of_queries,
    transposed_product,
    turned,
    visible_part,
)

__all__ = ["all_gradients_hopper"]

_ROW = gl.constexpr(TABLE_ROW.value)
_NEVER = gl.constexpr(1 << 30)  # behind every query
_SHARED = gl.constexpr(BLOCK.bit_length() - 1)  # so many bits of a query are its place among those with one factor

# What partitions are given: tensors and descriptors, shared memory (a Triton tuple has `values` of its own), barriers,
# numbers.
_Given = namedtuple(
    "_Given",
    "dq_sums dk_out dv_out row_values factors k_descale q do k v q_wide do_wide rows turn "
    "keys value_blocks wide_keys queries grads wide_queries wide_grads bases deltas score_grads staged turning "
    "held narrow wide wide_free grads_made grads_free turn_filled "
    "k_batch k_head kv_heads seqlen_q seqlen_kv padded_q padded_kv plane size size_v exponent before after",
)


@gluon.jit
def _sequence(tiles, before, after, aligned: gl.constexpr):
    """The program's row of the table: (batch entry, first key, where the sequence's queries and keys start, their
    numbers, the slots of queries and keys, the sequence's own ``before`` and ``after``).
    """
    row = tiles + (1 + block_and_head()[0]) * _ROW
    queries, keys = gl.load(row + 3), gl.load(row + 5)
    if aligned:
        before, after = before - (keys - queries), after + (keys - queries)
    return (
        gl.load(row), gl.load(row + 1), gl.load(row + 2), gl.load(row + 4), queries, keys, gl.load(row + 6),
        gl.load(row + 7), before, after,
    )  # fmt: skip


@gluon.jit
def _load(
    given, tiles, group: gl.constexpr, shares: gl.constexpr, block_m: gl.constexpr, left: gl.constexpr,
    right: gl.constexpr, rotated: gl.constexpr, aligned: gl.constexpr, keys_in_place: gl.constexpr,
):  # fmt: skip
    """Brings K and V of the program's keys, then block after block of the queries that see one of them."""
    seqlen_q, seqlen_kv, before, after = given.seqlen_q, given.seqlen_kv, given.before, given.after
    block, share = block_and_head()
    kv_head = share // shares
    first_key = block * (CONSUMERS * ROWS)
    key_row, q_slot = kv_head * given.padded_kv, 0
    if tiles is not None:
        batch, first_key, _, k_start, seqlen_q, seqlen_kv, q_slot, k_slot, before, after = _sequence(
            tiles, before, after, aligned
        )
        # A sequence without queries has a slot all the same, whose queries see nothing.
        seqlen_q = gl.maximum(seqlen_q, 1)
        key_row += (batch * given.kv_heads * given.padded_kv + k_start) if keys_in_place else k_slot
    key_row += first_key
    load_keys(given, key_row)
    span = span_of_queries(first_key, seqlen_q, seqlen_kv, before, after, block_m, left, right)
    first, blocks = span[0], span[3]
    turns = 0
    for member in range(group):
        row = (share * group + member) * given.padded_q + q_slot + first
        for _step in range(blocks):
            slot, phase = turns & 1, (turns >> 1) & 1 ^ 1
            # The slot's last block has its dS: nothing reads its e4m3 tiles any more.
            mbarrier.wait(given.grads_made.index(slot), phase)
            load_queries(given, row, slot, given.narrow.index(slot))
            mbarrier.wait(given.wide_free.index(slot), phase)
            load_wide(given, row, slot)
            row += block_m
            turns += 1
    if rotated:  # over the queries, when nothing reads them any more
        for more in gl.static_range(2):
            mbarrier.wait(given.wide_free.index((turns + more) & 1), ((turns + more) >> 1) & 1 ^ 1)
        mbarrier.expect(given.turn_filled, given.turn.block_type.nbytes)
        tma.async_copy_global_to_shared(given.turn, [0, 0], given.turn_filled, given.turning)


@gluon.jit
def _query_product(score_grads, wide_keys, which: gl.constexpr, layout: gl.constexpr):
    """Starts dS · K for a warpgroup's half of the columns or rows; both have the keys as rows."""
    if wide_keys.shape[0] == 1:
        half: gl.constexpr = score_grads.shape[1] // CONSUMERS
        score_grads, wide_keys = score_grads.slice(which * half, half, 1), wide_keys.index(0)
    else:
        wide_keys = wide_keys.index(which)
    rows: gl.constexpr = score_grads.shape[1]
    columns: gl.constexpr = wide_keys.shape[1]
    zeros = gl.zeros([rows, columns], gl.float32, layout)
    return warpgroup_mma(score_grads.permute([1, 0]), wide_keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def _sum_up(
    which: gl.constexpr, given, tiles, group: gl.constexpr, shares: gl.constexpr, block_m: gl.constexpr,
    left: gl.constexpr, right: gl.constexpr, ragged: gl.constexpr, rotated: gl.constexpr, aligned: gl.constexpr,
    keys_in_place: gl.constexpr, dq_in_place: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys, and half the columns of what 128 keys add to dQ."""
    seqlen_q, seqlen_kv, before, after = given.seqlen_q, given.seqlen_kv, given.before, given.after
    head_dim: gl.constexpr = given.keys.shape[2]
    head_dim_v: gl.constexpr = given.value_blocks.shape[2]
    part: gl.constexpr = given.wide_keys.shape[2]
    # Where the warpgroup's part of a block's dQ begins: half the rows with all columns, or half the columns.
    own_row: gl.constexpr = which * (block_m // CONSUMERS) if part == head_dim else 0
    own_column: gl.constexpr = 0 if part == head_dim else which * part
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_m, 32])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, part, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim_v, 16])
    block, share = block_and_head()
    kv_head = share // shares
    first_key = block * (CONSUMERS * ROWS)
    q_slot = 0
    queries, dq_top = seqlen_q, 0
    if tiles is None:
        at = share.to(gl.int64) * seqlen_kv
        batch, own = (kv_head // given.kv_heads).to(gl.int64), kv_head % given.kv_heads
        k_place = given.k_descale + batch * given.k_batch + own * given.k_head
    else:
        stored, stored_q = seqlen_kv, seqlen_q
        batch, first_key, q_start, k_start, queries, seqlen_kv, q_slot, _, before, after = _sequence(
            tiles, before, after, aligned
        )
        seqlen_q = gl.maximum(queries, 1)
        if dq_in_place:
            dq_top = (batch * given.kv_heads + kv_head) * stored_q + q_start
        at = (batch.to(gl.int64) * given.kv_heads * shares + share) * stored + k_start
        # Descales of a sequence have the places of its tokens, one behind the other; the last may have none.
        k_place = (
            given.k_descale
            + batch.to(gl.int64) * given.k_batch
            + kv_head * given.k_head
            + gl.minimum(k_start, stored - 1)
        )
    first, whole, parted, blocks = span_of_queries(first_key, seqlen_q, seqlen_kv, before, after, block_m, left, right)
    key = first_key + which * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    since, upto = key - after if right else key * 0, key + before
    if ragged:  # what lies behind the last key is seen by no query, in any block
        since = gl.where(key < seqlen_kv, since, _NEVER)
        whole = gl.where(first_key + CONSUMERS * ROWS > seqlen_kv, _NEVER, whole)
    k_own = gl.load(k_place)
    factor = given.exponent * k_own
    k_tile, v_tile = given.keys.index(which), given.value_blocks.index(which)

    dk = gl.zeros([ROWS, head_dim], gl.float32, dk_layout)
    dv = gl.zeros([ROWS, head_dim_v], gl.float32, dv_layout)
    turns, last_row, blocks_of_all = 0, 0, group * blocks
    if group > 1:
        of_head = share * group * given.padded_q + q_slot
        row = of_head + first
    # Before the first block there is none whose dS to multiply: zeros, with the queries that are there.
    given.score_grads.index(1).slice(which * ROWS, ROWS, 0).store(gl.zeros([ROWS, block_m], gl.bfloat16, s_layout))
    mbarrier.wait(given.held, 0)
    if keys_in_place:
        own_keys = seqlen_kv - first_key - which * ROWS
        if own_keys < ROWS:
            clear_behind(k_tile, own_keys)
            clear_behind(v_tile, own_keys)
            fence_async_shared()
    mbarrier.wait(given.narrow.index(0), 0)
    s = transposed_product(k_tile, given.queries.index(0), block_m, s_layout)
    widen(k_tile, given.wide_keys, which)  # the other warpgroup's keys are there when its first dS is
    fence_async_shared()
    s = warpgroup_mma_wait(0, [s])
    mbarrier.wait(given.wide.index(0), 0)
    if group == 1:
        q_own = gl.load(given.row_values + 2 * given.plane + share * given.padded_q + q_slot)
        own_factor = factor * q_own
    # One loop for all query heads, and one unit for the dK of all: loops in each other, and a dK that is rescaled where
    # the next head begins, spill registers.  Of one head alone the same code is up to 5 % slower on an H100.
    for step in range(blocks_of_all):
        if group == 1:
            start = first + step * block_m
            row = share * given.padded_q + q_slot + start
        else:
            turns = step
        slot, phase = turns & 1, (turns >> 1) & 1
        other, other_phase = slot ^ 1, ((turns - 1) >> 1) & 1
        # Early: it comes from memory, though it is the same for the next block or was for the last.
        grad_factor = gl.load(given.factors + (row >> _SHARED))
        if group > 1:
            own_factor = factor * gl.load(given.row_values + 2 * given.plane + row)
        dp = transposed_product(v_tile, given.grads.index(slot), block_m, s_layout)
        # dK of the block before: dS out of registers would take twice as many, in halves, from turn to turn.
        ds = given.score_grads.index(other).slice(which * ROWS, ROWS, 0)
        dk = warpgroup_mma(ds, given.wide_queries.index(gl.where(turns > 0, other, slot)), dk, is_async=True)
        base = given.bases.index(slot).load(gl.SliceLayout(0, s_layout))
        p = gl.exp2(s * own_factor - base[None, :])
        if group > 1:
            start = row - of_head
        if left or right or ragged:  # noqa: SIM102 (where no block has an edge, there is no branch)
            if (start < whole) | (start >= parted):
                p = visible_part(p, start, since, upto, right or ragged, left)
        mbarrier.wait(given.wide.index(slot), phase)
        p16 = p.to(gl.bfloat16)
        p_operand = operand(p16, gl.DotOperandLayout(0, dv_layout, 2))
        dp, dk = warpgroup_mma_wait(0, [dp, dk])
        mbarrier.arrive(given.wide_free.index(other), count=1, pred=turns > 0)
        dv = warpgroup_mma(p_operand, given.wide_grads.index(slot), dv, is_async=True)
        delta = given.deltas.index(slot).load(gl.SliceLayout(0, s_layout))
        ds16 = times(p16, dp * grad_factor - delta[None, :])
        mbarrier.wait(given.grads_free.index(slot), phase ^ 1)
        given.score_grads.index(slot).slice(which * ROWS, ROWS, 0).store(ds16)
        fence_async_shared()
        mbarrier.arrive(given.grads_made.index(slot), count=1)
        dv, p_operand = warpgroup_mma_wait(0, [dv, p_operand])
        # dQ of the block before, which the first turn does not add; any numbers are multiplied then.
        mbarrier.wait(given.grads_made.index(other), other_phase)
        dq = _query_product(given.score_grads.index(other), given.wide_keys, which, dq_layout)
        # After the last block its own scores are computed again, and nothing reads them.
        if group == 1:
            next_turns = gl.where(step == blocks - 1, turns, turns + 1)
        else:
            next_turns = gl.minimum(turns + 1, blocks_of_all - 1)
        mbarrier.wait(given.narrow.index(next_turns & 1), (next_turns >> 1) & 1)
        s = transposed_product(k_tile, given.queries.index(next_turns & 1), block_m, s_layout)
        dq = warpgroup_mma_wait(1, [dq])
        mbarrier.arrive(given.grads_free.index(other), count=1, pred=turns > 0)
        if turns > 0:
            add_queries(given.dq_sums, dq, given.staged, other, last_row + own_row, own_column, which)
        s = warpgroup_mma_wait(0, [s])
        last_row = dq_top + start if dq_in_place else row
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
    dk = warpgroup_mma_wait(0, [warpgroup_mma(ds, given.wide_queries.index(last), dk, is_async=True)])
    mbarrier.arrive(given.wide_free.index(last), count=1)
    mbarrier.wait(given.grads_made.index(last), ((turns - 1) >> 1) & 1)
    dq = warpgroup_mma_wait(0, [_query_product(given.score_grads.index(last), given.wide_keys, which, dq_layout)])
    if dq_in_place:  # of one query head alone: no block but this one has rows that may be another sequence's
        dq = first_rows(dq, queries - first - (blocks - 1) * block_m - own_row)
    add_queries(given.dq_sums, dq, given.staged, last, last_row + own_row, own_column, which)

    top = first_key + which * ROWS
    tma.store_wait(0)  # the blocks of dQ that were staged are read, and their memory serves for dV and dK
    if tiles is not None:  # keys that no query asks for may hold anything
        dv = gl.where(queries > 0, dv, 0.0)
    store_whole(given.dv_out, dv, given.staged, which, at, top, seqlen_kv, given.size_v, dv_layout)
    if rotated:  # meanwhile the matrix comes
        mbarrier.wait(given.turn_filled, 0)
        dk = turned(dk, given.turning, head_dim, dk_layout)
    # Where heads share a key head the wide Q bears its descale.
    dk = dk * ((q_own if shares == 1 else 1.0) / k_own if group == 1 else given.exponent / factor)
    if tiles is not None:
        dk = gl.where(queries > 0, dk, 0.0)
    store_whole(given.dk_out, dk, given.staged, which, at, top, seqlen_kv, given.size, dk_layout)


@gluon.jit(
    do_not_specialize=[
        "k_batch", "k_head", "kv_heads", "seqlen_q", "seqlen_kv", "padded_q", "padded_kv", "plane", "before", "after",
    ]
)  # fmt: skip
def all_gradients_hopper(
    q, do, k, v, q_wide, do_wide, rows, turn, dq_sums, row_values, factors, k_descale, dk_out, dv_out, tiles,
    k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size, size_v,
    exponent, before, after,
    group: gl.constexpr, shares: gl.constexpr, left: gl.constexpr, right: gl.constexpr, ragged: gl.constexpr,
    rotated: gl.constexpr, registers: gl.constexpr, aligned: gl.constexpr, keys_in_place: gl.constexpr,
    dq_in_place: gl.constexpr,
):  # fmt: skip
    """dK (B, Hkv · shares, Skv, D) and dV of 128 keys and ``group`` query heads of a key head, and their part of dQ.

    A key head has ``shares`` times as many query heads, whose dK and dV are to be summed (``shares.summed``).
    ``dq_sums`` in bf16 is added to: dQ, rotated if Q was, (B·H, padded Sq, padded D) or as it is returned.  ``factors``
    turn dO·v of the e4m3 numbers into the units of delta, in which dQ is dS · K of the e4m3 numbers.  ``ragged``: the
    last program's keys are fewer.  ``tiles``: the table of sequences that have lengths of their own, or None.  With it
    all that is laid out has slots; but K and V are read where they lie if ``keys_in_place``, and dQ is added up where
    it is returned if ``dq_in_place``, which takes as many key heads as heads.  ``aligned`` says that a sequence's
    ``after`` is larger, and ``before`` smaller, by its keys less its queries.
    """
    if tiles is not None:  # noqa: SIM102 (where all lengths are alike there is no branch)
        if block_and_head()[0] >= gl.load(tiles):
            return
    block_m: gl.constexpr = q.block_type.shape[0]
    head_dim: gl.constexpr = k.block_type.shape[1]
    head_dim_v: gl.constexpr = v.block_type.shape[1]
    keys = gl.allocate_shared_memory(k.dtype, [CONSUMERS, ROWS, head_dim], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [CONSUMERS, ROWS, head_dim_v], v.layout)
    part: gl.constexpr = dq_sums.block_type.shape[1]  # columns of dQ that a warpgroup makes
    wide_keys = gl.allocate_shared_memory(
        gl.bfloat16, [head_dim // part, CONSUMERS * ROWS, part],
        gl.NVMMASharedLayout(swizzle_byte_width=2 * part, element_bitwidth=16, rank=2),
    )  # fmt: skip
    queries = gl.allocate_shared_memory(q.dtype, [2, block_m, head_dim], q.layout)
    grads = gl.allocate_shared_memory(do.dtype, [2, block_m, head_dim_v], do.layout)
    wide_queries = gl.allocate_shared_memory(q_wide.dtype, [2, block_m, head_dim], q_wide.layout)
    wide_grads = gl.allocate_shared_memory(do_wide.dtype, [2, block_m, head_dim_v], do_wide.layout)
    bases = gl.allocate_shared_memory(rows.dtype, [2, block_m], rows.layout)
    deltas = gl.allocate_shared_memory(rows.dtype, [2, block_m], rows.layout)
    score_grads = gl.allocate_shared_memory(
        gl.bfloat16, [2, CONSUMERS * ROWS, block_m],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
    )  # fmt: skip
    # Of a warpgroup's dQ: as many as are under way, or more, so that its dK or dV fits there in the end.
    blocks: gl.constexpr = max(STAGED, ROWS * max(head_dim, head_dim_v) // (dq_sums.block_type.shape[0] * part))
    staged = gl.allocate_shared_memory(
        dq_sums.dtype, [CONSUMERS * blocks, dq_sums.block_type.shape[0], part], dq_sums.layout
    )
    turning = wide_queries
    if rotated:
        turning = wide_queries._reinterpret(turn.dtype, [head_dim, head_dim], turn.layout)
    held = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn_filled = barrier_where(rotated, held)
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
        dq_sums, dk_out, dv_out, row_values, factors, k_descale, q, do, k, v, q_wide, do_wide, rows, turn,
        keys, values, wide_keys, queries, grads, wide_queries, wide_grads, bases, deltas, score_grads, staged,
        turning,
        held, narrow, wide, wide_free, grads_made, grads_free, turn_filled,
        k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size, size_v, exponent,
        before, after,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_sum_up, (
                0, given, tiles, group, shares, block_m, left, right, ragged, rotated, aligned, keys_in_place,
                dq_in_place,
            )),
            (_sum_up, (
                1, given, tiles, group, shares, block_m, left, right, ragged, rotated, aligned, keys_in_place,
                dq_in_place,
            )),
            (_load, (given, tiles, group, shares, block_m, left, right, rotated, aligned, keys_in_place)),
        ],
        [4, 1],
        [registers, 24],
    )  # fmt: skip
