"""The Hopper kernel that makes dK and dV: a warp of its own loads, two warpgroups with 64 keys each compute (Gluon).

What it computes is said in ``backward.keys``; this is how.  K and V of a program's 128 keys stay in shared memory, and
both warpgroups take the same queries, block by block, from a ring: in e4m3 for Sᵀ = K·Qᵀ and dPᵀ = V·dOᵀ, in bf16 for
the sums.

All products are asynchronous, and beneath everything that a warpgroup computes itself one of its products runs: dP and
the last block's dK beneath the exponentials, dV beneath dS.  So it is dS, in 16 bits, that goes from block to block,
and no product: ptxas serialises products that are under way where a loop begins again.  Registers decide the rest:
the sums take 128 of 240, S, dP, P and dS up to 96.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .loading import load_for_keys
from .shared import (
    CONSUMERS,
    ROWS,
    advanced,
    block_and_head,
    operand,
    ring,
    span_of_queries,
    store,
    transposed_product,
    turned,
    visible_part,
)

__all__ = ["key_gradients_hopper"]

# What partitions are given: tensors and descriptors, shared memory (a Triton tuple has `values` of its own), barriers,
# numbers.
_Given = namedtuple(
    "_Given",
    "dk_out dv_out row_values k_descale v_descale q do k v q_further do_further rows turn "
    "keys value_blocks queries grads further_queries further_grads bases deltas turning "
    "held filled further emptied turn_filled "
    "k_batch k_head v_batch v_head kv_heads seqlen_q seqlen_kv padded_q padded_kv plane size size_v scale "
    "exponent before after",
)


@gluon.jit
def _sum_up(
    which: gl.constexpr, given, group: gl.constexpr, block_m: gl.constexpr, stages: gl.constexpr, left: gl.constexpr,
    right: gl.constexpr, rotated: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys."""
    head_dim: gl.constexpr = given.keys.shape[2]
    head_dim_v: gl.constexpr = given.value_blocks.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_m, 32])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim_v, 16])
    block, kv_head = block_and_head()
    first_key = block * (CONSUMERS * ROWS)
    first, whole, parted, blocks = span_of_queries(
        first_key, given.seqlen_q, given.seqlen_kv, given.before, given.after, block_m, left, right
    )
    batch, own = (kv_head // given.kv_heads).to(gl.int64), kv_head % given.kv_heads
    key = first_key + which * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    since, upto = key - given.after, key + given.before
    factor = given.exponent * gl.load(given.k_descale + batch * given.k_batch + own * given.k_head)
    k_tile, v_tile = given.keys.index(which), given.value_blocks.index(which)

    dk = gl.zeros([ROWS, head_dim], gl.float32, dk_layout)
    dv = gl.zeros([ROWS, head_dim_v], gl.float32, dv_layout)
    slot, phase = 0, 0
    q_own = 1.0
    mbarrier.wait(given.held, 0)
    mbarrier.wait(given.filled.index(0), 0)
    s = warpgroup_mma_wait(0, [transposed_product(k_tile, given.queries.index(0), block_m, s_layout)])
    for member in range(group):
        # dK so far is in units of the last head's descale.
        following = gl.load(given.row_values + 2 * given.plane + (kv_head * group + member) * given.padded_q)
        dk = dk * (q_own / following)
        q_own = following
        own_factor = factor * q_own
        # Before the first block there is none whose dS to multiply: zeros, with any queries that are there.
        ds16 = operand(gl.zeros([ROWS, block_m], gl.float32, s_layout), gl.DotOperandLayout(0, dk_layout, 2))
        # A value of its own: Triton takes a name for unchanged by a loop whose body assigns what it came in with.
        previous = slot + 0
        mbarrier.wait(given.further.index(slot), phase)
        for step in range(blocks):
            start = first + step * block_m
            dp = transposed_product(v_tile, given.grads.index(slot), block_m, s_layout)
            dk = warpgroup_mma(ds16, given.further_queries.index(previous), dk, is_async=True)
            base = given.bases.index(slot).load(gl.SliceLayout(0, s_layout))
            p = gl.exp2(s * own_factor - base[None, :])
            if left or right:  # noqa: SIM102 (where no block has an edge, there is no branch)
                if (start < whole) | (start >= parted):
                    p = visible_part(p, start, since, upto, right, left)
            mbarrier.wait(given.further.index(slot), phase)
            p16 = operand(p, gl.DotOperandLayout(0, dv_layout, 2))
            dp, dk, ds16 = warpgroup_mma_wait(0, [dp, dk, ds16])
            mbarrier.arrive(given.emptied.index(previous), count=1, pred=step > 0)
            dv = warpgroup_mma(p16, given.further_grads.index(slot), dv, is_async=True)
            delta = given.deltas.index(slot).load(gl.SliceLayout(0, s_layout))
            ds16 = operand(p * (dp - delta[None, :]), gl.DotOperandLayout(0, dk_layout, 2))
            # After the last block its own scores are computed again, and nothing reads them.
            over = (step == blocks - 1) & (member == group - 1)
            next_slot, next_phase = advanced(slot, phase, stages)
            next_slot, next_phase = gl.where(over, slot, next_slot), gl.where(over, phase, next_phase)
            mbarrier.wait(given.filled.index(next_slot), next_phase)
            s = transposed_product(k_tile, given.queries.index(next_slot), block_m, s_layout)
            s, dv = warpgroup_mma_wait(0, [s, dv])
            previous, slot, phase = slot, next_slot, next_phase
        dk = warpgroup_mma(ds16, given.further_queries.index(previous), dk, is_async=True)
        dk = warpgroup_mma_wait(0, [dk])
        mbarrier.arrive(given.emptied.index(previous), count=1)

    if rotated:
        mbarrier.wait(given.turn_filled, 0)
        dk = turned(dk, given.turning, head_dim, dk_layout)
    unscaled = given.scale * q_own * gl.load(given.v_descale + batch * given.v_batch + own * given.v_head)
    at = kv_head.to(gl.int64) * given.seqlen_kv
    top = first_key + which * ROWS
    store(given.dk_out, dk * unscaled, at, top, given.seqlen_kv, 0, given.size, dk_layout)
    store(given.dv_out, dv, at, top, given.seqlen_kv, 0, given.size_v, dv_layout)


@gluon.jit(
    do_not_specialize=[
        "k_batch", "k_head", "v_batch", "v_head", "kv_heads", "seqlen_q", "seqlen_kv", "padded_q", "padded_kv",
        "plane", "before", "after",
    ]
)  # fmt: skip
def key_gradients_hopper(
    q, do, k, v, q_wide, do_wide, rows, turn, row_values, k_descale, v_descale, dk_out, dv_out,
    k_batch, k_head, v_batch, v_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane,
    size: gl.constexpr, size_v: gl.constexpr, scale, exponent, before, after,
    group: gl.constexpr, stages: gl.constexpr, left: gl.constexpr, right: gl.constexpr, rotated: gl.constexpr,
    registers: gl.constexpr,
):  # fmt: skip
    """dK (B, Hkv, Skv, D) and dV (B, Hkv, Skv, Dv), contiguous, of 128 keys of one key head."""
    block_m: gl.constexpr = q.block_type.shape[0]
    head_dim: gl.constexpr = k.block_type.shape[1]
    head_dim_v: gl.constexpr = v.block_type.shape[1]
    keys = gl.allocate_shared_memory(k.dtype, [CONSUMERS, ROWS, head_dim], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [CONSUMERS, ROWS, head_dim_v], v.layout)
    queries = gl.allocate_shared_memory(q.dtype, [stages, block_m, head_dim], q.layout)
    grads = gl.allocate_shared_memory(do.dtype, [stages, block_m, head_dim_v], do.layout)
    wide_queries = gl.allocate_shared_memory(q_wide.dtype, [stages, block_m, head_dim], q_wide.layout)
    wide_grads = gl.allocate_shared_memory(do_wide.dtype, [stages, block_m, head_dim_v], do_wide.layout)
    bases = gl.allocate_shared_memory(rows.dtype, [stages, block_m], rows.layout)
    deltas = gl.allocate_shared_memory(rows.dtype, [stages, block_m], rows.layout)
    turning = wide_queries
    if rotated:
        turning = wide_queries._reinterpret(turn.dtype, [head_dim, head_dim], turn.layout)
    held, filled, further, emptied, turn_filled = ring(stages, rotated)
    given = _Given(
        dk_out, dv_out, row_values, k_descale, v_descale, q, do, k, v, q_wide, do_wide, rows, turn,
        keys, values, queries, grads, wide_queries, wide_grads, bases, deltas, turning,
        held, filled, further, emptied, turn_filled,
        k_batch, k_head, v_batch, v_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size, size_v,
        scale, exponent, before, after,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_sum_up, (0, given, group, block_m, stages, left, right, rotated)),
            (_sum_up, (1, given, group, block_m, stages, left, right, rotated)),
            (load_for_keys, (given, group, block_m, stages, left, right, rotated, False)),
        ],
        [4, 1],
        [registers, 24],
    )
