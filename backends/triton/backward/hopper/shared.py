"""What the Hopper kernels of the FP8 backward share: their rings, blocks, masks, operands and what they write.

A warpgroup's product has its rows 16 to a warp; of a row four threads have every eighth pair of columns (PTX ISA, the
fragment of D of wgmma.m64nNk16), and that is also how a product takes a first operand of 16 bits from registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..place import AT_ONCE

__all__ = [
    "CONSUMERS",
    "ROWS",
    "advanced",
    "barrier_where",
    "block_and_head",
    "operand",
    "ring",
    "span_of_keys",
    "span_of_queries",
    "store",
    "top_query_and_head",
    "transposed_product",
    "turned",
    "visible_part",
]

_AT_ONCE = gl.constexpr(AT_ONCE.value)
CONSUMERS = gl.constexpr(2)  # warpgroups that compute
ROWS = gl.constexpr(64)  # of a warpgroup: the height of its matrix instruction


@gluon.jit
def advanced(slot, phase, stages: gl.constexpr):
    """The next slot of a ring, and the phase of its barriers."""
    last = slot == stages - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def barrier_where(needed: gl.constexpr, otherwise):
    """A barrier for one arrival, or where none is ``needed`` another one, which is not touched for it.

    A barrier that is made and never used does harm.  Nothing in the kernel keeps it alive, so the compiler lends its
    bytes to something else, and memory of a barrier may not hold anything else before it is invalidated (PTX ISA,
    mbarrier.inval): on an H200 the bytes were a barrier again now and then, in the middle of an exchange.
    """
    barrier = otherwise
    if needed:
        barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def ring(stages: gl.constexpr, rotated: gl.constexpr):
    """(held, filled, further, emptied, turn_filled): barriers of what a program keeps, of a ring's slots, filled twice
    and emptied by both warpgroups, and of a rotation's matrix.
    """
    held = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn_filled = barrier_where(rotated, held)
    filled = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    further = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    mbarrier.init(held, count=1)
    for i in gl.static_range(stages):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(further.index(i), count=1)
        mbarrier.init(emptied.index(i), count=CONSUMERS)
    return held, filled, further, emptied, turn_filled


@gluon.jit
def span_of_queries(
    first_key, seqlen_q, seqlen_kv, before, after, block_m: gl.constexpr, left: gl.constexpr, right: gl.constexpr
):
    """(first, whole, parted, blocks): where a program's queries start, where they all see all keys, how many blocks.

    There is one block at least, in which no query need see a key.
    """
    last_key = gl.minimum(first_key + CONSUMERS * ROWS, seqlen_kv) - 1
    first, end = 0, gl.cdiv(seqlen_q, block_m) * block_m
    if right:
        first = gl.minimum(gl.maximum(first_key - after, 0) // block_m * block_m, end - block_m)
    whole = first
    if right:
        whole = gl.cdiv(gl.maximum(last_key - after, 0), block_m) * block_m
    if left:
        seeing = gl.minimum(gl.maximum(last_key + before + 1, 0), seqlen_q)
        end = gl.maximum(gl.cdiv(seeing, block_m) * block_m, first + block_m)
    parted = end
    if left:
        parted = gl.maximum(first_key + before + 1, 0) // block_m * block_m
    return first, whole, parted, (end - first) // block_m


@gluon.jit
def block_and_head():
    """As ``place.block_and_head``, which is in Triton."""
    blocks, heads = gl.num_programs(0), gl.num_programs(1)
    number = gl.program_id(1) * blocks + gl.program_id(0)
    section = gl.maximum(_AT_ONCE // blocks, 1)
    before = number // (section * blocks) * section
    width = gl.minimum(section, heads - before)
    number -= before * blocks
    return number // width, before + number % width


@gluon.jit
def top_query_and_head():
    """The program's first query.  With a causal mask the last ones have the most to do: they go first."""
    block, head = block_and_head()
    return (gl.num_programs(0) - 1 - block) * (CONSUMERS * ROWS), head


@gluon.jit
def span_of_keys(
    top, seqlen_q, seqlen_kv, before, after, block_n: gl.constexpr, left: gl.constexpr, right: gl.constexpr
):
    """(first, whole, parted, blocks): where the keys start, where all queries see all of them, how many blocks.

    There is one block at least, in which no query need see a key.
    """
    bottom = gl.minimum(top + CONSUMERS * ROWS, seqlen_q) - 1
    first, whole = 0, 0
    last, parted = seqlen_kv, seqlen_kv // block_n * block_n
    if right:
        last = gl.minimum(last, gl.maximum(bottom + after + 1, 0))
        parted = gl.minimum(parted, gl.maximum(top + after + 1, 0) // block_n * block_n)
    if left:
        first = gl.minimum(gl.maximum(top - before, 0), seqlen_kv - 1) // block_n * block_n
        whole = gl.cdiv(gl.maximum(bottom - before, 0), block_n) * block_n
    return first, whole, parted, gl.maximum(gl.cdiv(last - first, block_n), 1)


@gluon.jit
def transposed_product(a, b, columns: gl.constexpr, layout: gl.constexpr):
    """Starts a · bᵀ, both in shared memory with the axis that is summed over contiguous."""
    zeros = gl.zeros([ROWS, columns], gl.float32, layout)
    return warpgroup_mma(a, b.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def operand(x, layout: gl.constexpr):
    """x in bf16 as a product's first operand: every thread has what it needs already."""
    return gl.convert_layout(x.to(gl.bfloat16), layout, assert_trivial=True)


@gluon.jit
def visible_part(p, start, since, upto, low: gl.constexpr, high: gl.constexpr):
    """p, and 0 where a row does not see a column: it sees those from ``since`` (``low``) to ``upto`` (``high``).

    ``start`` is p's first column.  Of a row's columns a thread has 8 i + 2 t and 8 i + 2 t + 1, t being its place among
    four: with t taken from the bounds, every column is compared as a constant.
    """
    split = p.reshape(p.shape[0], p.shape[1] // 8, 4, 2)
    layout: gl.constexpr = split.type.layout
    eighth = gl.arange(0, split.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    place = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    which = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    column = eighth[None, :, None, None] * 8 + which[None, None, None, :]
    offset = start + place[None, None, :, None] * 2
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    if high:
        split = gl.where(column <= gl.convert_layout(upto, rows)[:, None, None, None] - offset, split, 0.0)
    if low:
        split = gl.where(column >= gl.convert_layout(since, rows)[:, None, None, None] - offset, split, 0.0)
    return gl.convert_layout(split.reshape(p.shape), p.type.layout)


@gluon.jit
def turned(x, turn, columns: gl.constexpr, layout: gl.constexpr):
    """x · turn, in fp32 from bf16: a rotation's signs are exact there, its factor is left out."""
    x = operand(x, gl.DotOperandLayout(0, layout, 2))
    zeros = gl.zeros([ROWS, columns], gl.float32, layout)
    made = warpgroup_mma(x, turn, zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, [made])


@gluon.jit
def store(out, x, at, top, length, first, size, layout: gl.constexpr):
    """x as rows from ``top`` on of the head that begins at row ``at`` of ``out``, and as columns from ``first`` on.

    A head has ``length`` rows of ``size`` columns.
    """
    row = top + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    column = first + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    inside = (row < length)[:, None] & (column < size)[None, :]
    gl.store(out + (at + row)[:, None] * size + column[None, :], x.to(out.dtype.element_ty), mask=inside)
