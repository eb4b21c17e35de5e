"""The kernel of the FP8 backward that makes dK and dV, by blocks of keys; dQ has its own, and nothing is atomic.

S = QKᵀ and dP = dO·Vᵀ are FP8 products over the head dimension.  The sums over tokens, dV = Pᵀ·dO, dK = dSᵀ·Q and
dQ = dS·K, take P and dS in bf16 with widened operands, or (``narrow``) in e4m3 with transposed ones.  P and dS stay in
registers as the first operand of their products: the kernel over keys computes Sᵀ, the one over queries S.

Descales go where they cost least.  Those of a head are numbers, Q's and K's in the exponent's factor and all in the
last product; where they differ between tokens (``q_varies``, ``k_varies``, ``v_varies``) they are vectors that also
scale dS before it is rounded.  dO's are one for each block of queries: P comes out of the exponential larger by it, or
by PEAK where it is rounded to e4m3 (``Gradient.rows``), and so does dS, which then needs no factor of its own.
Queries behind the last one have an infinite log-sum-exp: P is 0 there without a bounds check.

In e4m3, each row of dS is scaled by its largest magnitude in the block, and each block's sum is a fresh accumulator,
scaled back as it is added in fp32, so the tensor core's short accumulator (SageAttention2, arXiv 2411.10958,
section 3.3) never outlasts a block.

Masks come as ``before`` = left - offset and ``after`` = right + offset of ``problem.mask.Mask``: query i sees key j
when i - before <= j <= i + after.  Blocks that see nothing are skipped, and only those on an edge are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..arithmetic import bound, probabilities, product, steps, store_turned, to_bf16, to_e4m3, visible
from ..tile_rows import ROW, scale_of_keys
from .place import block_and_head, query_heads

__all__ = ["key_gradients"]


@triton.jit
def _over_queries(
    dk,
    dk_rest,
    dv,
    k,
    k_rest,
    v,
    k_descale,
    v_descale,
    q_desc,
    q_rest,
    do_desc,
    q_more,
    q_more_rest,
    do_more,
    rows,
    plane,
    descales,
    factor,
    head,
    first,
    slot,
    key_start,
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
    head_dim_v: tl.constexpr,
    of_k: tl.constexpr,
    of_v: tl.constexpr,
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
    """Adds to dK (``of_k``) and dV (``of_v``) what the queries from ``start`` to ``stop`` of one head give."""
    for m in tl.range(bound(start), bound(stop), block_m, num_stages=stages):
        row = rows + (first + m).to(tl.int64) + tl.arange(0, block_m)
        q = q_desc.load([first + m, 0])
        raw = tl.dot(k, tl.trans(q))
        if rest:
            raw = tl.dot(k_rest, tl.trans(q_rest.load([first + m, head_dim])), raw)
        if k_varies:
            raw *= k_descale[:, None]
        if q_varies:
            own = tl.load(row + 2 * plane)
            raw *= (own * factor)[None, :]
        else:
            raw *= factor
        p, slope = probabilities(raw, tl.load(row)[None, :], cap, capped)
        if masked:
            query = (m + tl.arange(0, block_m))[None, :]
            key = (key_start + tl.arange(0, block_n))[:, None]
            p = tl.where(visible(query, key, before, after, has_left, has_right), p, 0.0)
        if of_k:
            dp = tl.dot(v, tl.trans(do_desc.load([first + m, 0])))
            if v_varies:
                dp *= v_descale[:, None]
            ds = p * (dp - tl.load(row + plane)[None, :])
            if capped:
                ds *= slope
            if q_varies:
                ds *= own[None, :]
        # Both are rounded before either is summed up: fewer registers are alive beside a fresh accumulator.
        if narrow:
            share = tl.load(descales + (first + m) // shared) * (1.0 / peak)
            p8 = to_e4m3(p)
            if of_k:
                step = steps(ds)
                ds8 = to_e4m3(ds * (1.0 / step)[:, None])
            if of_v:
                dv += tl.dot(p8, tl.trans(do_more.load([head * head_dim_v, slot + m]))) * share
            if of_k:
                column = head * (head_dim + rest)
                dk += tl.dot(ds8, tl.trans(q_more.load([column, slot + m]))) * (step * share)[:, None]
                if rest:
                    other = tl.trans(q_more_rest.load([column + head_dim, slot + m]))
                    dk_rest += tl.dot(ds8, other) * (step * share)[:, None]
        else:
            p16 = to_bf16(p)
            if of_k:
                ds16 = to_bf16(ds)
            if of_v:
                dv = product(p16, do_more.load([first + m, 0]), dv)
            if of_k:
                dk = product(ds16, q_more.load([first + m, 0]), dk)
                if rest:
                    dk_rest = product(ds16, q_more_rest.load([first + m, head_dim]), dk_rest)
    return dk, dk_rest, dv


# A length of 1 would become a constant, and the loop over its block no loop: such code had dK wrong on an H200.
@triton.jit(do_not_specialize=["seqlen_q", "seqlen_kv", "before", "after"])
def key_gradients(
    q_desc,
    q_rest,
    do_desc,
    k_desc,
    k_rest_desc,
    v_desc,
    q_more,
    q_more_rest,
    do_more,
    rows,
    descales,
    k_descale,
    v_descale,
    turn,
    dk_out,
    dv_out,
    tiles,
    plane,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    kv_heads,
    seqlen_q,
    seqlen_kv,
    padded_q,
    padded_kv,
    size: tl.constexpr,
    size_v: tl.constexpr,
    scale,
    exponent,
    before,
    after,
    cap,
    group: tl.constexpr,
    shares: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    head_dim: tl.constexpr,
    rest: tl.constexpr,
    head_dim_v: tl.constexpr,
    of_k: tl.constexpr,
    of_v: tl.constexpr,
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
    """dK (B, Hkv · shares, Skv, D) and dV of one block of keys and a share of the query heads, contiguous.

    The ``group`` query heads of a key head are divided into ``shares``; ``shares.summed`` adds up their dK and dV.
    ``of_k`` and ``of_v``: which of the two.  Wide heads take one kernel for each, because the sums of both fill the
    registers; S is then computed twice, and each kernel keeps twice as many keys.  ``rest``: columns of Q and K behind
    ``head_dim``, if the two are not one power of two; for those are descriptors of their own.
    ``q_more`` and ``do_more`` are the widened copies, or the transposed ones where ``narrow``.  ``turn`` (D, D) takes
    the gradient of a rotated K back, without the factor that ``scale`` has then.  ``tiles``: the table of sequences
    that have lengths of their own, or None.  With it all that is laid out has slots, and ``aligned`` says that a
    sequence's ``after`` is larger, and ``before`` smaller, by its keys less its queries.
    """
    block, share = block_and_head()
    kv_head = share // shares
    if tiles is None:
        n = block * block_n
        batch, own = (kv_head // kv_heads).to(tl.int64), (kv_head % kv_heads).to(tl.int64)
        q_slot, k_first = 0, kv_head * padded_kv
    else:
        if block >= tl.load(tiles):
            return
        tiles += (1 + block) * ROW
        batch, own = tl.load(tiles).to(tl.int64), kv_head.to(tl.int64)
        n, k_start, q_slot = tl.load(tiles + 1), tl.load(tiles + 4), tl.load(tiles + 6)
        k_first = kv_head * padded_kv + tl.load(tiles + 7)
        k_descale += k_start.to(tl.int64) * (k_token if k_varies else 1)
        v_descale += k_start.to(tl.int64) * (v_token if v_varies else 1)
        first_row = (batch * kv_heads * shares + share) * seqlen_kv + k_start
        seqlen_q, seqlen_kv = tl.load(tiles + 3), tl.load(tiles + 5)
        if aligned:
            before -= seqlen_kv - seqlen_q
            after += seqlen_kv - seqlen_q
    key = n + tl.arange(0, block_n)
    real = key < seqlen_kv
    k_place = k_descale + batch * k_batch + own * k_head
    v_place = v_descale + batch * v_batch + own * v_head
    if k_varies:
        k_own = tl.load(k_place + key.to(tl.int64) * k_token, mask=real, other=0.0)
    else:
        k_own = scale_of_keys(k_place, seqlen_kv, tiles)
    if v_varies:
        v_own = tl.load(v_place + key.to(tl.int64) * v_token, mask=real, other=0.0)
    else:
        v_own = scale_of_keys(v_place, seqlen_kv, tiles)
    k = k_desc.load([k_first + n, 0])
    k_rest = k_rest_desc.load([k_first + n, head_dim]) if rest else k
    v = v_desc.load([k_first + n, 0]) if of_k else k
    # What is not asked for is one column that nothing is added to.
    dk = tl.zeros([block_n, head_dim if of_k else 1], tl.float32)
    dk_rest = tl.zeros([block_n, rest if of_k and rest else 1], tl.float32)
    dv = tl.zeros([block_n, head_dim_v if of_v else 1], tl.float32)

    last = tl.minimum(n + block_n, seqlen_kv) - 1
    begin, end = 0, tl.cdiv(seqlen_q, block_m) * block_m
    if has_right:
        begin = tl.minimum(tl.maximum(n - after, 0) // block_m * block_m, end)
    if has_left:
        end = tl.maximum(tl.cdiv(tl.minimum(tl.maximum(last + before + 1, 0), seqlen_q), block_m) * block_m, begin)
    whole_begin, whole_end = begin, end
    if has_right:
        whole_begin = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(last - after, 0), block_m) * block_m, begin), end)
    if has_left:
        whole_end = tl.maximum(tl.minimum(tl.maximum(n + before + 1, 0) // block_m * block_m, end), whole_begin)

    q_own = 1.0
    factor = exponent
    if not k_varies:
        factor *= k_own
    first_head, heads = query_heads(share, group, shares)
    for member in range(bound(heads)):
        head = first_head + member
        if not q_varies:
            # dK so far is in units of the last head's descale.
            following = tl.load(rows + 2 * plane + head.to(tl.int64) * padded_q + q_slot)
            dk *= q_own / following
            dk_rest *= q_own / following
            q_own = following
        own_factor = factor if q_varies else factor * q_own
        q_first = head * padded_q + q_slot
        if has_right:
            dk, dk_rest, dv = _over_queries(
                dk, dk_rest, dv, k, k_rest, v, k_own, v_own, q_desc, q_rest, do_desc, q_more, q_more_rest, do_more,
                rows, plane, descales, own_factor, head, q_first, q_slot, n, begin, whole_begin, before, after, cap,
                True, block_m, block_n, head_dim, rest, head_dim_v, of_k, of_v, has_left, has_right, q_varies, k_varies,
                v_varies, capped, narrow, peak, shared, stages,
            )  # fmt: skip
        dk, dk_rest, dv = _over_queries(
            dk, dk_rest, dv, k, k_rest, v, k_own, v_own, q_desc, q_rest, do_desc, q_more, q_more_rest, do_more, rows,
            plane, descales, own_factor, head, q_first, q_slot, n, whole_begin, whole_end, before, after, cap, False,
            block_m, block_n, head_dim, rest, head_dim_v, of_k, of_v, has_left, has_right, q_varies, k_varies, v_varies,
            capped, narrow, peak, shared, stages,
        )  # fmt: skip
        if has_left:
            dk, dk_rest, dv = _over_queries(
                dk, dk_rest, dv, k, k_rest, v, k_own, v_own, q_desc, q_rest, do_desc, q_more, q_more_rest, do_more,
                rows, plane, descales, own_factor, head, q_first, q_slot, n, whole_end, end, before, after, cap, True,
                block_m, block_n, head_dim, rest, head_dim_v, of_k, of_v, has_left, has_right, q_varies, k_varies,
                v_varies, capped, narrow, peak, shared, stages,
            )  # fmt: skip

    unscaled = scale * q_own
    if not v_varies:
        unscaled *= v_own
    if tiles is not None:  # keys that no query asks for may hold anything, and their descale too
        unscaled = tl.where(seqlen_q > 0, unscaled, 0.0)
    row = share.to(tl.int64) * seqlen_kv + key if tiles is None else first_row + key
    if of_k:
        pitch: tl.constexpr = head_dim + rest
        store_turned(dk_out, dk, unscaled, turn, row, real, size, block_n, head_dim, 0, pitch, rotated)
        if rest:
            store_turned(dk_out, dk_rest, unscaled, turn, row, real, size, block_n, rest, head_dim, pitch, rotated)
    if of_v:
        store_turned(dv_out, dv, 1.0, turn, row, real, size_v, block_n, head_dim_v, 0, head_dim_v, False)
