"""The Hopper kernel that makes dQ, dK and dV: one pass over the products for all three (Gluon).

As in ``hopper.keys`` a warp loads and two warpgroups with 64 keys each compute dK and dV.  What they have of
dS serves for dQ too: five products where two kernels take seven.  dQ = dS·K sums over keys, and so over programs: each
adds what its 128 keys give to a sum in global memory, in no order.  The additions are in bf16: half the bytes of FP32,
in which the kernel waits for the L2, and a rounding at each, which is why dQ differs from run to run.

As little as can be stands before and behind it in memory.  dO is read as it came where TMA can, unless P is scaled up
by its descale (``Layout.scaled_up``); a warpgroup widens the keys that it has, for dQ, in shared memory, and undoes
their rotation there; and dS bears every factor of dQ, so that its sum is dQ itself.

dS reaches the tensor cores through shared memory, for dQ transposed and from both warpgroups: of dQ each warpgroup
makes half of the columns, or half of the rows where a block has 128 queries.  A block's dQ waits until the next block's
dS is there: so neither warpgroup waits for the other, and they may be half a block apart, one with its exponentials and
the other with its products.

A second kernel takes heads of 96 as 64 and 32 columns (``with_values``), and those of 192 as 128 and 64: Q and K of
MLA, whose V has 128, or V too.  Of 192 columns dV has a kernel of its own (``hopper.values``): its sums would not fit
the registers beside those of dK, nor dO in bf16 shared memory.  A warpgroup then keeps its values in registers, which
they reach by way of the memory where dQ is staged later.  Of dQ a warpgroup makes one of the pieces of 64 and 32, for
which the matrix instruction is fastest, or half the columns of each.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .fused_pieces import slots
from .fused_sums import load, sum_up
from .fused_tiles import STAGED
from .shared import CONSUMERS, ROWS, barrier_where, block_and_head

__all__ = ["all_gradients_hopper", "all_gradients_in_pieces_hopper"]

# What partitions are given: tensors and descriptors, shared memory (a Triton tuple has `values` of its own), barriers,
# numbers.  Operands and dQ's sums are tuples of pieces.
_Given = namedtuple(
    "_Given",
    "dq_sums dk_out dv_out row_values factors k_descale q do k v q_wide do_wide rows turn "
    "keys value_blocks wide_keys queries grads wide_queries wide_grads bases deltas score_grads staged "
    "turning_keys turning held narrow wide wide_free grads_made grads_free turn_filled "
    "k_batch k_head kv_heads seqlen_q seqlen_kv padded_q padded_kv plane size size_v exponent before after",
)


@gluon.jit
def _over(place, x):
    """Slots for each warpgroup's rows of x in the memory of ``place``, which is not needed before those are read."""
    return place._reinterpret(x.dtype, [CONSUMERS, ROWS, x.block_type.shape[1]], x.layout)


@gluon.jit
def _widened(sums, columns: gl.constexpr):
    """Shared memory for the keys in bf16, by the parts of columns of dQ that ``sums`` adds up."""
    part: gl.constexpr = sums.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * part, element_bitwidth=16, rank=2)
    return gl.allocate_shared_memory(gl.bfloat16, [columns // part, CONSUMERS * ROWS, part], layout)


@gluon.jit
def _of_scores(block_m: gl.constexpr):
    """Shared memory for two blocks of dS."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return gl.allocate_shared_memory(gl.bfloat16, [2, CONSUMERS * ROWS, block_m], layout)


@gluon.jit
def _two_barriers():
    """The barriers of two slots."""
    return gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())


@gluon.jit
def _barriers(rotated: gl.constexpr):
    """(held, narrow, wide, wide_free, grads_made, grads_free, turn_filled): what waits for what is brought and read."""
    held = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn_filled = barrier_where(rotated, held)
    narrow, wide = _two_barriers(), _two_barriers()
    wide_free, grads_made, grads_free = _two_barriers(), _two_barriers(), _two_barriers()
    mbarrier.init(held, count=1)
    for i in gl.static_range(2):
        mbarrier.init(narrow.index(i), count=1)
        mbarrier.init(wide.index(i), count=1)
        mbarrier.init(wide_free.index(i), count=CONSUMERS)
        mbarrier.init(grads_made.index(i), count=CONSUMERS)
        mbarrier.init(grads_free.index(i), count=CONSUMERS)
    return held, narrow, wide, wide_free, grads_made, grads_free, turn_filled


@gluon.jit
def _start(
    given, tiles, group: gl.constexpr, shares: gl.constexpr, block_m: gl.constexpr, left: gl.constexpr,
    right: gl.constexpr, ragged: gl.constexpr, rotated: gl.constexpr, aligned: gl.constexpr,
    keys_in_place: gl.constexpr, dq_in_place: gl.constexpr, with_values: gl.constexpr, scaled_up: gl.constexpr,
    registers: gl.constexpr,
):  # fmt: skip
    """Runs the partitions: two warpgroups that compute, and the warp that loads."""
    gl.warp_specialize(
        [
            (sum_up, (
                0, given, tiles, group, shares, block_m, left, right, ragged, rotated, aligned, keys_in_place,
                dq_in_place, with_values, scaled_up,
            )),
            (sum_up, (
                1, given, tiles, group, shares, block_m, left, right, ragged, rotated, aligned, keys_in_place,
                dq_in_place, with_values, scaled_up,
            )),
            (load, (given, tiles, group, shares, block_m, left, right, rotated, aligned, keys_in_place, with_values)),
        ],
        [4, 1],
        [registers, 24],
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "k_batch", "k_head", "kv_heads", "seqlen_q", "seqlen_kv", "padded_q", "padded_kv", "plane", "before", "after",
    ]
)  # fmt: skip
def all_gradients_hopper(
    q, do, k, v, q_wide, do_wide, rows, turn, dq_sums, row_values, factors, k_descale, dk_out, dv_out, tiles,
    k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size: gl.constexpr,
    size_v: gl.constexpr, exponent, before, after,
    group: gl.constexpr, shares: gl.constexpr, left: gl.constexpr, right: gl.constexpr, ragged: gl.constexpr,
    rotated: gl.constexpr, registers: gl.constexpr, aligned: gl.constexpr, keys_in_place: gl.constexpr,
    dq_in_place: gl.constexpr, scaled_up: gl.constexpr,
):  # fmt: skip
    """dK (B, Hkv · shares, Skv, D) and dV of 128 keys and a share of the query heads, and their part of dQ.

    The ``group`` query heads of a key head are divided into ``shares``; ``shares.summed`` adds up their dK and dV.
    ``dq_sums`` in bf16 is added to: dQ (B·H, padded Sq, padded D) or as it is returned.  ``factors`` turn dO·v of the
    e4m3 numbers into the units of delta, in which dQ is dS · K of the e4m3 numbers; where P is ``scaled_up`` by dO's
    descale, a head has one of them.  ``ragged``: the last program's keys are fewer.  ``tiles``: the table of sequences
    that have lengths of their own, or None.  With it all that is laid out has slots; but K and V are read where they
    lie if ``keys_in_place``, and dQ is added up where it is returned if ``dq_in_place``, which takes as many key heads
    as heads.  ``aligned`` says that a sequence's ``after`` is larger, and ``before`` smaller, by its keys less its
    queries.
    """
    if tiles is not None:  # noqa: SIM102 (where all lengths are alike there is no branch)
        if block_and_head()[0] >= gl.load(tiles):
            return
    block_m: gl.constexpr = q.block_type.shape[0]
    head_dim: gl.constexpr = k.block_type.shape[1]
    head_dim_v: gl.constexpr = v.block_type.shape[1]
    part: gl.constexpr = dq_sums.block_type.shape[1]  # columns of dQ that a warpgroup makes
    keys, value_blocks = slots(k, CONSUMERS, ROWS), slots(v, CONSUMERS, ROWS)
    wide_keys = _widened(dq_sums, head_dim)
    queries, grads = slots(q, 2, block_m), slots(do, 2, block_m)
    wide_queries, wide_grads = slots(q_wide, 2, block_m), slots(do_wide, 2, block_m)
    bases = gl.allocate_shared_memory(rows.dtype, [2, block_m], rows.layout)
    deltas = gl.allocate_shared_memory(rows.dtype, [2, block_m], rows.layout)
    score_grads = _of_scores(block_m)
    # Of a warpgroup's dQ: as many as are under way, or more, so that its dK or dV fits there in the end.
    blocks: gl.constexpr = max(STAGED, ROWS * max(head_dim, head_dim_v) // (dq_sums.block_type.shape[0] * part))
    staged = slots(dq_sums, CONSUMERS * blocks, dq_sums.block_type.shape[0])
    # Where the rotation's matrix lies: in the beginning for K, in the end for dK.
    turning_keys, turning = staged, wide_queries
    if rotated:
        turning_keys = staged._reinterpret(turn.dtype, [head_dim, head_dim], turn.layout)
        turning = wide_queries._reinterpret(turn.dtype, [head_dim, head_dim], turn.layout)
    held, narrow, wide, wide_free, grads_made, grads_free, turn_filled = _barriers(rotated)
    given = _Given(
        (dq_sums,), dk_out, dv_out, row_values, factors, k_descale,
        (q,), (do,), (k,), (v,), (q_wide,), (do_wide,), rows, turn,
        (keys,), (value_blocks,), (wide_keys,), (queries,), (grads,), (wide_queries,), (wide_grads,), bases, deltas,
        score_grads, (staged,), turning_keys, turning,
        held, narrow, wide, wide_free, grads_made, grads_free, turn_filled,
        k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size, size_v, exponent,
        before, after,
    )  # fmt: skip
    _start(
        given, tiles, group, shares, block_m, left, right, ragged, rotated, aligned, keys_in_place, dq_in_place, True,
        scaled_up, registers,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "k_batch", "k_head", "kv_heads", "seqlen_q", "seqlen_kv", "padded_q", "padded_kv", "plane", "before", "after",
    ]
)  # fmt: skip
def all_gradients_in_pieces_hopper(
    q, more_q, do, more_do, k, more_k, v, more_v, q_wide, more_q_wide, do_wide, more_do_wide, rows,
    dq_sums, more_dq_sums, row_values, factors, k_descale, dk_out, dv_out, tiles,
    k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size: gl.constexpr,
    size_v: gl.constexpr, exponent, before, after,
    group: gl.constexpr, shares: gl.constexpr, left: gl.constexpr, right: gl.constexpr, ragged: gl.constexpr,
    with_values: gl.constexpr, values_in_pieces: gl.constexpr, registers: gl.constexpr, aligned: gl.constexpr,
    scaled_up: gl.constexpr,
):  # fmt: skip
    """dK and, ``with_values``, dV of 128 keys and a share of the query heads, and their part of dQ.

    Arguments as of ``all_gradients_hopper``; ``more_...`` read or add to the second piece.  Without dV nothing reads
    ``do_wide`` and ``more_do_wide``, and unless ``values_in_pieces`` nothing ``more_v`` and ``more_do``.  With a table
    all that is laid out has slots, dQ's sums too.
    """
    if tiles is not None:  # noqa: SIM102 (where all lengths are alike there is no branch)
        if block_and_head()[0] >= gl.load(tiles):
            return
    block_m: gl.constexpr = q.block_type.shape[0]
    keys = slots(k, CONSUMERS, ROWS), slots(more_k, CONSUMERS, ROWS)
    wide_keys = _widened(dq_sums, k.block_type.shape[1]), _widened(more_dq_sums, more_k.block_type.shape[1])
    queries = slots(q, 2, block_m), slots(more_q, 2, block_m)
    wide_queries = slots(q_wide, 2, block_m), slots(more_q_wide, 2, block_m)
    bases = gl.allocate_shared_memory(rows.dtype, [2, block_m], rows.layout)
    deltas = gl.allocate_shared_memory(rows.dtype, [2, block_m], rows.layout)
    score_grads = _of_scores(block_m)
    # Of a warpgroup's dQ as much as is under way: two blocks, or two pieces.
    blocks: gl.constexpr = STAGED if with_values else 1
    staged = slots(dq_sums, CONSUMERS * blocks, block_m), slots(more_dq_sums, CONSUMERS * blocks, block_m)
    if with_values:
        value_blocks = slots(v, CONSUMERS, ROWS), slots(more_v, CONSUMERS, ROWS)
        wide_grads = slots(do_wide, 2, block_m), slots(more_do_wide, 2, block_m)
        grads = slots(do, 2, block_m), slots(more_do, 2, block_m)
        of_v, of_do = (v, more_v), (do, more_do)
    else:
        wide_grads = wide_queries
        if values_in_pieces:
            value_blocks = _over(staged[0], v), _over(staged[1], more_v)
            grads = slots(do, 2, block_m), slots(more_do, 2, block_m)
            of_v, of_do = (v, more_v), (do, more_do)
        else:
            value_blocks, grads = (_over(staged[0], v),), (slots(do, 2, block_m),)
            of_v, of_do = (v,), (do,)
    held, narrow, wide, wide_free, grads_made, grads_free, turn_filled = _barriers(False)
    given = _Given(
        (dq_sums, more_dq_sums), dk_out, dv_out, row_values, factors, k_descale,
        (q, more_q), of_do, (k, more_k), of_v, (q_wide, more_q_wide), (do_wide, more_do_wide), rows, rows,
        keys, value_blocks, wide_keys, queries, grads, wide_queries, wide_grads, bases, deltas,
        score_grads, staged, bases, bases,
        held, narrow, wide, wide_free, grads_made, grads_free, turn_filled,
        k_batch, k_head, kv_heads, seqlen_q, seqlen_kv, padded_q, padded_kv, plane, size, size_v, exponent,
        before, after,
    )  # fmt: skip
    _start(
        given, tiles, group, shares, block_m, left, right, ragged, False, aligned, False, False, with_values,
        scaled_up, registers,
    )  # fmt: skip
