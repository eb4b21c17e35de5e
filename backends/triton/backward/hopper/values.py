"""The Hopper kernel that makes dV alone, of heads whose dK leaves no registers for it: those of 192 columns (Gluon).

A warp loads and two warpgroups with 64 keys each compute, as in ``hopper.keys``.  The scores of the next block and
the last block's addition to dV run beneath the exponentials of a block: so it is P, in 16 bits, that goes from block to
block, and no product.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from ..place import query_heads
from .fused_pieces import add_products, bring, done, done_with, operands, scores, slots, sums_of_keys
from .fused_tiles import store_whole
from .sequences import asked_for, seen_by, sequence, where
from .shared import CONSUMERS, ROWS, advanced, block_and_head, span_of_queries, visible_part

__all__ = ["value_gradients_hopper"]

# What partitions are given: tensors and descriptors, shared memory (a Triton tuple has `values` of its own), barriers,
# numbers.  Q, K and dO are tuples of pieces.
_Given = namedtuple(
    "_Given",
    "dv_out row_values k_descale q k do_wide rows keys queries wide_grads bases staged held filled emptied "
    "k_batch k_head kv_heads seqlen_q seqlen_kv padded_q padded_kv plane size_v exponent before after",
)


@gluon.jit
def _load(
    given, tiles, group: gl.constexpr, shares: gl.constexpr, block_m: gl.constexpr, stages: gl.constexpr,
    left: gl.constexpr, right: gl.constexpr, aligned: gl.constexpr,
):  # fmt: skip
    """Brings the program's keys, then block after block of the queries that see one of them."""
    of_keys: gl.constexpr = given.k[0].block_type.nbytes + given.k[1].block_type.nbytes
    of_queries: gl.constexpr = given.q[0].block_type.nbytes + given.q[1].block_type.nbytes
    more: gl.constexpr = given.do_wide[1].block_type.nbytes if len(given.do_wide) > 1 else 0
    of_grads: gl.constexpr = given.do_wide[0].block_type.nbytes + more
    seqlen_q, seqlen_kv, before, after = given.seqlen_q, given.seqlen_kv, given.before, given.after
    block, share = block_and_head()
    first_key = block * (CONSUMERS * ROWS)
    key_row, q_slot = share // shares * given.padded_kv, 0
    if tiles is not None:
        _, first_key, _, _, seqlen_q, seqlen_kv, q_slot, k_slot, before, after = sequence(tiles, before, after, aligned)
        seqlen_q = gl.maximum(seqlen_q, 1)  # a sequence without queries has a slot all the same
        key_row += k_slot
    mbarrier.expect(given.held, CONSUMERS * of_keys)
    for i in gl.static_range(CONSUMERS):
        bring(given.k, key_row + first_key + i * ROWS, given.held, given.keys, i)
    span = span_of_queries(first_key, seqlen_q, seqlen_kv, before, after, block_m, left, right)
    slot, phase = 0, 1
    first_head, heads = query_heads(share, group, shares)
    for member in range(heads):
        row = (first_head + member) * given.padded_q + q_slot + span[0]
        for _step in range(span[3]):
            mbarrier.wait(given.emptied.index(slot), phase)
            full = given.filled.index(slot)
            mbarrier.expect(full, of_queries + of_grads + given.rows.block_type.nbytes)
            bring(given.q, row, full, given.queries, slot)
            tma.async_copy_global_to_shared(given.rows, [row], full, given.bases.index(slot))
            bring(given.do_wide, row, full, given.wide_grads, slot)
            row += block_m
            slot, phase = advanced(slot, phase, stages)


@gluon.jit
def _as(x, others):
    """x in bf16 as the operands that the others are; a sum that is under way has no layout to ask for."""
    first: gl.constexpr = others[0].type.layout
    if len(others) == 1:
        return (gl.convert_layout(x, first, assert_trivial=True),)
    else:  # noqa: RET505 (of a constant only one of the two is compiled)
        second: gl.constexpr = others[1].type.layout
        return (
            gl.convert_layout(x, first, assert_trivial=True),
            gl.convert_layout(x, second, assert_trivial=True),
        )


@gluon.jit
def _sum_up(
    which: gl.constexpr, given, tiles, group: gl.constexpr, shares: gl.constexpr, block_m: gl.constexpr,
    stages: gl.constexpr, left: gl.constexpr, right: gl.constexpr, ragged: gl.constexpr, aligned: gl.constexpr,
):  # fmt: skip
    """dV of 64 keys."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_m, 32])
    share = block_and_head()[1]
    first_key, queries, seqlen_q, seqlen_kv, before, after, q_slot, _, at, k_place = where(
        given, tiles, share, shares, aligned, False
    )
    first, whole, parted, blocks = span_of_queries(first_key, seqlen_q, seqlen_kv, before, after, block_m, left, right)
    key = first_key + which * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    since, upto, whole = seen_by(key, first_key, whole, seqlen_kv, before, after, right, ragged)
    factor = given.exponent * gl.load(k_place)

    dv = sums_of_keys(given.wide_grads)
    first_head, heads = query_heads(share, group, shares)
    blocks_of_all = heads * blocks
    of_head = given.row_values + 2 * given.plane + first_head * given.padded_q + q_slot
    own_factor = factor * gl.load(of_head)
    mbarrier.wait(given.held, 0)
    mbarrier.wait(given.filled.index(0), 0)
    s = warpgroup_mma_wait(0, [scores(given.keys, given.queries, 0, which, block_m, s_layout)])
    # Before the first block there is none whose P to multiply: zeros, with the gradients that are there.
    p16 = operands(gl.zeros([ROWS, block_m], gl.bfloat16, s_layout), dv)
    slot, phase, start = 0, 0, first
    # A value of its own: Triton takes a name for unchanged by a loop whose body assigns what it came in with.
    previous = slot + 0
    for step in range(blocks_of_all):
        # Before the scores: behind them it took 1 to 3 % longer, all gradients together (MLA on an H200).
        dv = add_products(p16, given.wide_grads, previous, dv)
        # After the last block its own scores are computed again, and nothing reads them.
        over = step == blocks_of_all - 1
        next_slot, next_phase = advanced(slot, phase, stages)
        next_slot, next_phase = gl.where(over, slot, next_slot), gl.where(over, phase, next_phase)
        mbarrier.wait(given.filled.index(next_slot), next_phase)
        following = scores(given.keys, given.queries, next_slot, which, block_m, s_layout)
        base = given.bases.index(slot).load(gl.SliceLayout(0, s_layout))
        p = gl.exp2(s * own_factor - base[None, :])
        if left or right or ragged:  # noqa: SIM102 (where no block has an edge, there is no branch)
            if (start < whole) | (start >= parted):
                p = visible_part(p, start, since, upto, right or ragged, left)
        made = _as(p.to(gl.bfloat16), p16)
        s, dv = done_with((following, p16[0]), dv)
        mbarrier.arrive(given.emptied.index(previous), count=1, pred=step > 0)
        p16 = made
        previous, slot, phase = slot, next_slot, next_phase
        start += block_m
        if group > shares:  # noqa: SIM102 (a share of one head has no next one)
            if start == first + blocks * block_m:
                start = first
                of_head += given.padded_q
                own_factor = factor * gl.load(of_head, mask=step + 1 < blocks_of_all, other=1.0)
    dv = done(0, add_products(p16, given.wide_grads, previous, dv))
    top = first_key + which * ROWS
    columns: gl.constexpr = dv[0].shape[1]
    for i in gl.static_range(len(dv)):
        part = asked_for(dv[i], queries, tiles)
        store_whole(given.dv_out, part, given.staged, which, at, top, seqlen_kv, i * columns, given.size_v)


@gluon.jit(
    do_not_specialize=[
        "k_batch", "k_head", "kv_heads", "seqlen_q", "seqlen_kv", "padded_q", "padded_kv", "plane", "before", "after",
    ]
)  # fmt: skip
def value_gradients_hopper(
    q, more_q, k, more_k, do_wide, more_do_wide, rows, row_values, k_descale, dv_out, tiles,
    k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size_v: gl.constexpr, exponent, before,
    after, group: gl.constexpr, shares: gl.constexpr, stages: gl.constexpr, left: gl.constexpr, right: gl.constexpr,
    ragged: gl.constexpr, values_in_pieces: gl.constexpr, registers: gl.constexpr, aligned: gl.constexpr,
):  # fmt: skip
    """dV (B, Hkv · shares, Skv, Dv) of 128 keys and a share of the query heads.

    Arguments as of ``fused.all_gradients_in_pieces_hopper``; nothing reads ``more_do_wide`` unless
    ``values_in_pieces``.
    """
    if tiles is not None:  # noqa: SIM102 (where all lengths are alike there is no branch)
        if block_and_head()[0] >= gl.load(tiles):
            return
    block_m: gl.constexpr = q.block_type.shape[0]
    keys = slots(k, CONSUMERS, ROWS), slots(more_k, CONSUMERS, ROWS)
    queries = slots(q, stages, block_m), slots(more_q, stages, block_m)
    if values_in_pieces:
        of_grads = do_wide, more_do_wide
        wide_grads = slots(do_wide, stages, block_m), slots(more_do_wide, stages, block_m)
    else:
        of_grads, wide_grads = (do_wide,), (slots(do_wide, stages, block_m),)
    bases = gl.allocate_shared_memory(rows.dtype, [stages, block_m], rows.layout)
    staged = slots(do_wide, CONSUMERS, ROWS)
    held = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    filled = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    mbarrier.init(held, count=1)
    for i in gl.static_range(stages):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(emptied.index(i), count=CONSUMERS)
    given = _Given(
        dv_out, row_values, k_descale, (q, more_q), (k, more_k), of_grads, rows,
        keys, queries, wide_grads, bases, staged, held, filled, emptied,
        k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size_v, exponent, before, after,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_sum_up, (0, given, tiles, group, shares, block_m, stages, left, right, ragged, aligned)),
            (_sum_up, (1, given, tiles, group, shares, block_m, stages, left, right, ragged, aligned)),
            (_load, (given, tiles, group, shares, block_m, stages, left, right, aligned)),
        ],
        [4, 1],
        [registers, 24],
    )
