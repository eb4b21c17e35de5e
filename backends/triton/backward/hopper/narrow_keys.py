"""The Hopper kernel that makes dK and dV with e4m3 in all products: as ``hopper.keys``, another schedule.

What it computes is said in ``backward.keys``.  From a ring come Q and dO for Sᵀ = K·Qᵀ and dPᵀ = V·dOᵀ, and their
transposed copies for the sums, all in e4m3.

Beneath the exponentials runs dP.  The products of the sums are taken in parts, for a fresh accumulator as large as dK
or dV finds no registers beside both: a part is added to its sum while the next one is under way, and S of the
next block beneath the last.  Nothing but S goes from block to block.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from .loading import load_for_keys
from .narrow import PART, added, narrow_operand, part_product, scaled, steps, store_parts, turned_parts, zero_parts
from .shared import (
    CONSUMERS,
    ROWS,
    advanced,
    block_and_head,
    ring,
    span_of_queries,
    transposed_product,
    visible_part,
)

__all__ = ["narrow_key_gradients_hopper"]

# What partitions are given: tensors and descriptors, shared memory (a Triton tuple has `values` of its own), barriers,
# numbers.
_Given = namedtuple(
    "_Given",
    "dk_out dv_out row_values descales k_descale v_descale q do k v q_further do_further rows turn "
    "keys value_blocks queries grads further_queries further_grads bases deltas turning "
    "held filled further emptied turn_filled "
    "k_batch k_head v_batch v_head kv_heads seqlen_q seqlen_kv padded_q padded_kv plane size size_v scale "
    "exponent before after",
)


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
    head_dim: gl.constexpr = given.keys.shape[2]
    parts: gl.constexpr = head_dim // PART
    parts_v: gl.constexpr = given.value_blocks.shape[2] // PART
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_m, 32])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    block, kv_head = block_and_head()
    first_key = block * (CONSUMERS * ROWS)
    first, whole, parted, blocks = span_of_queries(
        first_key, given.seqlen_q, given.seqlen_kv, given.before, given.after, block_m, left, right
    )
    batch, own = (kv_head // given.kv_heads).to(gl.int64), kv_head % given.kv_heads
    key = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    factor = given.exponent * gl.load(given.k_descale + batch * given.k_batch + own * given.k_head)
    k_tile, v_tile = given.keys.index(which), given.value_blocks.index(which)

    dk = zero_parts(parts, layout)
    dv = zero_parts(parts_v, layout)
    slot, phase = 0, 0
    q_own = 1.0
    mbarrier.wait(given.held, 0)
    mbarrier.wait(given.filled.index(0), 0)
    s = warpgroup_mma_wait(0, [transposed_product(k_tile, given.queries.index(0), block_m, s_layout)])
    for member in range(group):
        head = kv_head * group + member
        # dK so far is in units of the last head's descale.
        following = gl.load(given.row_values + 2 * given.plane + head * given.padded_q)
        more = ()
        for i in gl.static_range(parts):
            more = more + (dk[i] * (q_own / following),)  # noqa: RUF005
        dk = more
        q_own = following
        own_factor = factor * q_own
        for step in range(blocks):
            start = first + step * block_m
            dp = transposed_product(v_tile, given.grads.index(slot), block_m, s_layout)
            share = gl.load(given.descales + (head * given.padded_q + start) // shared) * (1.0 / peak)
            base = given.bases.index(slot).load(gl.SliceLayout(0, s_layout))
            p = gl.exp2(s * own_factor - base[None, :])
            if left or right:  # noqa: SIM102 (where no block has an edge, there is no branch)
                if (start < whole) | (start >= parted):
                    here = first_key + which * ROWS - start
                    p = visible_part(p, 0, key + (here - given.after), key + (here + given.before), right, left)
            p8 = narrow_operand(p, left_layout)
            dp = warpgroup_mma_wait(0, [dp])
            delta = given.deltas.index(slot).load(gl.SliceLayout(0, s_layout))
            ds = p * (dp - delta[None, :])
            own_step = steps(ds)
            ds8 = narrow_operand(scaled(ds, own_step), left_layout)
            # Not before: ptxas would start products for which there are no registers yet.
            mbarrier.wait(given.further.index(slot), phase)
            unit = own_step * share
            q_tile, do_tile = given.further_queries.index(slot), given.further_grads.index(slot)
            made, dk, dv = _summed(dk, dv, p8, ds8, do_tile, q_tile, share, unit, parts, parts_v, layout)
            # After the last block its own scores are computed again, and nothing reads them.
            over = (step == blocks - 1) & (member == group - 1)
            next_slot, next_phase = advanced(slot, phase, stages)
            next_slot, next_phase = gl.where(over, slot, next_slot), gl.where(over, phase, next_phase)
            mbarrier.wait(given.filled.index(next_slot), next_phase)
            s = transposed_product(k_tile, given.queries.index(next_slot), block_m, s_layout)
            dk = dk[1:] + (added(dk[0], made, unit),)  # noqa: RUF005
            mbarrier.arrive(given.emptied.index(slot), count=1)
            s = warpgroup_mma_wait(0, [s])
            slot, phase = next_slot, next_phase

    width: gl.constexpr = head_dim if rotated else PART
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16 if rotated else 32])
    if rotated:
        mbarrier.wait(given.turn_filled, 0)
        dk = turned_parts(dk, given.turning, parts, dk_layout)
    unscaled = given.scale * q_own * gl.load(given.v_descale + batch * given.v_batch + own * given.v_head)
    at = kv_head.to(gl.int64) * given.seqlen_kv
    top = first_key + which * ROWS
    store_parts(given.dk_out, dk, unscaled, at, top, given.seqlen_kv, given.size, head_dim, dk_layout)
    store_parts(given.dv_out, dv, 1.0, at, top, given.seqlen_kv, given.size_v, PART * parts_v, layout)


@gluon.jit(
    do_not_specialize=[
        "k_batch", "k_head", "v_batch", "v_head", "kv_heads", "seqlen_q", "seqlen_kv", "padded_q", "padded_kv",
        "plane", "before", "after",
    ]
)  # fmt: skip
def narrow_key_gradients_hopper(
    q, do, k, v, q_across, do_across, rows, turn, row_values, descales, k_descale, v_descale, dk_out, dv_out,
    k_batch, k_head, v_batch, v_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane,
    size: gl.constexpr, size_v: gl.constexpr, scale, exponent, before, after,
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
    held, filled, further, emptied, turn_filled = ring(stages, rotated)
    given = _Given(
        dk_out, dv_out, row_values, descales, k_descale, v_descale, q, do, k, v, q_across, do_across, rows, turn,
        keys, values, queries, grads, across_queries, across_grads, bases, deltas, turning,
        held, filled, further, emptied, turn_filled,
        k_batch, k_head, v_batch, v_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size, size_v,
        scale, exponent, before, after,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_sum_up, (0, given, group, block_m, stages, left, right, rotated, shared, peak)),
            (_sum_up, (1, given, group, block_m, stages, left, right, rotated, shared, peak)),
            (load_for_keys, (given, group, block_m, stages, left, right, rotated, True)),
        ],
        [4, 1],
        [registers, 24],
    )
