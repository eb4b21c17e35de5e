"""What the warp that loads does in the Hopper kernels of dK with dV, and of dQ: it brings what is kept, and a ring.

A slot of the ring is filled twice: with what S and dP take in e4m3, and with the further copies that the sums over
tokens take, in bf16 as rows or (``across``) in e4m3 and transposed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .shared import CONSUMERS, ROWS, advanced, block_and_head, span_of_keys, span_of_queries, top_query_and_head

__all__ = ["load_for_keys", "load_for_queries"]


@gluon.jit
def _load_keys(given, row):
    """Starts to bring the keys and values that a program keeps, from ``row`` of their matrices on."""
    mbarrier.expect(given.held, CONSUMERS * (given.k.block_type.nbytes + given.v.block_type.nbytes))
    for i in gl.static_range(CONSUMERS):
        tma.async_copy_global_to_shared(given.k, [row + i * ROWS, 0], given.held, given.keys.index(i))
        tma.async_copy_global_to_shared(given.v, [row + i * ROWS, 0], given.held, given.value_blocks.index(i))


@gluon.jit
def _load_queries(given, row, slot, full):
    """Starts to bring a block of Q and dO in e4m3, and the two numbers that each query has."""
    mbarrier.expect(full, given.q.block_type.nbytes + given.do.block_type.nbytes + 2 * given.rows.block_type.nbytes)
    tma.async_copy_global_to_shared(given.q, [row, 0], full, given.queries.index(slot))
    tma.async_copy_global_to_shared(given.rows, [row], full, given.bases.index(slot))
    tma.async_copy_global_to_shared(given.do, [row, 0], full, given.grads.index(slot))
    tma.async_copy_global_to_shared(given.rows, [given.plane + row], full, given.deltas.index(slot))


@gluon.jit
def _load_turn(given, slot, phase, stages: gl.constexpr):
    """Starts to bring a rotation's matrix, whole or by parts, over the ring's blocks when nothing reads them any more.

    ``slot`` and ``phase`` are those of the block that would be next.
    """
    for _stage in gl.static_range(stages):
        mbarrier.wait(given.emptied.index(slot), phase)
        slot, phase = advanced(slot, phase, stages)
    if len(given.turning.shape) == 2:
        mbarrier.expect(given.turn_filled, given.turn.block_type.nbytes)
        tma.async_copy_global_to_shared(given.turn, [0, 0], given.turn_filled, given.turning)
    else:
        parts: gl.constexpr = given.turning.shape[0]
        mbarrier.expect(given.turn_filled, parts * given.turn.block_type.nbytes)
        for i in gl.static_range(parts):
            tma.async_copy_global_to_shared(
                given.turn, [i * given.turn.block_type.shape[0], 0], given.turn_filled, given.turning.index(i)
            )


@gluon.jit
def _load_further(tile, head, row, token, full, place, across: gl.constexpr):
    """Starts to bring a copy for the sums: the rows from ``row`` on, or the columns from ``token`` on of a head."""
    if across:
        tma.async_copy_global_to_shared(tile, [head * tile.block_type.shape[0], token], full, place)
    else:
        tma.async_copy_global_to_shared(tile, [row, 0], full, place)


@gluon.jit
def load_for_keys(
    given, group: gl.constexpr, block_m: gl.constexpr, stages: gl.constexpr, left: gl.constexpr, right: gl.constexpr,
    rotated: gl.constexpr, across: gl.constexpr,
):  # fmt: skip
    """Brings K and V of the program's keys, then block after block of the queries that see one of them."""
    block, kv_head = block_and_head()
    first_key = block * (CONSUMERS * ROWS)
    _load_keys(given, kv_head * given.padded_kv + first_key)
    span = span_of_queries(first_key, given.seqlen_q, given.seqlen_kv, given.before, given.after, block_m, left, right)
    first, blocks = span[0], span[3]
    slot, phase = 0, 1
    for member in range(group):
        head = kv_head * group + member
        query = first
        for _step in range(blocks):
            row = head * given.padded_q + query
            mbarrier.wait(given.emptied.index(slot), phase)
            _load_queries(given, row, slot, given.filled.index(slot))
            full = given.further.index(slot)
            mbarrier.expect(full, given.q_further.block_type.nbytes + given.do_further.block_type.nbytes)
            _load_further(given.do_further, head, row, query, full, given.further_grads.index(slot), across)
            _load_further(given.q_further, head, row, query, full, given.further_queries.index(slot), across)
            query += block_m
            slot, phase = advanced(slot, phase, stages)
    if rotated:
        _load_turn(given, slot, phase, stages)


@gluon.jit
def load_for_queries(
    given, block_n: gl.constexpr, stages: gl.constexpr, left: gl.constexpr, right: gl.constexpr, rotated: gl.constexpr,
    across: gl.constexpr,
):  # fmt: skip
    """Brings Q and dO of the program's queries, then block after block of the keys that one of them sees."""
    top, head = top_query_and_head()
    row = head * given.padded_q + top
    mbarrier.expect(given.held, CONSUMERS * (given.q.block_type.nbytes + given.do.block_type.nbytes))
    for i in gl.static_range(CONSUMERS):
        tma.async_copy_global_to_shared(given.q, [row + i * ROWS, 0], given.held, given.queries.index(i))
        tma.async_copy_global_to_shared(given.do, [row + i * ROWS, 0], given.held, given.grads.index(i))
    span = span_of_keys(top, given.seqlen_q, given.seqlen_kv, given.before, given.after, block_n, left, right)
    kv_head, key = head // given.group, span[0]
    slot, phase = 0, 1
    for _step in range(span[3]):
        row = kv_head * given.padded_kv + key
        mbarrier.wait(given.emptied.index(slot), phase)
        full = given.filled.index(slot)
        mbarrier.expect(full, given.k.block_type.nbytes + given.v.block_type.nbytes)
        tma.async_copy_global_to_shared(given.k, [row, 0], full, given.keys.index(slot))
        tma.async_copy_global_to_shared(given.v, [row, 0], full, given.value_blocks.index(slot))
        full = given.further.index(slot)
        mbarrier.expect(full, given.k_further.block_type.nbytes)
        _load_further(given.k_further, kv_head, row, key, full, given.further_keys.index(slot), across)
        key += block_n
        slot, phase = advanced(slot, phase, stages)
    if rotated:
        _load_turn(given, slot, phase, stages)
