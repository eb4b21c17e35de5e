"""The kernel of the FP8 backward that makes dQ, by blocks of queries; ``keys`` says how both work."""

from __future__ import annotations

import triton
import triton.language as tl

from ..arithmetic import bound, probabilities, product, steps, store_turned, to_bf16, to_e4m3, visible
from ..tile_rows import ROW, scale_of_keys
from .place import block_and_head

__all__ = ["query_gradients"]


@triton.jit
def _over_keys(
    dq,
    dq_rest,
    q,
    q_rest,
    do,
    base,
    delta,
    factor,
    k_place,
    k_token,
    v_place,
    v_token,
    k_desc,
    k_rest,
    v_desc,
    k_more,
    k_more_rest,
    kv_head,
    first,
    slot,
    seqlen_kv,
    query_start,
    start,
    stop,
    before,
    after,
    cap,
    masked: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    head_dim: tl.constexpr,
    rest: tl.constexpr,
    has_left: tl.constexpr,
    has_right: tl.constexpr,
    q_varies: tl.constexpr,
    k_varies: tl.constexpr,
    v_varies: tl.constexpr,
    capped: tl.constexpr,
    narrow: tl.constexpr,
    peak: tl.constexpr,
    shared: tl.constexpr,
    stages: tl.constexpr,
):
    """Adds to dQ what the keys from ``start`` to ``stop`` give."""
    for n in tl.range(bound(start), bound(stop), block_n, num_stages=stages):
        key = n + tl.arange(0, block_n)
        k = k_desc.load([first + n, 0])
        raw = tl.dot(q, tl.trans(k))
        if rest:
            raw = tl.dot(q_rest, tl.trans(k_rest.load([first + n, head_dim])), raw)
        if k_varies:
            k_own = tl.load(k_place + key.to(tl.int64) * k_token, mask=key < seqlen_kv, other=0.0)
            raw *= k_own[None, :]
        if q_varies:
            raw *= factor[:, None]
        else:
            raw *= factor
        p, slope = probabilities(raw, base[:, None], cap, capped)
        if masked:
            query = (query_start + tl.arange(0, block_m))[:, None]
            sees = visible(query, key[None, :], before, after, has_left, has_right) & (key < seqlen_kv)[None, :]
            p = tl.where(sees, p, 0.0)
        v = v_desc.load([first + n, 0])
        dp = tl.dot(do, tl.trans(v))
        if v_varies:
            dp *= tl.load(v_place + key.to(tl.int64) * v_token, mask=key < seqlen_kv, other=0.0)[None, :]
        ds = p * (dp - delta[:, None])
        if capped:
            ds *= slope
        if k_varies:
            ds *= k_own[None, :]
        if narrow:
            step, column = steps(ds), kv_head * (head_dim + rest)
            ds8 = to_e4m3(ds * (1.0 / step)[:, None])
            dq += tl.dot(ds8, tl.trans(k_more.load([column, slot + n]))) * step[:, None]
            if rest:
                dq_rest += tl.dot(ds8, tl.trans(k_more_rest.load([column + head_dim, slot + n]))) * step[:, None]
        else:
            ds16 = to_bf16(ds)
            dq = product(ds16, k_more.load([first + n, 0]), dq)
            if rest:
                dq_rest = product(ds16, k_more_rest.load([first + n, head_dim]), dq_rest)
    return dq, dq_rest


# A length of 1 would become a constant, and the loop over its block no loop: such code had dK wrong on an H200.
@triton.jit(do_not_specialize=["seqlen_q", "seqlen_kv", "before", "after"])
def query_gradients(
    q_desc,
    q_rest_desc,
    do_desc,
    k_desc,
    k_rest,
    v_desc,
    k_more,
    k_more_rest,
    rows,
    descales,
    k_descale,
    v_descale,
    turn,
    dq_out,
    tiles,
    plane,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    heads,
    group,
    seqlen_q,
    seqlen_kv,
    padded_q,
    padded_kv,
    size: tl.constexpr,
    scale,
    exponent,
    before,
    after,
    cap,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    head_dim: tl.constexpr,
    rest: tl.constexpr,
    ragged: tl.constexpr,
    has_left: tl.constexpr,
    has_right: tl.constexpr,
    q_varies: tl.constexpr,
    k_varies: tl.constexpr,
    v_varies: tl.constexpr,
    capped: tl.constexpr,
    rotated: tl.constexpr,
    narrow: tl.constexpr,
    peak: tl.constexpr,
    shared: tl.constexpr,
    stages: tl.constexpr,
    aligned: tl.constexpr,
):
    """dQ (B, H, Sq, D), contiguous, of one block of queries of one head.

    ``k_more`` is the widened copy, or the transposed one where ``narrow``; ``ragged`` says that the last block of
    keys is not full.  ``tiles``, ``aligned`` and ``rest``: see ``key_gradients``.
    """
    block, head = block_and_head()
    kv_head = head // group
    if tiles is None:
        # With a causal mask the last queries have the most to do: they go first.
        m = (tl.num_programs(0) - 1 - block) * block_m
        batch, own = (head // heads).to(tl.int64), (head % heads // group).to(tl.int64)
        q_first, k_slot = head * padded_q, 0
    else:
        if block >= tl.load(tiles):
            return
        tiles += (1 + block) * ROW
        batch, own = tl.load(tiles).to(tl.int64), kv_head.to(tl.int64)
        m, q_start, k_start, k_slot = tl.load(tiles + 1), tl.load(tiles + 2), tl.load(tiles + 4), tl.load(tiles + 7)
        q_first = head * padded_q + tl.load(tiles + 6)
        k_descale += k_start.to(tl.int64) * (k_token if k_varies else 1)
        v_descale += k_start.to(tl.int64) * (v_token if v_varies else 1)
        first_row = (batch * heads + head) * seqlen_q + q_start
        seqlen_q, seqlen_kv = tl.load(tiles + 3), tl.load(tiles + 5)
        if aligned:
            before -= seqlen_kv - seqlen_q
            after += seqlen_kv - seqlen_q
    k_first = kv_head * padded_kv + k_slot
    k_place = k_descale + batch * k_batch + own * k_head
    v_place = v_descale + batch * v_batch + own * v_head
    q = q_desc.load([q_first + m, 0])
    q_rest = q_rest_desc.load([q_first + m, head_dim]) if rest else q
    do = do_desc.load([q_first + m, 0])
    row = rows + (q_first + m).to(tl.int64) + tl.arange(0, block_m)
    base, delta = tl.load(row), tl.load(row + plane)
    factor = tl.load(row + 2 * plane) if q_varies else tl.load(rows + 2 * plane + q_first.to(tl.int64))
    factor *= exponent
    unscaled = scale
    if not k_varies:
        k_own = scale_of_keys(k_place, seqlen_kv, tiles)
        factor *= k_own
        unscaled *= k_own
    if not v_varies:
        unscaled *= scale_of_keys(v_place, seqlen_kv, tiles)
    if narrow:
        unscaled *= tl.load(descales + (q_first + m) // shared) * (1.0 / peak)
    dq = tl.zeros([block_m, head_dim], tl.float32)
    dq_rest = tl.zeros([block_m, rest if rest else 1], tl.float32)

    last = tl.minimum(m + block_m, seqlen_q) - 1
    begin, end = 0, seqlen_kv
    if has_left:
        begin = tl.minimum(tl.maximum(m - before, 0), seqlen_kv) // block_n * block_n
    if has_right:
        end = tl.minimum(tl.maximum(last + after + 1, 0), seqlen_kv)
    end = tl.maximum(tl.cdiv(end, block_n) * block_n, begin)
    whole_begin, whole_end = begin, end
    if has_left:
        whole_begin = tl.minimum(tl.cdiv(tl.maximum(last - before, 0), block_n) * block_n, end)
    if has_right:
        whole_end = tl.minimum(tl.maximum(m + after + 1, 0) // block_n * block_n, end)
    if ragged:
        whole_end = tl.minimum(seqlen_kv // block_n * block_n, whole_end)
    whole_end = tl.maximum(whole_end, whole_begin)

    if has_left:
        dq, dq_rest = _over_keys(
            dq, dq_rest, q, q_rest, do, base, delta, factor, k_place, k_token, v_place, v_token, k_desc, k_rest, v_desc,
            k_more, k_more_rest, kv_head, k_first, k_slot, seqlen_kv, m, begin, whole_begin, before, after, cap, True,
            block_m, block_n, head_dim, rest, has_left, has_right, q_varies, k_varies, v_varies, capped, narrow, peak,
            shared, stages,
        )  # fmt: skip
    dq, dq_rest = _over_keys(
        dq, dq_rest, q, q_rest, do, base, delta, factor, k_place, k_token, v_place, v_token, k_desc, k_rest, v_desc,
        k_more, k_more_rest, kv_head, k_first, k_slot, seqlen_kv, m, whole_begin, whole_end, before, after, cap, False,
        block_m, block_n, head_dim, rest, has_left, has_right, q_varies, k_varies, v_varies, capped, narrow, peak,
        shared, stages,
    )  # fmt: skip
    if has_right or ragged:
        dq, dq_rest = _over_keys(
            dq, dq_rest, q, q_rest, do, base, delta, factor, k_place, k_token, v_place, v_token, k_desc, k_rest, v_desc,
            k_more, k_more_rest, kv_head, k_first, k_slot, seqlen_kv, m, whole_end, end, before, after, cap, True,
            block_m, block_n, head_dim, rest, has_left, has_right, q_varies, k_varies, v_varies, capped, narrow, peak,
            shared, stages,
        )  # fmt: skip

    query = m + tl.arange(0, block_m)
    row = head.to(tl.int64) * seqlen_q + query if tiles is None else first_row + query
    inside, pitch = query < seqlen_q, head_dim + rest
    store_turned(dq_out, dq, unscaled, turn, row, inside, size, block_m, head_dim, 0, pitch, rotated)
    if rest:
        store_turned(dq_out, dq_rest, unscaled, turn, row, inside, size, block_m, rest, head_dim, pitch, rotated)
