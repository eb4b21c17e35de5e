"""The Hopper kernel that makes dQ and dK of heads wider than 128 (Gluon); ``wide_values`` makes dV.

The sums of dK and dV of 128 keys would fill all registers, so each has a kernel, and S is computed in both.  Four
products are left here, in one pass as in ``hopper.fused``: each program adds what its 128 keys give to dQ to a sum in
global memory, in bf16 and in no order.

Shapes are powers of two, and 192 is none: everything comes in chunks of the head dimension, sums in those of 64
columns.  Shared memory is short: at 256 it holds one block of queries and of each copy.  Each is asked for again as
soon as it was read, and it is read once a turn, in another part of it.  dK takes dS from registers, as a turn later
it is still there; dQ takes it from shared memory, with both warpgroups' keys.  Its chunks are dealt out to the
warpgroups, and of three the second in turns.
"""

from __future__ import annotations

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
from .shared import (
    CONSUMERS,
    NEVER,
    ROWS,
    add_shared_to_global,
    chunked_product,
    copy_chunks,
    operand,
    sequence_of_keys,
    span_of_queries,
    store,
    visible_part,
)

__all__ = ["score_gradients_hopper"]

_CHUNK = gl.constexpr(64)  # columns of a sum
_SHARED = gl.constexpr(BLOCK.bit_length() - 1)  # so many bits of a query are its place among those with one factor


@gluon.jit
def _row(turn, blocks, kv_head, padded_q, first, group: gl.constexpr):
    """The first query of a turn, among those of all heads."""
    return (kv_head * group + turn // blocks) * padded_q + first + turn % blocks * ROWS


@gluon.jit
def _load(
    brought, tiles, group: gl.constexpr, left: gl.constexpr, right: gl.constexpr, aligned: gl.constexpr
):  # fmt: skip
    """Brings K and V of the program's keys, then block after block of the queries that see one of them.

    In the order in which they are wanted: the next block's Q, this one's in 16 bits, the next one's dO.
    """
    (
        q, do, k, v, q_wide, rows, keys, values, queries, grads, wide_queries, bases, deltas,
        held, q_filled, do_filled, wide_filled, q_free, do_free, wide_free,
        seqlen_q, seqlen_kv, padded_q, padded_kv, plane, before, after,
    ) = brought  # fmt: skip
    first_key, kv_head = gl.program_id(0) * (CONSUMERS * ROWS), gl.program_id(1)
    key_row, q_slot = kv_head * padded_kv, 0
    if tiles is not None:
        _, first_key, _, seqlen_kv, seqlen_q, q_slot, k_slot, before, after = sequence_of_keys(
            tiles, before, after, aligned
        )
        key_row += k_slot
    key_row += first_key
    mbarrier.expect(held, k.block_type.nbytes * keys.shape[0] + v.block_type.nbytes * values.shape[0])
    for i in gl.static_range(CONSUMERS):
        copy_chunks(k, key_row + i * ROWS, held, keys, i, keys.shape[0] // CONSUMERS)
        copy_chunks(v, key_row + i * ROWS, held, values, i, values.shape[0] // CONSUMERS)
    span = span_of_queries(first_key, seqlen_q, seqlen_kv, before, after, ROWS, left, right)
    first, blocks = q_slot + span[0], span[3]
    row = _row(0, blocks, kv_head, padded_q, first, group)
    mbarrier.expect(q_filled, q.block_type.nbytes * queries.shape[0])
    copy_chunks(q, row, q_filled, queries, 0, queries.shape[0])
    mbarrier.expect(do_filled, do.block_type.nbytes * grads.shape[0] + 2 * rows.block_type.nbytes)
    copy_chunks(do, row, do_filled, grads, 0, grads.shape[0])
    tma.async_copy_global_to_shared(rows, [row], do_filled, bases)
    tma.async_copy_global_to_shared(rows, [plane + row], do_filled, deltas)
    turns = group * blocks
    for turn in range(turns):
        more = turn < turns - 1
        following = _row(gl.minimum(turn + 1, turns - 1), blocks, kv_head, padded_q, first, group)
        if more:
            mbarrier.wait(q_free, turn & 1)
            mbarrier.expect(q_filled, q.block_type.nbytes * queries.shape[0])
            copy_chunks(q, following, q_filled, queries, 0, queries.shape[0])
        mbarrier.wait(wide_free, turn & 1 ^ 1)
        mbarrier.expect(wide_filled, q_wide.block_type.nbytes * wide_queries.shape[0])
        copy_chunks(q_wide, row, wide_filled, wide_queries, 0, wide_queries.shape[0])
        if more:
            mbarrier.wait(do_free, turn & 1)
            mbarrier.expect(do_filled, do.block_type.nbytes * grads.shape[0] + 2 * rows.block_type.nbytes)
            copy_chunks(do, following, do_filled, grads, 0, grads.shape[0])
            tma.async_copy_global_to_shared(rows, [following], do_filled, bases)
            tma.async_copy_global_to_shared(rows, [plane + following], do_filled, deltas)
        row = following


@gluon.jit
def _widen(keys, wide_keys, which: gl.constexpr):
    """Lays a warpgroup's keys down in bf16, which is exact: as its rows of every chunk."""
    # 16 columns to a thread, so that it reads and writes whole vectors.
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [512 // _CHUNK, _CHUNK // 16], [4, 1], [1, 0])
    width: gl.constexpr = keys.shape[2]
    own: gl.constexpr = which * (keys.shape[0] // CONSUMERS)
    chunks: gl.constexpr = wide_keys.shape[0]
    for i in gl.static_range(chunks):
        part = keys.index(own + i * _CHUNK // width).slice(i * _CHUNK % width, _CHUNK, 1)
        wide_keys.index(i).slice(which * ROWS, ROWS, 0).store(part.load(layout).to(gl.bfloat16))


@gluon.jit
def _query_product(score_grads, wide_keys, layout: gl.constexpr):
    """Starts dS · K for a chunk of the columns; both have the keys as rows."""
    zeros = gl.zeros([ROWS, _CHUNK], gl.float32, layout)
    return warpgroup_mma(score_grads.permute([1, 0]), wide_keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def _key_products(dk, ds16, wide_queries):
    """Starts to add dS · Q to dK, chunk by chunk."""
    sums = ()
    for i in gl.static_range(len(dk)):
        sums = sums + (warpgroup_mma(ds16, wide_queries.index(i), dk[i], is_async=True),)  # noqa: RUF005
    return sums


@gluon.jit
def _add_queries(sums, dq, staged, row, chunk, wait: gl.constexpr):
    """Adds a chunk of dQ of a block to the sums from ``row`` on; ``wait`` for what was to be added before it."""
    if wait:
        tma.store_wait(0)
    staged.store(dq.to(sums.dtype))
    fence_async_shared()
    add_shared_to_global(sums, [row, chunk * _CHUNK], staged)


@gluon.jit
def _sum_up(
    which: gl.constexpr, given, tiles, group: gl.constexpr, left: gl.constexpr, right: gl.constexpr,
    ragged: gl.constexpr, rotated: gl.constexpr, aligned: gl.constexpr,
):  # fmt: skip
    """dK of 64 keys, and half of what 128 keys add to dQ."""
    (
        dq_sums, dk_out, rows, factors, k_descale,
        keys, values, wide_keys, queries, grads, wide_queries, bases, deltas, score_grads, staged,
        held, q_filled, do_filled, wide_filled, q_free, do_free, wide_free, grads_made, grads_free,
        k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size, exponent, before, after,
    ) = given  # fmt: skip
    chunks: gl.constexpr = wide_keys.shape[0]
    deep: gl.constexpr = staged.shape[0] // CONSUMERS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _CHUNK, 16])
    first_key, kv_head = gl.program_id(0) * (CONSUMERS * ROWS), gl.program_id(1)
    q_slot, k_slot = 0, 0
    if tiles is None:
        at = kv_head.to(gl.int64) * seqlen_kv
        batch, own = (kv_head // kv_heads).to(gl.int64), kv_head % kv_heads
        k_place = k_descale + batch * k_batch + own * k_head
    else:
        stored = seqlen_kv
        batch, first_key, k_start, seqlen_kv, seqlen_q, q_slot, k_slot, before, after = sequence_of_keys(
            tiles, before, after, aligned
        )
        at = (batch.to(gl.int64) * kv_heads + kv_head) * stored + k_start
        # Descales of a sequence have the places of its tokens, one behind the other; the last may have none.
        k_place = k_descale + batch.to(gl.int64) * k_batch + kv_head * k_head + gl.minimum(k_start, stored - 1)
    if rotated:  # dK goes where another kernel takes it back, and everything is padded
        at = kv_head.to(gl.int64) * padded_kv + k_slot
    first, whole, parted, blocks = span_of_queries(first_key, seqlen_q, seqlen_kv, before, after, ROWS, left, right)
    key = first_key + which * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    since, upto = key - after if right else key * 0, key + before
    if ragged:  # what lies behind the last key is seen by no query, in any block
        since = gl.where(key < seqlen_kv, since, NEVER)
        whole = gl.where(first_key + CONSUMERS * ROWS > seqlen_kv, NEVER, whole)
    k_own = gl.load(k_place)
    factor = exponent * k_own

    dk = ()
    for _chunk in gl.static_range(chunks):
        dk = dk + (gl.zeros([ROWS, _CHUNK], gl.float32, sum_layout),)  # noqa: RUF005
    turns, last_row = 0, 0
    q_own = 1.0
    # Before the first block there is none whose dS to multiply: zeros, with the queries that are there.
    ds16 = operand(gl.zeros([ROWS, ROWS], gl.float32, s_layout), gl.DotOperandLayout(0, sum_layout, 2))
    mbarrier.wait(held, 0)
    _widen(keys, wide_keys, which)  # the other warpgroup's keys are there when its first dS is
    fence_async_shared()
    mbarrier.wait(q_filled, 0)
    s = warpgroup_mma_wait(0, [chunked_product(keys, which, queries, s_layout)])
    mbarrier.arrive(q_free, count=1)
    for member in range(group):
        following = gl.load(rows + 2 * plane + (kv_head * group + member) * padded_q + q_slot)
        change = q_own / following
        q_own = following
        own_factor = factor * q_own
        for step in range(blocks):
            phase = turns & 1
            start = first + step * ROWS
            row = (kv_head * group + member) * padded_q + q_slot + start
            # Early: it comes from memory, though it is the same for the next block or was for the last.
            grad_factor = gl.load(factors + (row >> _SHARED))
            # dK of the block before, beneath the exponentials.
            mbarrier.wait(wide_filled, gl.where(turns > 0, phase ^ 1, 0))
            dk = _key_products(dk, ds16, wide_queries)
            mbarrier.wait(do_filled, phase)
            base = bases.load(gl.SliceLayout(0, s_layout))
            p = gl.exp2(s * own_factor - base[None, :])
            if left or right or ragged:  # noqa: SIM102 (where no block has an edge, there is no branch)
                if (start < whole) | (start >= parted):
                    p = visible_part(p, start, since, upto, right or ragged, left)
            done = warpgroup_mma_wait(0, (ds16,) + dk)  # noqa: RUF005
            dk = done[1:]
            mbarrier.arrive(wide_free, count=1, pred=turns > 0)
            if group > 1:  # noqa: SIM102 (of one head alone there is no branch)
                if step == 0:  # so far dK is in units of the last head's descale
                    scaled = ()
                    for i in gl.static_range(chunks):
                        scaled = scaled + (dk[i] * change,)  # noqa: RUF005
                    dk = scaled
            # dQ of the block before; in the first turn any numbers are multiplied, and none is added.
            mbarrier.wait(grads_made, phase ^ 1)
            dq = warpgroup_mma_wait(0, [_query_product(score_grads, wide_keys.index(2 * which), sum_layout)])
            if turns > 0:
                _add_queries(dq_sums, dq, staged.index(which * deep), last_row, 2 * which, True)
            if chunks == 4 or ((turns + which) & 1) == 0:
                second = 2 * which + 1 if chunks == 4 else 1
                more = warpgroup_mma_wait(0, [_query_product(score_grads, wide_keys.index(second), sum_layout)])
                if turns > 0:
                    _add_queries(dq_sums, more, staged.index(which * deep + deep - 1), last_row, second, deep == 1)
            mbarrier.arrive(grads_free, count=1, pred=turns > 0)
            dp = warpgroup_mma_wait(0, [chunked_product(values, which, grads, s_layout)])
            delta = deltas.load(gl.SliceLayout(0, s_layout))
            mbarrier.arrive(do_free, count=1)
            ds = (p * (dp * grad_factor - delta[None, :])).to(gl.bfloat16)
            # After the last block its own scores are computed again, and nothing reads them.
            over = (step == blocks - 1) & (member == group - 1)
            mbarrier.wait(q_filled, gl.where(over, phase, phase ^ 1))
            s = chunked_product(keys, which, queries, s_layout)
            mbarrier.wait(grads_free, phase ^ 1)
            score_grads.slice(which * ROWS, ROWS, 0).store(ds)
            fence_async_shared()
            mbarrier.arrive(grads_made, count=1)
            ds16 = gl.convert_layout(ds, gl.DotOperandLayout(0, sum_layout, 2), assert_trivial=True)
            s = warpgroup_mma_wait(0, [s])
            mbarrier.arrive(q_free, count=1)
            last_row = row
            turns += 1
    phase = (turns - 1) & 1
    mbarrier.wait(wide_filled, phase)
    dk = _key_products(dk, ds16, wide_queries)
    mbarrier.wait(grads_made, phase)
    dq = _query_product(score_grads, wide_keys.index(2 * which), sum_layout)
    done = warpgroup_mma_wait(0, (ds16, dq) + dk)  # noqa: RUF005
    _add_queries(dq_sums, done[1], staged.index(which * deep), last_row, 2 * which, True)
    if chunks == 4 or ((turns + which) & 1) == 0:
        second = 2 * which + 1 if chunks == 4 else 1
        more = warpgroup_mma_wait(0, [_query_product(score_grads, wide_keys.index(second), sum_layout)])
        _add_queries(dq_sums, more, staged.index(which * deep + deep - 1), last_row, second, deep == 1)
    for i in gl.static_range(chunks):
        store(dk_out, done[2 + i] * (q_own / k_own), at, first_key + which * ROWS, seqlen_kv, i * _CHUNK, size,
              sum_layout)  # fmt: skip
    tma.store_wait(0)  # shared memory is the program's until it ends


@gluon.jit(
    do_not_specialize=[
        "k_batch", "k_head", "kv_heads", "seqlen_q", "seqlen_kv", "padded_q", "padded_kv", "plane", "before", "after",
    ]
)  # fmt: skip
def score_gradients_hopper(
    q, do, k, v, q_wide, rows, dq_sums, row_values, factors, k_descale, dk_out, tiles,
    k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size,
    exponent, before, after,
    group: gl.constexpr, chunks: gl.constexpr, chunks_v: gl.constexpr, left: gl.constexpr, right: gl.constexpr,
    ragged: gl.constexpr, rotated: gl.constexpr, registers: gl.constexpr, aligned: gl.constexpr,
):  # fmt: skip
    """dK of 128 keys of one key head, and their part of dQ; arguments as in ``all_gradients_hopper``.

    Q, K and dO · Vᵀ have ``chunks`` and ``chunks_v`` of 64 of the head dimension, three or four for Q and K.
    ``dk_out`` is dK (B, Hkv, Skv, D), or where it is ``rotated`` (B·Hkv, padded Skv, ``size``) in bf16, to be taken
    back.
    """
    if tiles is not None:  # noqa: SIM102 (where all lengths are alike there is no branch)
        if gl.program_id(0) >= gl.load(tiles):
            return
    width: gl.constexpr = k.block_type.shape[1]
    width_v: gl.constexpr = v.block_type.shape[1]
    parts: gl.constexpr = chunks * _CHUNK // width
    parts_v: gl.constexpr = chunks_v * _CHUNK // width_v
    keys = gl.allocate_shared_memory(k.dtype, [CONSUMERS * parts, ROWS, width], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [CONSUMERS * parts_v, ROWS, width_v], v.layout)
    wide_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    wide_keys = gl.allocate_shared_memory(gl.bfloat16, [chunks, CONSUMERS * ROWS, _CHUNK], wide_layout)
    queries = gl.allocate_shared_memory(q.dtype, [parts, ROWS, width], q.layout)
    grads = gl.allocate_shared_memory(do.dtype, [parts_v, ROWS, width_v], do.layout)
    wide_queries = gl.allocate_shared_memory(q_wide.dtype, [chunks, ROWS, _CHUNK], q_wide.layout)
    bases = gl.allocate_shared_memory(rows.dtype, [ROWS], rows.layout)
    deltas = gl.allocate_shared_memory(rows.dtype, [ROWS], rows.layout)
    score_grads = gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS * ROWS, ROWS], wide_layout)
    deep: gl.constexpr = 2 if chunks == 3 else 1
    staged = gl.allocate_shared_memory(dq_sums.dtype, [CONSUMERS * deep, ROWS, _CHUNK], dq_sums.layout)
    held = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_filled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    do_filled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    wide_filled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    do_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    wide_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    grads_made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    grads_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(held, count=1)
    mbarrier.init(q_filled, count=1)
    mbarrier.init(do_filled, count=1)
    mbarrier.init(wide_filled, count=1)
    mbarrier.init(q_free, count=CONSUMERS)
    mbarrier.init(do_free, count=CONSUMERS)
    mbarrier.init(wide_free, count=CONSUMERS)
    mbarrier.init(grads_made, count=CONSUMERS)
    mbarrier.init(grads_free, count=CONSUMERS)

    brought = (
        q, do, k, v, q_wide, rows, keys, values, queries, grads, wide_queries, bases, deltas,
        held, q_filled, do_filled, wide_filled, q_free, do_free, wide_free,
        seqlen_q, seqlen_kv, padded_q, padded_kv, plane, before, after,
    )  # fmt: skip
    given = (
        dq_sums, dk_out, row_values, factors, k_descale,
        keys, values, wide_keys, queries, grads, wide_queries, bases, deltas, score_grads, staged,
        held, q_filled, do_filled, wide_filled, q_free, do_free, wide_free, grads_made, grads_free,
        k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size, exponent, before, after,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_sum_up, (0, given, tiles, group, left, right, ragged, rotated, aligned)),
            (_sum_up, (1, given, tiles, group, left, right, ragged, rotated, aligned)),
            (_load, (brought, tiles, group, left, right, aligned)),
        ],
        [4, 1],
        [registers, 24],
    )
