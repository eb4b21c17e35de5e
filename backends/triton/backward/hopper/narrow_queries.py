"""The Hopper kernel that makes dQ with e4m3 in all products: as ``hopper.queries``, its sum in parts.

What it computes is said in ``backward.keys``.  From a ring come K and V for S = Q·Kᵀ and dP = dO·Vᵀ, and K's transposed
copy for the sum, all in e4m3.  dS goes from block to block: its product runs beneath the next exponentials, and S of
the block after that beneath the next dS.  Three blocks are in use at that time: the ring needs three stages at least.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from .loading import load_for_queries
from .narrow import PART, added, narrow_operand, part_product, scaled, steps, store_parts, turned_parts, zero_parts
from .shared import (
    CONSUMERS,
    ROWS,
    advanced,
    ring,
    span_of_keys,
    top_query_and_head,
    transposed_product,
    visible_part,
)

__all__ = ["narrow_query_gradients_hopper"]

# What partitions are given: tensors and descriptors, shared memory (a Triton tuple has `values` of its own), barriers,
# numbers.
_Given = namedtuple(
    "_Given",
    "dq_out row_values descales k_descale v_descale q do k v k_further turn "
    "queries grads keys value_blocks further_keys turning "
    "held filled further emptied turn_filled "
    "k_batch k_head v_batch v_head heads group seqlen_q seqlen_kv padded_q padded_kv plane size scale exponent "
    "before after",
)


@gluon.jit
def _sum_up(
    which: gl.constexpr, given, block_n: gl.constexpr, stages: gl.constexpr, left: gl.constexpr, right: gl.constexpr,
    ragged: gl.constexpr, rotated: gl.constexpr, shared: gl.constexpr, peak: gl.constexpr,
):  # fmt: skip
    """dQ of 64 queries."""
    head_dim: gl.constexpr = given.queries.shape[2]
    parts: gl.constexpr = head_dim // PART
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 32])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    top, head = top_query_and_head()
    first, whole, parted, blocks = span_of_keys(
        top, given.seqlen_q, given.seqlen_kv, given.before, given.after, block_n, left, right
    )
    batch, own = (head // given.heads).to(gl.int64), head % given.heads // given.group
    query = top + which * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    since = query - given.before
    upto = gl.minimum(query + given.after if right else query + given.seqlen_kv, given.seqlen_kv - 1)
    rows = given.row_values + head.to(gl.int64) * given.padded_q
    base, delta = gl.load(rows + query), gl.load(rows + given.plane + query)
    k_own = gl.load(given.k_descale + batch * given.k_batch + own * given.k_head)
    factor = given.exponent * k_own * gl.load(rows + 2 * given.plane)
    share = gl.load(given.descales + (head * given.padded_q + top) // shared) * (1.0 / peak)
    q_tile, do_tile = given.queries.index(which), given.grads.index(which)

    dq = zero_parts(parts, layout)
    slot, phase = 0, 0
    mbarrier.wait(given.held, 0)
    mbarrier.wait(given.filled.index(0), 0)
    s = warpgroup_mma_wait(0, [transposed_product(q_tile, given.keys.index(0), block_n, s_layout)])
    # Before the first block there is none whose dS to multiply: zeros, with any keys that are there.
    # It is in fp32 as long as no product takes it: Triton carries single bytes from block to block one by one.
    ds = gl.zeros([ROWS, block_n], gl.float32, s_layout)
    unit = steps(ds)
    previous = 0
    mbarrier.wait(given.further.index(0), 0)
    for step in range(blocks):
        start = first + step * block_n
        # dP comes between the parts of dQ: it is wanted before the last of them.
        ds8, tile = narrow_operand(ds, left_layout), given.further_keys.index(previous)
        made = (part_product(ds8, tile, 0, layout),)
        dp = transposed_product(do_tile, given.value_blocks.index(slot), block_n, s_layout)
        for i in gl.static_range(1, parts):
            made = made + (part_product(ds8, tile, i, layout),)  # noqa: RUF005
        p = gl.exp2(s * factor - base[:, None])
        if left or right or ragged:  # noqa: SIM102 (where no block has an edge, there is no branch)
            if (start < whole) | (start >= parted):
                p = visible_part(p, start, since, upto, left, right or ragged)
        sums = (added(dq[0], warpgroup_mma_wait(parts, [made[0]]), unit),)
        # After the last block its own scores are computed again, and nothing reads them.
        over = step == blocks - 1
        next_slot, next_phase = advanced(slot, phase, stages)
        next_slot, next_phase = gl.where(over, slot, next_slot), gl.where(over, phase, next_phase)
        dp = warpgroup_mma_wait(parts - 1, [dp])
        mbarrier.wait(given.filled.index(next_slot), next_phase)
        s = transposed_product(q_tile, given.keys.index(next_slot), block_n, s_layout)
        ds = p * (dp - delta[:, None])
        for i in gl.static_range(1, parts):
            sums = sums + (added(dq[i], warpgroup_mma_wait(parts - i, [made[i]]), unit),)  # noqa: RUF005
        dq = sums
        mbarrier.arrive(given.emptied.index(previous), count=1, pred=step > 0)
        unit = steps(ds)
        ds = scaled(ds, unit)
        mbarrier.wait(given.further.index(slot), phase)
        s = warpgroup_mma_wait(0, [s])
        previous, slot, phase = slot, next_slot, next_phase
    sums = ()
    ds8 = narrow_operand(ds, left_layout)
    for i in gl.static_range(parts):
        made = warpgroup_mma_wait(0, [part_product(ds8, given.further_keys.index(previous), i, layout)])
        sums = sums + (added(dq[i], made, unit),)  # noqa: RUF005
    dq = sums
    mbarrier.arrive(given.emptied.index(previous), count=1)

    width: gl.constexpr = head_dim if rotated else PART
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16 if rotated else 32])
    if rotated:
        mbarrier.wait(given.turn_filled, 0)
        dq = turned_parts(dq, given.turning, parts, dq_layout)
    unscaled = given.scale * share * k_own * gl.load(given.v_descale + batch * given.v_batch + own * given.v_head)
    at = head.to(gl.int64) * given.seqlen_q
    store_parts(given.dq_out, dq, unscaled, at, top + which * ROWS, given.seqlen_q, given.size, head_dim, dq_layout)


@gluon.jit(
    do_not_specialize=[
        "k_batch", "k_head", "v_batch", "v_head", "heads", "group", "seqlen_q", "seqlen_kv", "padded_q", "padded_kv",
        "plane", "before", "after",
    ]
)  # fmt: skip
def narrow_query_gradients_hopper(
    q, do, k, v, k_across, turn, row_values, descales, k_descale, v_descale, dq_out,
    k_batch, k_head, v_batch, v_head, heads, group, seqlen_q, seqlen_kv, padded_q, padded_kv, plane,
    size: gl.constexpr,
    scale, exponent, before, after,
    stages: gl.constexpr, left: gl.constexpr, right: gl.constexpr, ragged: gl.constexpr, rotated: gl.constexpr,
    shared: gl.constexpr, peak: gl.constexpr, registers: gl.constexpr,
):  # fmt: skip
    """dQ (B, H, Sq, D), contiguous, of 128 queries of one head; ``ragged``: the last block of keys is not full.

    ``k_across`` is the transposed copy with interleaved tokens.
    """
    block_n: gl.constexpr = k.block_type.shape[0]
    head_dim: gl.constexpr = q.block_type.shape[1]
    head_dim_v: gl.constexpr = do.block_type.shape[1]
    queries = gl.allocate_shared_memory(q.dtype, [CONSUMERS, ROWS, head_dim], q.layout)
    grads = gl.allocate_shared_memory(do.dtype, [CONSUMERS, ROWS, head_dim_v], do.layout)
    keys = gl.allocate_shared_memory(k.dtype, [stages, block_n, head_dim], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [stages, block_n, head_dim_v], v.layout)
    across_keys = gl.allocate_shared_memory(k_across.dtype, [stages, head_dim, block_n], k_across.layout)
    turning = across_keys
    if rotated:
        turning = across_keys._reinterpret(turn.dtype, [head_dim // PART, PART, head_dim], turn.layout)
    held, filled, further, emptied, turn_filled = ring(stages, rotated)
    given = _Given(
        dq_out, row_values, descales, k_descale, v_descale, q, do, k, v, k_across, turn,
        queries, grads, keys, values, across_keys, turning,
        held, filled, further, emptied, turn_filled,
        k_batch, k_head, v_batch, v_head, heads, group, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size,
        scale, exponent, before, after,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_sum_up, (0, given, block_n, stages, left, right, ragged, rotated, shared, peak)),
            (_sum_up, (1, given, block_n, stages, left, right, ragged, rotated, shared, peak)),
            (load_for_queries, (given, block_n, stages, left, right, rotated, True)),
        ],
        [4, 1],
        [registers, 24],
    )
