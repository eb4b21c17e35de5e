"""What the partitions of the fused Hopper kernel do: a warp loads, and two warpgroups compute (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ..layout import BLOCK
from ..place import query_heads
from .fused_pieces import (
    add_dq,
    add_products,
    bring,
    done,
    done_with,
    in_registers,
    operands,
    query_products,
    scores,
    scores_of,
    store_pieces,
    sums_of_keys,
    widen_all,
)
from .fused_tiles import clear_behind, first_rows, store_whole, times, turn_back
from .sequences import asked_for, seen_by, sequence, where
from .shared import CONSUMERS, ROWS, block_and_head, span_of_queries, turned, visible_part

__all__ = ["load", "sum_up"]

_SHARED = gl.constexpr(BLOCK.bit_length() - 1)  # so many bits of a query are its place among those with one factor


@gluon.jit
def load(
    given, tiles, group: gl.constexpr, shares: gl.constexpr, block_m: gl.constexpr, left: gl.constexpr,
    right: gl.constexpr, rotated: gl.constexpr, aligned: gl.constexpr, keys_in_place: gl.constexpr,
    with_values: gl.constexpr,
):  # fmt: skip
    """Brings K and V of the program's keys, then block after block of the queries that see one of them."""
    of_keys: gl.constexpr = given.k[0].block_type.nbytes + (given.k[1].block_type.nbytes if len(given.k) > 1 else 0)
    of_values: gl.constexpr = given.v[0].block_type.nbytes + (given.v[1].block_type.nbytes if len(given.v) > 1 else 0)
    of_queries: gl.constexpr = given.q[0].block_type.nbytes + (given.q[1].block_type.nbytes if len(given.q) > 1 else 0)
    of_grads: gl.constexpr = given.do[0].block_type.nbytes + (given.do[1].block_type.nbytes if len(given.do) > 1 else 0)
    seqlen_q, seqlen_kv, before, after = given.seqlen_q, given.seqlen_kv, given.before, given.after
    block, share = block_and_head()
    kv_head = share // shares
    first_key = block * (CONSUMERS * ROWS)
    key_row, q_slot = kv_head * given.padded_kv, 0
    if tiles is not None:
        batch, first_key, _, k_start, seqlen_q, seqlen_kv, q_slot, k_slot, before, after = sequence(
            tiles, before, after, aligned
        )
        # A sequence without queries has a slot all the same, whose queries see nothing.
        seqlen_q = gl.maximum(seqlen_q, 1)
        key_row += (batch * given.kv_heads * given.padded_kv + k_start) if keys_in_place else k_slot
    key_row += first_key
    of_turn: gl.constexpr = given.turn.block_type.nbytes if rotated else 0
    mbarrier.expect(given.held, CONSUMERS * (of_keys + of_values) + of_turn)
    if rotated:  # over dQ's blocks, while none is staged
        tma.async_copy_global_to_shared(given.turn, [0, 0], given.held, given.turning_keys)
    for i in gl.static_range(CONSUMERS):
        bring(given.k, key_row + i * ROWS, given.held, given.keys, i)
        bring(given.v, key_row + i * ROWS, given.held, given.value_blocks, i)
    span = span_of_queries(first_key, seqlen_q, seqlen_kv, before, after, block_m, left, right)
    first, blocks = span[0], span[3]
    turns = 0
    first_head, heads = query_heads(share, group, shares)
    for member in range(heads):
        row = (first_head + member) * given.padded_q + q_slot + first
        for _step in range(blocks):
            slot, phase = turns & 1, (turns >> 1) & 1 ^ 1
            # The slot's last block has its dS: nothing reads its e4m3 tiles any more.
            mbarrier.wait(given.grads_made.index(slot), phase)
            full = given.narrow.index(slot)
            mbarrier.expect(full, of_queries + of_grads + 2 * given.rows.block_type.nbytes)
            bring(given.q, row, full, given.queries, slot)
            tma.async_copy_global_to_shared(given.rows, [row], full, given.bases.index(slot))
            bring(given.do, row, full, given.grads, slot)
            tma.async_copy_global_to_shared(given.rows, [given.plane + row], full, given.deltas.index(slot))
            mbarrier.wait(given.wide_free.index(slot), phase)
            full = given.wide.index(slot)
            mbarrier.expect(full, 2 * (of_queries + (of_grads if with_values else 0)))
            if with_values:
                bring(given.do_wide, row, full, given.wide_grads, slot)
            bring(given.q_wide, row, full, given.wide_queries, slot)
            row += block_m
            turns += 1
    if rotated:  # over the queries, when nothing reads them any more
        for more in gl.static_range(2):
            mbarrier.wait(given.wide_free.index((turns + more) & 1), ((turns + more) >> 1) & 1 ^ 1)
        mbarrier.expect(given.turn_filled, of_turn)
        tma.async_copy_global_to_shared(given.turn, [0, 0], given.turn_filled, given.turning)


@gluon.jit
def _store(
    which: gl.constexpr, given, dk, dv, over, under, at, top, seqlen_kv, queries, tiles, rotated: gl.constexpr
):  # fmt: skip
    """Writes the gradients of a warpgroup's keys, of which ``top`` is the first; dK times ``over`` / ``under``."""
    if len(dk) > 1:
        unit = over / under
        dk = asked_for(dk[0] * unit, queries, tiles), asked_for(dk[1] * unit, queries, tiles)
        store_pieces(given.dk_out, dk, at, top, seqlen_kv, given.size)
        if len(dv) > 0:
            dv = asked_for(dv[0], queries, tiles), asked_for(dv[1], queries, tiles)
            store_pieces(given.dv_out, dv, at, top, seqlen_kv, given.size_v)
        tma.store_wait(0)
    else:
        tma.store_wait(0)  # the blocks of dQ that were staged are read, and their memory serves for dV and dK
        dk, dv = dk[0], asked_for(dv[0], queries, tiles)
        store_whole(given.dv_out, dv, given.staged[0], which, at, top, seqlen_kv, 0, given.size_v)
        if rotated:  # meanwhile the matrix comes
            mbarrier.wait(given.turn_filled, 0)
            layout: gl.constexpr = dk.type.layout
            dk = turned(dk, given.turning, dk.shape[1], layout)
        dk = asked_for(dk * (over / under), queries, tiles)
        store_whole(given.dk_out, dk, given.staged[0], which, at, top, seqlen_kv, 0, given.size)


@gluon.jit
def sum_up(
    which: gl.constexpr, given, tiles, group: gl.constexpr, shares: gl.constexpr, block_m: gl.constexpr,
    left: gl.constexpr, right: gl.constexpr, ragged: gl.constexpr, rotated: gl.constexpr, aligned: gl.constexpr,
    keys_in_place: gl.constexpr, dq_in_place: gl.constexpr, with_values: gl.constexpr, scaled_up: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys, and this warpgroup's part of what 128 keys add to dQ."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_m, 32])
    # How fast a turn is depends on where the compiler puts exponentials among the products that it starts.  Measured on
    # an H200: without a mask it is best if one warpgroup starts all products first, and under a mask if neither does.
    unmasked: gl.constexpr = scaled_up and len(given.keys) == 1 and not (left or right)
    each: gl.constexpr = (group + shares - 1) // shares  # query heads of a share, but perhaps of the last
    # Whether Q's descale is loaded at every turn, though a head has one: faster with more than four query heads or a
    # window, and slower with fewer; of sequences of unequal length it is as fast.
    by_turn: gl.constexpr = each > 1 and not scaled_up and (left or each > 4 or tiles is not None)
    share = block_and_head()[1]
    first_key, queries, seqlen_q, seqlen_kv, before, after, q_slot, dq_top, at, k_place = where(
        given, tiles, share, shares, aligned, dq_in_place
    )
    first, whole, parted, blocks = span_of_queries(first_key, seqlen_q, seqlen_kv, before, after, block_m, left, right)
    key = first_key + which * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    since, upto, whole = seen_by(key, first_key, whole, seqlen_kv, before, after, right, ragged)
    k_own = gl.load(k_place)
    factor = given.exponent * k_own

    dk = sums_of_keys(given.wide_queries)
    if with_values:
        dv = sums_of_keys(given.wide_grads)
    first_head, heads = query_heads(share, group, shares)
    turns, last_row, blocks_of_all = 0, 0, heads * blocks
    if each > 1:
        of_head = first_head * given.padded_q + q_slot
        row = of_head + first
    # Before the first block there is none whose dS to multiply: zeros, with the queries that are there.
    given.score_grads.index(1).slice(which * ROWS, ROWS, 0).store(gl.zeros([ROWS, block_m], gl.bfloat16, s_layout))
    mbarrier.wait(given.held, 0)
    if keys_in_place:
        own_keys = seqlen_kv - first_key - which * ROWS
        if own_keys < ROWS:
            clear_behind(given.keys[0].index(which), own_keys)
            clear_behind(given.value_blocks[0].index(which), own_keys)
            fence_async_shared()
    # The other warpgroup's wide keys are there when its first dS is.
    if rotated:  # while the queries come
        turn_back(given.keys[0].index(which), given.wide_keys[0], given.turning_keys, which)
    mbarrier.wait(given.narrow.index(0), 0)
    s = scores(given.keys, given.queries, 0, which, block_m, s_layout)
    if not with_values:
        v = in_registers(given.value_blocks, which, s_layout)
    if not rotated:
        widen_all(given.keys, given.wide_keys, which)
    fence_async_shared()
    s = warpgroup_mma_wait(0, [s])
    mbarrier.wait(given.wide.index(0), 0)
    if scaled_up:
        query = first_head * given.padded_q + q_slot + first
        grad_factor = gl.load(given.factors + (query >> _SHARED))
        q_own = gl.load(given.row_values + 2 * given.plane + query)
    elif not by_turn:
        q_own = gl.load(given.row_values + 2 * given.plane + first_head * given.padded_q + q_slot)
    if not by_turn:
        own_factor = factor * q_own
    if unmasked:  # this barrier, and one where the first turn adds nothing, save Triton two in every turn
        gl.thread_barrier()
    # One loop for all query heads, and one unit for the dK of all: loops in each other, and a dK that is rescaled where
    # the next head begins, spill registers.  Of one head alone that took up to 1.08 of the time on an H100.
    for step in range(blocks_of_all):
        if each == 1:
            start = first + step * block_m
            row = share * given.padded_q + q_slot + start
        else:
            turns = step
        slot, phase = turns & 1, (turns >> 1) & 1
        other, other_phase = slot ^ 1, ((turns - 1) >> 1) & 1
        if not scaled_up:
            # Early: it comes from memory, though it is the same for the next block or was for the last.
            grad_factor = gl.load(given.factors + (row >> _SHARED))
        if by_turn:
            own_factor = factor * gl.load(given.row_values + 2 * given.plane + row)
        if with_values:
            dp = scores(given.value_blocks, given.grads, slot, which, block_m, s_layout)
        else:
            dp = scores_of(v, given.grads, slot, block_m, s_layout)
        # dK of the block before: dS out of registers would take twice as many, in halves, from turn to turn.
        ds = given.score_grads.index(other).slice(which * ROWS, ROWS, 0)
        dk = add_products((ds, ds), given.wide_queries, gl.where(turns > 0, other, slot), dk)
        if unmasked and which == 1:
            s = warpgroup_mma_wait(2, [s])  # waits for nothing, but no exponential is computed before it
        base = given.bases.index(slot).load(gl.SliceLayout(0, s_layout))
        p = gl.exp2(s * own_factor - base[None, :])
        if each > 1:
            start = row - of_head
        if left or right or ragged:  # noqa: SIM102 (where no block has an edge, there is no branch)
            # Without a window nothing ends at ``parted``, and no register holds it.
            if ((start < whole) | (start >= parted)) if left else (start < whole):
                p = visible_part(p, start, since, upto, right or ragged, left)
        mbarrier.wait(given.wide.index(slot), phase)
        p16 = p.to(gl.bfloat16)
        if with_values:
            p_operands = operands(p16, dv)
        dp, dk = done_with((dp,), dk)
        mbarrier.arrive(given.wide_free.index(other), count=1, pred=turns > 0)
        if with_values:
            dv = add_products(p_operands, given.wide_grads, slot, dv)
        delta = given.deltas.index(slot).load(gl.SliceLayout(0, s_layout))
        ds16 = times(p16, dp * grad_factor - delta[None, :])
        mbarrier.wait(given.grads_free.index(slot), phase ^ 1)
        given.score_grads.index(slot).slice(which * ROWS, ROWS, 0).store(ds16)
        fence_async_shared()
        mbarrier.arrive(given.grads_made.index(slot), count=1)
        if with_values:
            dv = done_with(p_operands, dv)[1]
        # dQ of the block before, which the first turn does not add; any numbers are multiplied then.
        mbarrier.wait(given.grads_made.index(other), other_phase)
        dq = query_products(given, other, which, with_values)
        # After the last block its own scores are computed again, and nothing reads them.
        if each == 1:
            next_turns = gl.where(step == blocks - 1, turns, turns + 1)
        else:
            next_turns = gl.minimum(turns + 1, blocks_of_all - 1)
        mbarrier.wait(given.narrow.index(next_turns & 1), (next_turns >> 1) & 1)
        s = scores(given.keys, given.queries, next_turns & 1, which, block_m, s_layout)
        dq = done(len(given.keys), dq)  # the scores may be under way
        mbarrier.arrive(given.grads_free.index(other), count=1, pred=turns > 0)
        if turns > 0:
            add_dq(given, dq, other, last_row, which, with_values)
        elif unmasked:
            gl.thread_barrier()
        s = warpgroup_mma_wait(0, [s])
        last_row = dq_top + start if dq_in_place else row
        if each == 1:
            turns += 1
        else:
            row += block_m
            if row == of_head + first + blocks * block_m:  # the next query head
                of_head += given.padded_q
                row = of_head + first
                if not by_turn:
                    place = given.row_values + 2 * given.plane + of_head
                    own_factor = factor * gl.load(place, mask=step + 1 < blocks_of_all, other=1.0)
    if each > 1:
        turns = blocks_of_all
    last = (turns - 1) & 1
    ds = given.score_grads.index(last).slice(which * ROWS, ROWS, 0)
    dk = add_products((ds, ds), given.wide_queries, last, dk)
    if len(dk) == 1:
        dk = done(0, dk)
        mbarrier.arrive(given.wide_free.index(last), count=1)
    mbarrier.wait(given.grads_made.index(last), ((turns - 1) >> 1) & 1)
    dq = query_products(given, last, which, with_values)
    if len(dk) > 1:
        dk = done(0, dk)
        mbarrier.arrive(given.wide_free.index(last), count=1)
    dq = done(0, dq)
    if dq_in_place:  # of one query head alone: no block but this one has rows that may be another sequence's
        own_row: gl.constexpr = which * (block_m // CONSUMERS) if given.wide_keys[0].shape[0] == 1 else 0
        dq = (first_rows(dq[0], queries - first - (blocks - 1) * block_m - own_row),)
    add_dq(given, dq, last, last_row, which, with_values)

    # Where heads share a key head the wide Q bears its descale.
    if by_turn:
        over, under = given.exponent, factor
    else:
        over, under = q_own if group == 1 else 1.0, k_own
    if not with_values:
        dv = ()
    _store(which, given, dk, dv, over, under, at, first_key + which * ROWS, seqlen_kv, queries, tiles, rotated)
