"""Where a program of a Hopper kernel has its keys and queries: in tensors of one length, or by a table (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile_rows import ROW as TABLE_ROW
from .shared import CONSUMERS, ROWS, block_and_head

__all__ = ["asked_for", "seen_by", "sequence", "where"]

_ROW = gl.constexpr(TABLE_ROW.value)
_NEVER = gl.constexpr(1 << 30)  # behind every query


@gluon.jit
def sequence(tiles, before, after, aligned: gl.constexpr):
    """The program's row of the table: (batch entry, first key, where the sequence's queries and keys start, their
    numbers, the slots of queries and keys, the sequence's own ``before`` and ``after``).
    """
    row = tiles + (1 + block_and_head()[0]) * _ROW
    queries, keys = gl.load(row + 3), gl.load(row + 5)
    if aligned:
        before, after = before - (keys - queries), after + (keys - queries)
    return (
        gl.load(row), gl.load(row + 1), gl.load(row + 2), gl.load(row + 4), queries, keys, gl.load(row + 6),
        gl.load(row + 7), before, after,
    )  # fmt: skip


@gluon.jit
def where(given, tiles, share, shares: gl.constexpr, aligned: gl.constexpr, dq_in_place: gl.constexpr):
    """Where a program's keys are: (their first, how many queries there are, Sq, Skv, before, after, the slot of its
    queries, the row of dQ's sums in which it begins if they are in place, that of dK and dV, the place of K's descale).
    """
    seqlen_q, seqlen_kv, before, after = given.seqlen_q, given.seqlen_kv, given.before, given.after
    kv_head = share // shares
    first_key = block_and_head()[0] * (CONSUMERS * ROWS)
    q_slot = 0
    queries, dq_top = seqlen_q, 0
    if tiles is None:
        at = share.to(gl.int64) * seqlen_kv
        batch, own = (kv_head // given.kv_heads).to(gl.int64), kv_head % given.kv_heads
        k_place = given.k_descale + batch * given.k_batch + own * given.k_head
    else:
        stored, stored_q = seqlen_kv, seqlen_q
        batch, first_key, q_start, k_start, queries, seqlen_kv, q_slot, _, before, after = sequence(
            tiles, before, after, aligned
        )
        seqlen_q = gl.maximum(queries, 1)
        if dq_in_place:
            dq_top = (batch * given.kv_heads + kv_head) * stored_q + q_start
        at = (batch.to(gl.int64) * given.kv_heads * shares + share) * stored + k_start
        # Descales of a sequence have the places of its tokens, one behind the other; the last may have none.
        k_place = (
            given.k_descale
            + batch.to(gl.int64) * given.k_batch
            + kv_head * given.k_head
            + gl.minimum(k_start, stored - 1)
        )
    return first_key, queries, seqlen_q, seqlen_kv, before, after, q_slot, dq_top, at, k_place


@gluon.jit
def asked_for(x, queries, tiles):
    """A gradient of keys; 0 of those of a sequence without queries, which may hold anything."""
    return x if tiles is None else gl.where(queries > 0, x, 0.0)


@gluon.jit
def seen_by(key, first_key, whole, seqlen_kv, before, after, right: gl.constexpr, ragged: gl.constexpr):
    """The first and the last query that see each key, and ``whole`` of ``span_of_queries``.

    ``ragged``: what lies behind the last key is seen by no query, in any block.
    """
    since, upto = key - after if right else key * 0, key + before
    if ragged:
        since = gl.where(key < seqlen_kv, since, _NEVER)
        whole = gl.where(first_key + CONSUMERS * ROWS > seqlen_kv, _NEVER, whole)
    return since, upto, whole
