"""The Hopper kernel that makes dQ: a warp of its own loads, two warpgroups with 64 queries each compute (Gluon).

What it computes is said in ``backward.keys``, how in ``hopper.keys``.  There is one sum instead of two, so
registers are left for Q·Kᵀ of the next block, which runs beneath dS of this one.  Three blocks are in use at that
time: the ring needs three stages at least.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .loading import load_for_queries
from .shared import (
    CONSUMERS,
    ROWS,
    advanced,
    operand,
    ring,
    span_of_keys,
    store,
    top_query_and_head,
    transposed_product,
    turned,
    visible_part,
)

__all__ = ["query_gradients_hopper"]

# What partitions are given: tensors and descriptors, shared memory (a Triton tuple has `values` of its own), barriers,
# numbers.
_Given = namedtuple(
    "_Given",
    "dq_out row_values k_descale v_descale q do k v k_further turn "
    "queries grads keys value_blocks further_keys turning "
    "held filled further emptied turn_filled "
    "k_batch k_head v_batch v_head heads group seqlen_q seqlen_kv padded_q padded_kv plane size scale exponent "
    "before after",
)


@gluon.jit
def _sum_up(
    which: gl.constexpr, given, block_n: gl.constexpr, stages: gl.constexpr, left: gl.constexpr, right: gl.constexpr,
    ragged: gl.constexpr, rotated: gl.constexpr,
):  # fmt: skip
    """dQ of 64 queries."""
    head_dim: gl.constexpr = given.queries.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 32])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])
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
    q_tile, do_tile = given.queries.index(which), given.grads.index(which)

    dq = gl.zeros([ROWS, head_dim], gl.float32, dq_layout)
    slot, phase = 0, 0
    mbarrier.wait(given.held, 0)
    mbarrier.wait(given.filled.index(0), 0)
    s = warpgroup_mma_wait(0, [transposed_product(q_tile, given.keys.index(0), block_n, s_layout)])
    # Before the first block there is none whose dS to multiply: zeros, with any keys that are there.
    ds16 = operand(gl.zeros([ROWS, block_n], gl.float32, s_layout), gl.DotOperandLayout(0, dq_layout, 2))
    previous = 0
    mbarrier.wait(given.further.index(0), 0)
    for step in range(blocks):
        start = first + step * block_n
        dp = transposed_product(do_tile, given.value_blocks.index(slot), block_n, s_layout)
        dq = warpgroup_mma(ds16, given.further_keys.index(previous), dq, is_async=True)
        p = gl.exp2(s * factor - base[:, None])
        if left or right or ragged:  # noqa: SIM102 (where no block has an edge, there is no branch)
            if (start < whole) | (start >= parted):
                p = visible_part(p, start, since, upto, left, right or ragged)
        # After the last block its own scores are computed again, and nothing reads them.
        over = step == blocks - 1
        next_slot, next_phase = advanced(slot, phase, stages)
        next_slot, next_phase = gl.where(over, slot, next_slot), gl.where(over, phase, next_phase)
        mbarrier.wait(given.filled.index(next_slot), next_phase)
        s = transposed_product(q_tile, given.keys.index(next_slot), block_n, s_layout)
        dp, dq = warpgroup_mma_wait(1, [dp, dq])
        mbarrier.arrive(given.emptied.index(previous), count=1, pred=step > 0)
        ds16 = operand(p * (dp - delta[:, None]), gl.DotOperandLayout(0, dq_layout, 2))
        mbarrier.wait(given.further.index(slot), phase)
        s = warpgroup_mma_wait(0, [s])
        previous, slot, phase = slot, next_slot, next_phase
    dq = warpgroup_mma(ds16, given.further_keys.index(previous), dq, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])
    mbarrier.arrive(given.emptied.index(previous), count=1)

    if rotated:
        mbarrier.wait(given.turn_filled, 0)
        dq = turned(dq, given.turning, head_dim, dq_layout)
    dq = dq * (given.scale * k_own * gl.load(given.v_descale + batch * given.v_batch + own * given.v_head))
    at = head.to(gl.int64) * given.seqlen_q
    store(given.dq_out, dq, at, top + which * ROWS, given.seqlen_q, 0, given.size, dq_layout)


@gluon.jit(
    do_not_specialize=[
        "k_batch", "k_head", "v_batch", "v_head", "heads", "group", "seqlen_q", "seqlen_kv", "padded_q", "padded_kv",
        "plane", "before", "after",
    ]
)  # fmt: skip
def query_gradients_hopper(
    q, do, k, v, k_wide, turn, row_values, k_descale, v_descale, dq_out,
    k_batch, k_head, v_batch, v_head, heads, group, seqlen_q, seqlen_kv, padded_q, padded_kv, plane,
    size: gl.constexpr,
    scale, exponent, before, after,
    stages: gl.constexpr, left: gl.constexpr, right: gl.constexpr, ragged: gl.constexpr, rotated: gl.constexpr,
    registers: gl.constexpr,
):  # fmt: skip
    """dQ (B, H, Sq, D), contiguous, of 128 queries of one head; ``ragged``: the last block of keys is not full."""
    block_n: gl.constexpr = k.block_type.shape[0]
    head_dim: gl.constexpr = q.block_type.shape[1]
    head_dim_v: gl.constexpr = do.block_type.shape[1]
    queries = gl.allocate_shared_memory(q.dtype, [CONSUMERS, ROWS, head_dim], q.layout)
    grads = gl.allocate_shared_memory(do.dtype, [CONSUMERS, ROWS, head_dim_v], do.layout)
    keys = gl.allocate_shared_memory(k.dtype, [stages, block_n, head_dim], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [stages, block_n, head_dim_v], v.layout)
    wide_keys = gl.allocate_shared_memory(k_wide.dtype, [stages, block_n, head_dim], k_wide.layout)
    turning = wide_keys
    if rotated:
        turning = wide_keys._reinterpret(turn.dtype, [head_dim, head_dim], turn.layout)
    held, filled, further, emptied, turn_filled = ring(stages, rotated)
    given = _Given(
        dq_out, row_values, k_descale, v_descale, q, do, k, v, k_wide, turn,
        queries, grads, keys, values, wide_keys, turning,
        held, filled, further, emptied, turn_filled,
        k_batch, k_head, v_batch, v_head, heads, group, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size,
        scale, exponent, before, after,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_sum_up, (0, given, block_n, stages, left, right, ragged, rotated)),
            (_sum_up, (1, given, block_n, stages, left, right, ragged, rotated)),
            (load_for_queries, (given, block_n, stages, left, right, rotated, False)),
        ],
        [4, 1],
        [registers, 24],
    )
