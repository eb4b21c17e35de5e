"""The Hopper kernel that makes dK and dV with e4m3 in all products: as ``hopper.keys``, another schedule.

What it computes is said in ``backward.keys``.  From a ring come Q and dO for Sᵀ = K·Qᵀ and dPᵀ = V·dOᵀ, and their
transposed copies for the sums, all in e4m3.

Beneath the exponentials runs dP.  The products of the sums are taken in parts, for a fresh accumulator as large as dK
or dV finds no registers beside both: a part is added to its sum while the next one is under way, and S of the
next block beneath the last.  Nothing but S goes from block to block.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from .narrow import PART, added, narrow_operand, part_product, scaled, steps, store_parts, turned_parts, zero_parts
from .shared import (
    CONSUMERS,
    ROWS,
    advanced,
    barrier_where,
    block_and_head,
    span_of_queries,
    transposed_product,
    visible_part,
)

__all__ = ["narrow_key_gradients_hopper"]


@gluon.jit
def _load(
    brought, group: gl.constexpr, block_m: gl.constexpr, stages: gl.constexpr, left: gl.constexpr, right: gl.constexpr,
    rotated: gl.constexpr,
):  # fmt: skip
    """Brings K and V of the program's keys, then block after block of the queries that see one of them."""
    (
        q, do, k, v, q_across, do_across, rows, turn,
        keys, values, queries, grads, across_queries, across_grads, bases, deltas, turning,
        held, upright, across, emptied, turn_filled,
        seqlen_q, seqlen_kv, padded_q, padded_kv, plane, before, after,
    ) = brought  # fmt: skip
    block, kv_head = block_and_head()
    first_key = block * (CONSUMERS * ROWS)
    key_row = kv_head * padded_kv + first_key
    mbarrier.expect(held, CONSUMERS * (k.block_type.nbytes + v.block_type.nbytes))
    for i in gl.static_range(CONSUMERS):
        tma.async_copy_global_to_shared(k, [key_row + i * ROWS, 0], held, keys.index(i))
        tma.async_copy_global_to_shared(v, [key_row + i * ROWS, 0], held, values.index(i))
    span = span_of_queries(first_key, seqlen_q, seqlen_kv, before, after, block_m, left, right)
    blocks = span[3]
    slot, phase = 0, 1
    for member in range(group):
        head = kv_head * group + member
        query = span[0]
        for _step in range(blocks):
            row = head * padded_q + query
            mbarrier.wait(emptied.index(slot), phase)
            full = upright.index(slot)
            mbarrier.expect(full, q.block_type.nbytes + do.block_type.nbytes + 2 * rows.block_type.nbytes)
            tma.async_copy_global_to_shared(q, [row, 0], full, queries.index(slot))
            tma.async_copy_global_to_shared(rows, [row], full, bases.index(slot))
            tma.async_copy_global_to_shared(do, [row, 0], full, grads.index(slot))
            tma.async_copy_global_to_shared(rows, [plane + row], full, deltas.index(slot))
            full = across.index(slot)
            mbarrier.expect(full, q_across.block_type.nbytes + do_across.block_type.nbytes)
            top = head * do_across.block_type.shape[0]
            tma.async_copy_global_to_shared(do_across, [top, query], full, across_grads.index(slot))
            top = head * q_across.block_type.shape[0]
            tma.async_copy_global_to_shared(q_across, [top, query], full, across_queries.index(slot))
            query += block_m
            slot, phase = advanced(slot, phase, stages)
    if rotated:  # over the queries, when nothing reads them any more
        for _stage in gl.static_range(stages):
            mbarrier.wait(emptied.index(slot), phase)
            slot, phase = advanced(slot, phase, stages)
        parts: gl.constexpr = turning.shape[0]
        mbarrier.expect(turn_filled, parts * turn.block_type.nbytes)
        for i in gl.static_range(parts):
            tma.async_copy_global_to_shared(turn, [i * turn.block_type.shape[0], 0], turn_filled, turning.index(i))


@gluon.jit
def _summed(
    dk, dv, p8, ds8, do_tile, q_tile, share, unit, parts: gl.constexpr, parts_v: gl.constexpr, layout: gl.constexpr
):
    """dV and dK with a block's products, of which the last one's part of dK is not added yet: that, dK and dV.

    Each part is added while the next one is under way.
    """
    made = warpgroup_mma_wait(0, [part_product(p8, do_tile, 0, layout)])
    for i in gl.static_range(1, parts_v + parts):
        if i < parts_v:
            following = part_product(p8, do_tile, i, layout)
        else:
            following = part_product(ds8, q_tile, i - parts_v, layout)
        if i <= parts_v:
            dv = dv[1:] + (dv[0] + made * share,)  # noqa: RUF005
        else:
            dk = dk[1:] + (added(dk[0], made, unit),)  # noqa: RUF005
        made = warpgroup_mma_wait(0, [following])
    return made, dk, dv


@gluon.jit
def _sum_up(
    which: gl.constexpr, given, group: gl.constexpr, block_m: gl.constexpr, stages: gl.constexpr, left: gl.constexpr,
    right: gl.constexpr, rotated: gl.constexpr, shared: gl.constexpr, peak: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys."""
    (
        dk_out, dv_out, rows, descales, k_descale, v_descale,
        keys, values, queries, grads, across_queries, across_grads, bases, deltas, turning,
        held, upright, across, emptied, turn_filled,
        k_batch, k_head, v_batch, v_head, kv_heads, seqlen_q, seqlen_kv, padded_q, plane, size, size_v,
        scale, exponent, before, after,
    ) = given  # fmt: skip
    head_dim: gl.constexpr = keys.shape[2]
    parts: gl.constexpr = head_dim // PART
    parts_v: gl.constexpr = values.shape[2] // PART
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_m, 32])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    block, kv_head = block_and_head()
    first_key = block * (CONSUMERS * ROWS)
    first, whole, parted, blocks = span_of_queries(first_key, seqlen_q, seqlen_kv, before, after, block_m, left, right)
    batch, own = (kv_head // kv_heads).to(gl.int64), kv_head % kv_heads
    key = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    factor = exponent * gl.load(k_descale + batch * k_batch + own * k_head)
    k_tile, v_tile = keys.index(which), values.index(which)

    dk = zero_parts(parts, layout)
    dv = zero_parts(parts_v, layout)
    slot, phase = 0, 0
    q_own = 1.0
    mbarrier.wait(held, 0)
    mbarrier.wait(upright.index(0), 0)
    s = warpgroup_mma_wait(0, [transposed_product(k_tile, queries.index(0), block_m, s_layout)])
    for member in range(group):
        head = kv_head * group + member
        # dK so far is in units of the last head's descale.
        following = gl.load(rows + 2 * plane + head * padded_q)
        more = ()
        for i in gl.static_range(parts):
            more = more + (dk[i] * (q_own / following),)  # noqa: RUF005
        dk = more
        q_own = following
        own_factor = factor * q_own
        for step in range(blocks):
            start = first + step * block_m
            dp = transposed_product(v_tile, grads.index(slot), block_m, s_layout)
            share = gl.load(descales + (head * padded_q + start) // shared) * (1.0 / peak)
            base = bases.index(slot).load(gl.SliceLayout(0, s_layout))
            p = gl.exp2(s * own_factor - base[None, :])
            if left or right:  # noqa: SIM102 (where no block has an edge, there is no branch)
                if (start < whole) | (start >= parted):
                    here = first_key + which * ROWS - start
                    p = visible_part(p, 0, key + (here - after), key + (here + before), right, left)
            p8 = narrow_operand(p, left_layout)
            dp = warpgroup_mma_wait(0, [dp])
            delta = deltas.index(slot).load(gl.SliceLayout(0, s_layout))
            ds = p * (dp - delta[None, :])
            own_step = steps(ds)
            ds8 = narrow_operand(scaled(ds, own_step), left_layout)
            # Not before: ptxas would start products for which there are no registers yet.
            mbarrier.wait(across.index(slot), phase)
            unit = own_step * share
            q_tile, do_tile = across_queries.index(slot), across_grads.index(slot)
            made, dk, dv = _summed(dk, dv, p8, ds8, do_tile, q_tile, share, unit, parts, parts_v, layout)
            # After the last block its own scores are computed again, and nothing reads them.
            over = (step == blocks - 1) & (member == group - 1)
            next_slot, next_phase = advanced(slot, phase, stages)
            next_slot, next_phase = gl.where(over, slot, next_slot), gl.where(over, phase, next_phase)
            mbarrier.wait(upright.index(next_slot), next_phase)
            s = transposed_product(k_tile, queries.index(next_slot), block_m, s_layout)
            dk = dk[1:] + (added(dk[0], made, unit),)  # noqa: RUF005
            mbarrier.arrive(emptied.index(slot), count=1)
            s = warpgroup_mma_wait(0, [s])
            slot, phase = next_slot, next_phase

    width: gl.constexpr = head_dim if rotated else PART
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16 if rotated else 32])
    if rotated:
        mbarrier.wait(turn_filled, 0)
        dk = turned_parts(dk, turning, parts, dk_layout)
    unscaled = scale * q_own * gl.load(v_descale + batch * v_batch + own * v_head)
    at = kv_head.to(gl.int64) * seqlen_kv
    top = first_key + which * ROWS
    store_parts(dk_out, dk, unscaled, at, top, seqlen_kv, size, head_dim, dk_layout)
    store_parts(dv_out, dv, 1.0, at, top, seqlen_kv, size_v, PART * parts_v, layout)


@gluon.jit(
    do_not_specialize=[
        "k_batch", "k_head", "v_batch", "v_head", "kv_heads", "seqlen_q", "seqlen_kv", "padded_q", "padded_kv",
        "plane", "before", "after",
    ]
)  # fmt: skip
def narrow_key_gradients_hopper(
    q, do, k, v, q_across, do_across, rows, turn, row_values, descales, k_descale, v_descale, dk_out, dv_out,
    k_batch, k_head, v_batch, v_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size, size_v,
    scale, exponent, before, after,
    group: gl.constexpr, stages: gl.constexpr, left: gl.constexpr, right: gl.constexpr, rotated: gl.constexpr,
    shared: gl.constexpr, peak: gl.constexpr, registers: gl.constexpr,
):  # fmt: skip
    """dK (B, Hkv, Skv, D) and dV (B, Hkv, Skv, Dv), contiguous, of 128 keys of one key head.

    ``q_across`` and ``do_across`` are the transposed copies with interleaved tokens.
    """
    block_m: gl.constexpr = q.block_type.shape[0]
    head_dim: gl.constexpr = k.block_type.shape[1]
    head_dim_v: gl.constexpr = v.block_type.shape[1]
    keys = gl.allocate_shared_memory(k.dtype, [CONSUMERS, ROWS, head_dim], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [CONSUMERS, ROWS, head_dim_v], v.layout)
    queries = gl.allocate_shared_memory(q.dtype, [stages, block_m, head_dim], q.layout)
    grads = gl.allocate_shared_memory(do.dtype, [stages, block_m, head_dim_v], do.layout)
    across_queries = gl.allocate_shared_memory(q_across.dtype, [stages, head_dim, block_m], q_across.layout)
    across_grads = gl.allocate_shared_memory(do_across.dtype, [stages, head_dim_v, block_m], do_across.layout)
    bases = gl.allocate_shared_memory(rows.dtype, [stages, block_m], rows.layout)
    deltas = gl.allocate_shared_memory(rows.dtype, [stages, block_m], rows.layout)
    turning = across_queries
    if rotated:
        turning = across_queries._reinterpret(turn.dtype, [head_dim // PART, PART, head_dim], turn.layout)
    held = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn_filled = barrier_where(rotated, held)
    upright = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    across = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    mbarrier.init(held, count=1)
    for i in gl.static_range(stages):
        mbarrier.init(upright.index(i), count=1)
        mbarrier.init(across.index(i), count=1)
        mbarrier.init(emptied.index(i), count=CONSUMERS)

    brought = (
        q, do, k, v, q_across, do_across, rows, turn,
        keys, values, queries, grads, across_queries, across_grads, bases, deltas, turning,
        held, upright, across, emptied, turn_filled,
        seqlen_q, seqlen_kv, padded_q, padded_kv, plane, before, after,
    )  # fmt: skip
    given = (
        dk_out, dv_out, row_values, descales, k_descale, v_descale,
        keys, values, queries, grads, across_queries, across_grads, bases, deltas, turning,
        held, upright, across, emptied, turn_filled,
        k_batch, k_head, v_batch, v_head, kv_heads, seqlen_q, seqlen_kv, padded_q, plane, size, size_v,
        scale, exponent, before, after,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_sum_up, (0, given, group, block_m, stages, left, right, rotated, shared, peak)),
            (_sum_up, (1, given, group, block_m, stages, left, right, rotated, shared, peak)),
            (_load, (brought, group, block_m, stages, left, right, rotated)),
        ],
        [4, 1],
        [registers, 24],
    )
