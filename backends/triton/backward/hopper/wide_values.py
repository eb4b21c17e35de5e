"""The Hopper kernel that makes dV of heads wider than 128: a warp loads, two warpgroups have 64 keys each (Gluon).

``hopper.wide`` says why dV has a kernel of its own.  Beneath the exponentials of a block run dV of the block before
and S of the next, so a ring has three stages at least.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .shared import (
    CONSUMERS,
    NEVER,
    ROWS,
    advanced,
    chunked_product,
    copy_chunks,
    operand,
    sequence_of_keys,
    span_of_queries,
    store,
    visible_part,
)

__all__ = ["value_gradients_hopper"]

_CHUNK = gl.constexpr(64)  # columns of a sum


@gluon.jit
def _load(
    brought, tiles, group: gl.constexpr, stages: gl.constexpr, left: gl.constexpr, right: gl.constexpr,
    aligned: gl.constexpr,
):  # fmt: skip
    """Brings K of the program's keys, then block after block of the queries that see one of them."""
    (
        q, k, do_wide, rows, keys, queries, wide_grads, bases, held, filled, emptied,
        seqlen_q, seqlen_kv, padded_q, padded_kv, before, after,
    ) = brought  # fmt: skip
    first_key, kv_head = gl.program_id(0) * (CONSUMERS * ROWS), gl.program_id(1)
    key_row, q_slot = kv_head * padded_kv, 0
    if tiles is not None:
        _, first_key, _, seqlen_kv, seqlen_q, q_slot, k_slot, before, after = sequence_of_keys(
            tiles, before, after, aligned
        )
        key_row += k_slot
    key_row += first_key
    parts: gl.constexpr = keys.shape[0] // CONSUMERS
    chunks: gl.constexpr = wide_grads.shape[0] // stages
    mbarrier.expect(held, k.block_type.nbytes * keys.shape[0])
    for i in gl.static_range(CONSUMERS):
        copy_chunks(k, key_row + i * ROWS, held, keys, i, parts)
    span = span_of_queries(first_key, seqlen_q, seqlen_kv, before, after, ROWS, left, right)
    first, blocks = span[0], span[3]
    slot, phase = 0, 1
    for member in range(group):
        row = (kv_head * group + member) * padded_q + q_slot + first
        for _step in range(blocks):
            mbarrier.wait(emptied.index(slot), phase)
            full = filled.index(slot)
            mbarrier.expect(
                full, parts * q.block_type.nbytes + chunks * do_wide.block_type.nbytes + rows.block_type.nbytes
            )
            copy_chunks(q, row, full, queries, slot, parts)
            tma.async_copy_global_to_shared(rows, [row], full, bases.index(slot))
            copy_chunks(do_wide, row, full, wide_grads, slot, chunks)
            row += ROWS
            slot, phase = advanced(slot, phase, stages)


@gluon.jit
def _products(dv, p16, wide_grads, slot):
    """Starts to add P · dO of the block in ``slot`` to dV, chunk by chunk."""
    sums = ()
    for i in gl.static_range(len(dv)):
        chunk = wide_grads.index(slot * len(dv) + i)
        sums = sums + (warpgroup_mma(p16, chunk, dv[i], is_async=True),)  # noqa: RUF005
    return sums


@gluon.jit
def _sum_up(
    which: gl.constexpr, given, tiles, group: gl.constexpr, stages: gl.constexpr, left: gl.constexpr,
    right: gl.constexpr, ragged: gl.constexpr, aligned: gl.constexpr,
):  # fmt: skip
    """dV of 64 keys."""
    (
        dv_out, rows, k_descale, keys, queries, wide_grads, bases, held, filled, emptied,
        k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, plane, size_v, exponent, before, after,
    ) = given  # fmt: skip
    chunks: gl.constexpr = wide_grads.shape[0] // stages
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _CHUNK, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    first_key, kv_head = gl.program_id(0) * (CONSUMERS * ROWS), gl.program_id(1)
    q_slot = 0
    if tiles is None:
        at = kv_head.to(gl.int64) * seqlen_kv
        k_place = k_descale + (kv_head // kv_heads).to(gl.int64) * k_batch + kv_head % kv_heads * k_head
    else:
        stored = seqlen_kv
        batch, first_key, k_start, seqlen_kv, seqlen_q, q_slot, _, before, after = sequence_of_keys(
            tiles, before, after, aligned
        )
        at = (batch.to(gl.int64) * kv_heads + kv_head) * stored + k_start
        k_place = k_descale + batch.to(gl.int64) * k_batch + kv_head * k_head + gl.minimum(k_start, stored - 1)
    first, whole, parted, blocks = span_of_queries(first_key, seqlen_q, seqlen_kv, before, after, ROWS, left, right)
    key = first_key + which * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    since, upto = key - after if right else key * 0, key + before
    if ragged:  # what lies behind the last key is seen by no query, in any block
        since = gl.where(key < seqlen_kv, since, NEVER)
        whole = gl.where(first_key + CONSUMERS * ROWS > seqlen_kv, NEVER, whole)
    factor = exponent * gl.load(k_place)

    dv = ()
    for _chunk in gl.static_range(chunks):
        dv = dv + (gl.zeros([ROWS, _CHUNK], gl.float32, sum_layout),)  # noqa: RUF005
    # Before the first block there is none whose P to multiply: zeros, with the gradients that are there.
    p16 = operand(gl.zeros([ROWS, ROWS], gl.float32, s_layout), p_layout)
    turns, slot, phase, previous = 0, 0, 0, 0
    mbarrier.wait(held, 0)
    mbarrier.wait(filled.index(0), 0)
    s = warpgroup_mma_wait(0, [chunked_product(keys, which, queries, s_layout)])
    for member in range(group):
        own_factor = factor * gl.load(rows + 2 * plane + (kv_head * group + member) * padded_q + q_slot)
        for step in range(blocks):
            start = first + step * ROWS
            # After the last block its own scores are computed again, and nothing reads them.
            over = (step == blocks - 1) & (member == group - 1)
            next_slot, next_phase = advanced(slot, phase, stages)
            next_slot, next_phase = gl.where(over, slot, next_slot), gl.where(over, phase, next_phase)
            dv = _products(dv, p16, wide_grads, previous)
            mbarrier.wait(filled.index(next_slot), next_phase)
            coming = chunked_product(keys, which, queries, s_layout, next_slot)
            base = bases.index(slot).load(gl.SliceLayout(0, s_layout))
            p = gl.exp2(s * own_factor - base[None, :])
            if left or right or ragged:  # noqa: SIM102 (where no block has an edge, there is no branch)
                if (start < whole) | (start >= parted):
                    p = visible_part(p, start, since, upto, right or ragged, left)
            done = warpgroup_mma_wait(0, (p16, coming) + dv)  # noqa: RUF005
            dv, s = done[2:], done[1]
            mbarrier.arrive(emptied.index(previous), count=1, pred=turns > 0)
            p16 = operand(p, p_layout)
            previous, slot, phase = slot, next_slot, next_phase
            turns += 1
    dv = _products(dv, p16, wide_grads, previous)
    done = warpgroup_mma_wait(0, (p16,) + dv)  # noqa: RUF005
    for i in gl.static_range(chunks):
        store(dv_out, done[1 + i], at, first_key + which * ROWS, seqlen_kv, i * _CHUNK, size_v, sum_layout)


@gluon.jit(
    do_not_specialize=[
        "k_batch", "k_head", "kv_heads", "seqlen_q", "seqlen_kv", "padded_q", "padded_kv", "plane", "before", "after",
    ]
)  # fmt: skip
def value_gradients_hopper(
    q, k, do_wide, rows, row_values, k_descale, dv_out, tiles,
    k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size_v, exponent, before, after,
    group: gl.constexpr, stages: gl.constexpr, chunks: gl.constexpr, chunks_v: gl.constexpr, left: gl.constexpr,
    right: gl.constexpr, ragged: gl.constexpr, registers: gl.constexpr, aligned: gl.constexpr,
):  # fmt: skip
    """dV (B, Hkv, Skv, Dv), contiguous, of 128 keys of one key head; arguments as in ``score_gradients_hopper``."""
    if tiles is not None:  # noqa: SIM102 (where all lengths are alike there is no branch)
        if gl.program_id(0) >= gl.load(tiles):
            return
    width: gl.constexpr = k.block_type.shape[1]
    parts: gl.constexpr = chunks * _CHUNK // width
    keys = gl.allocate_shared_memory(k.dtype, [CONSUMERS * parts, ROWS, width], k.layout)
    queries = gl.allocate_shared_memory(q.dtype, [stages * parts, ROWS, width], q.layout)
    wide_grads = gl.allocate_shared_memory(do_wide.dtype, [stages * chunks_v, ROWS, _CHUNK], do_wide.layout)
    bases = gl.allocate_shared_memory(rows.dtype, [stages, ROWS], rows.layout)
    held = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    filled = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    mbarrier.init(held, count=1)
    for i in gl.static_range(stages):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(emptied.index(i), count=CONSUMERS)

    brought = (
        q, k, do_wide, rows, keys, queries, wide_grads, bases, held, filled, emptied,
        seqlen_q, seqlen_kv, padded_q, padded_kv, before, after,
    )  # fmt: skip
    given = (
        dv_out, row_values, k_descale, keys, queries, wide_grads, bases, held, filled, emptied,
        k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, plane, size_v, exponent, before, after,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_sum_up, (0, given, tiles, group, stages, left, right, ragged, aligned)),
            (_sum_up, (1, given, tiles, group, stages, left, right, ragged, aligned)),
            (_load, (brought, tiles, group, stages, left, right, aligned)),
        ],
        [4, 1],
        [registers, 24],
    )
