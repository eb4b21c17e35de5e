"""The forward kernel of ``triton``: softmax(scale · Q Kᵀ) V on e4m3 operands, Q and K perhaps of 16 bits, in Triton.

FlashAttention-2's loop (Dao, arXiv 2307.08691, algorithm 1) with what eight bits need: P is scaled by 2⁸ before it
is rounded to e4m3, whose largest number is 448; every product P·V starts from zero and is added in FP32, because
Hopper's FP8 accumulator keeps 13 mantissa bits (DeepSeek-V3, arXiv 2412.19437, section 3.5.2) and would lose more
the more keys there are; V comes transposed, because FP8 tensor cores read both operands along the axis they sum.

Scores are exponents of 2: log2(e), the scale and the descales are one factor a row.  ``peak`` is a row's largest so
far.  Where keys have descales of V of their own, log2 of them is added to the scores, so that it is P times the
descale that is rounded, and the peak that of both: a row's rounding depends on the keys that it sees, and on no other.

Where sequences have lengths of their own (``tiles``), the table of ``tile_map`` names each program's queries.  Blocks
of Q and K may then reach into the next sequence, whose scores are not seen; V's copy has slots with zeros behind each
sequence, because 0 · NaN would be NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..arithmetic import bound, product, to_bf16, to_e4m3
from ..tile_rows import ROW, scale_of_keys

__all__ = ["triton_fp8_attention_forward"]

_HEADROOM = tl.constexpr(8.0)  # log2 of P's largest value, as in FlashAttention-3 (hopper/softmax.h, Max_offset)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def _tile(source, row, column, stride, rows, columns, height: tl.constexpr, width: tl.constexpr, tma: tl.constexpr):
    """(height, width) of a matrix (rows, columns) from (row, column) on, zeros beyond its end."""
    if tma:
        tile = source.load([row, column])
    else:
        down, across = tl.arange(0, height), tl.arange(0, width)
        first = source + (tl.zeros([], tl.int64) + row) * stride + column
        inside = (row + down < rows)[:, None] & (column + across < columns)[None, :]
        tile = tl.load(first + down[:, None] * stride + across[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def _factors(factors, key, seqlen_kv, masked: tl.constexpr):
    """The factors of a block's keys, anything finite behind the last one."""
    return tl.load(factors + key, mask=key < seqlen_kv, other=1.0) if masked else tl.load(factors + key)


@triton.jit
def _added(acc, decay, p, values, promotion: tl.constexpr):
    """acc · decay + p · valuesᵀ."""
    acc = acc * decay[:, None]
    if promotion == 0:
        acc += tl.dot(p, values.T)
    else:
        acc = tl.dot(p, values.T, acc, max_num_imprecise_acc=promotion)
    return acc


@triton.jit
def _blocks(
    accs, total, peak, q, q_factor, capped, since, upto, first, last,
    k, k_row, k_column, k_stride, k_rows, k_columns, v, v_row, v_slot, v_rows, v_columns,
    k_factors, v_factors, v_inverses, seqlen_kv,
    block_n: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr, stages: tl.constexpr, tma: tl.constexpr,
    masked: tl.constexpr, left: tl.constexpr, softcapped: tl.constexpr, negative: tl.constexpr,
    k_per_key: tl.constexpr, v_per_key: tl.constexpr, promotion: tl.constexpr, parts: tl.constexpr,
    interleaved: tl.constexpr,
):  # fmt: skip
    """The keys from ``first`` to ``last``, ``block_n`` at a time; ``masked`` where some query does not see all of them.

    Each query sees the keys from ``since`` to ``upto``.  ``accs`` are the sums of P·V, each for a part of V's columns.
    """
    for start in tl.range(bound(first), bound(last), block_n, num_stages=stages):
        keys = _tile(k, k_row + start, k_column, k_stride, k_rows, k_columns, block_n, block_d, tma)
        scores = product(q, keys.T, tl.zeros([q.shape[0], block_n], tl.float32))
        key = start + tl.arange(0, block_n)
        if k_per_key:
            factor = _factors(k_factors, key, seqlen_kv, masked)
            scores = scores * factor[None, :]
        if softcapped:  # capped · tanh(x), where 2^(scores · q_factor) is e^2x
            scores = capped - 2.0 * capped / (1.0 + tl.exp2(scores * q_factor[:, None]))
        elif negative:
            scores = -scores
        if masked:
            seen = key[None, :] <= upto[:, None]
            if left:
                seen = seen & (key[None, :] >= since[:, None])
            scores = tl.where(seen, scores, _MINUS_INFINITY)
        if v_per_key:
            if not softcapped:
                scores = scores * q_factor[:, None]
            scores = scores + _factors(v_factors, key, seqlen_kv, masked)[None, :]
        here = tl.max(scores, 1)
        if not (softcapped or v_per_key):
            here = here * q_factor
        new_peak = tl.maximum(peak, here)
        shift = new_peak - _HEADROOM
        if masked:
            shift = tl.where(new_peak == _MINUS_INFINITY, 0.0, shift)
        if softcapped or v_per_key:
            p = tl.exp2(scores - shift[:, None])
        else:
            p = tl.exp2(scores * q_factor[:, None] - shift[:, None])
        decay = tl.exp2(peak - _HEADROOM - shift)
        if v_per_key:
            total = total * decay + tl.sum(p * _factors(v_inverses, key, seqlen_kv, masked)[None, :], 1)
        else:
            total = total * decay + tl.sum(p, 1)
        narrow = to_e4m3(p)
        if interleaved:  # what one thread holds becomes neighbours: P then changes no thread on its way to the product
            rows: tl.constexpr = narrow.shape[0]
            narrow = narrow.reshape(rows, block_n // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(rows, block_n)
        part: tl.constexpr = block_dv // parts
        added = ()
        for i in tl.static_range(parts):
            values = _tile(v, v_row + i * part, v_slot + start, v_columns, v_rows, v_columns, part, block_n, tma)
            added = added + (_added(accs[i], decay, narrow, values, promotion),)  # noqa: RUF005  (Triton unpacks none)
        accs = added
        peak = new_peak
    return accs, total, peak


@triton.jit
def _store(out, acc, share, row, column, inside, head_dim_v, full_width: tl.constexpr):
    """acc · share as the columns of ``out`` from ``column`` on."""
    across = column + tl.arange(0, acc.shape[1])
    inside = inside[:, None]
    if not full_width:
        inside = inside & (across < head_dim_v)[None, :]
    acc = acc * share[:, None]
    if out.dtype.element_ty == tl.bfloat16:
        acc = to_bf16(acc)
    tl.store(out + row[:, None] * head_dim_v + across[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=[
        "q_by_batch", "q_by_head", "q_aside", "q_rows", "q_columns",
        "k_by_batch", "k_by_head", "k_aside", "k_rows", "k_columns", "v_rows",
        "q_factor_batch", "q_factor_head", "k_factor_batch", "k_factor_head", "v_factor_batch", "v_factor_head",
        "seqlen_q", "seqlen_kv", "heads", "group", "programs", "section", "low", "high",
    ]
)  # fmt: skip
def triton_fp8_attention_forward(
    q, k, v, out, lse, q_factors, k_factors, v_factors, v_inverses, tiles, scale, softcap,
    q_by_batch, q_by_head, q_aside, q_stride, q_rows, q_columns,
    k_by_batch, k_by_head, k_aside, k_stride, k_rows, k_columns, v_rows, v_columns,
    q_factor_batch, q_factor_head, k_factor_batch, k_factor_head, v_factor_batch, v_factor_head,
    seqlen_q, seqlen_kv, head_dim_v, heads, group, programs, section, low, high,
    block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr,
    stages: tl.constexpr, tma: tl.constexpr, left: tl.constexpr, right: tl.constexpr, tail: tl.constexpr,
    full_width: tl.constexpr, eights: tl.constexpr, softcapped: tl.constexpr, negative: tl.constexpr,
    q_per_token: tl.constexpr, k_per_key: tl.constexpr, v_per_key: tl.constexpr, promotion: tl.constexpr,
    parts: tl.constexpr, interleaved: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    """``block_m`` queries of a head.

    ``q`` and ``k`` are matrices of e4m3 or 16 bits (TMA descriptors, or pointers without TMA) where head h of batch b
    starts at row ``b * by_batch + h * by_head`` and column ``h * aside``; ``v`` is (B · Hkv · Dv, keys), ``out`` (B, H,
    Sq, Dv) and ``lse`` (B, H, Sq) are contiguous.  Query i sees key j when i + low <= j <= i + high.  ``programs`` is
    batch · heads; ``section`` of them take turns, so that what they read stays in L2.

    With ``tiles`` sequences have lengths of their own, ``seqlen_q`` and ``seqlen_kv`` are what a batch entry has in
    memory, ``programs`` is heads, V's keys lie in slots, and all descales have their token's place.  ``aligned``: masks
    begin at the last query and key of a sequence, which is added to ``low`` and ``high``.
    """
    if eights:  # Triton itself finds out of an argument only whether 16 divides it
        head_dim_v = head_dim_v // 8 * 8
    blocks = tl.cdiv(seqlen_q, block_m) if tiles is None else tl.load(tiles)
    place = tl.program_id(0)
    if tiles is not None:  # noqa: SIM102 (where all lengths are alike there is no branch)
        if place >= blocks * programs:
            return
    before = place // (section * blocks) * section
    width = tl.minimum(section, programs - before)
    place -= before * blocks
    head_index = before + place % width
    block = place // width
    if tiles is None:
        if right:  # the last queries see the most keys, and start first
            block = blocks - 1 - block
        batch, head = head_index // heads, head_index % heads
        top = block * block_m
        q_first, k_first, v_slot = top, 0, 0
    else:
        tiles += (1 + block) * ROW
        batch, head, top = tl.load(tiles), head_index, tl.load(tiles + 1)
        q_start, k_start, v_slot = tl.load(tiles + 2), tl.load(tiles + 4), tl.load(tiles + 7)
        first_row = (batch * heads + head).to(tl.int64) * seqlen_q + q_start
        seqlen_q, seqlen_kv = tl.load(tiles + 3), tl.load(tiles + 5)
        q_first, k_first = q_start + top, k_start
        q_factors += q_start
        k_factors += k_start
        v_factors += k_start
        v_inverses += k_start
        if aligned:
            low += seqlen_kv - seqlen_q
            high += seqlen_kv - seqlen_q
    kv_head = head // group
    query = top + tl.arange(0, block_m)

    tile = _tile(q, batch * q_by_batch + head * q_by_head + q_first, head * q_aside, q_stride, q_rows, q_columns,
                 block_m, block_d, tma)  # fmt: skip
    q_factors += batch.to(tl.int64) * q_factor_batch + head * q_factor_head
    k_factors += batch.to(tl.int64) * k_factor_batch + kv_head * k_factor_head
    v_place = batch.to(tl.int64) * v_factor_batch + kv_head * v_factor_head
    v_factors += v_place
    v_inverses += v_place
    if q_per_token:
        q_factor = tl.load(q_factors + query, mask=query < seqlen_q, other=1.0)
    else:
        q_factor = tl.load(q_factors) + tl.zeros([block_m], tl.float32)
    q_factor = q_factor * scale
    if not k_per_key:
        q_factor = q_factor * scale_of_keys(k_factors, seqlen_kv, tiles)
    if softcapped:
        q_factor = q_factor * (2.0 * _LOG2_E / softcap)
    else:  # above 0, because minus infinity times 0 is no number
        q_factor = tl.maximum(tl.abs(q_factor) * _LOG2_E, 1e-37, propagate_nan=tl.PropagateNan.ALL)
    capped = softcap * _LOG2_E

    accs = ()
    for _ in tl.static_range(parts):
        accs = accs + (tl.zeros([block_m, block_dv // parts], tl.float32),)  # noqa: RUF005
    total = tl.zeros([block_m], tl.float32)
    peak = tl.full([block_m], _MINUS_INFINITY, tl.float32)
    since = query + low
    upto = query + high if right else query + seqlen_kv
    upto = tl.minimum(upto, seqlen_kv - 1)
    # Keys from first to last are seen by some query of the block, those from whole to parted by all of them.
    bottom = tl.minimum(top + block_m, seqlen_q) - 1
    first, whole = 0, 0
    last, parted = seqlen_kv, seqlen_kv // block_n * block_n
    if right:
        last = tl.minimum(last, tl.maximum(bottom + high + 1, 0))
        parted = tl.minimum(parted, tl.maximum(top + high + 1, 0) // block_n * block_n)
    if left:
        first = tl.minimum(tl.maximum(top + low, 0), last) // block_n * block_n
        whole = tl.minimum(tl.cdiv(tl.maximum(bottom + low, 0), block_n) * block_n, tl.cdiv(last, block_n) * block_n)
        parted = tl.maximum(parted, whole)

    k_row, k_column = batch * k_by_batch + kv_head * k_by_head + k_first, kv_head * k_aside
    v_row = kv_head * head_dim_v if tiles is not None else (batch * (heads // group) + kv_head) * head_dim_v
    if left:
        accs, total, peak = _blocks(
            accs, total, peak, tile, q_factor, capped, since, upto, first, whole,
            k, k_row, k_column, k_stride, k_rows, k_columns, v, v_row, v_slot, v_rows, v_columns,
            k_factors, v_factors, v_inverses, seqlen_kv,
            block_n, block_d, block_dv, stages, tma, True, left, softcapped, negative,
            k_per_key, v_per_key, promotion, parts, interleaved,
        )  # fmt: skip
    accs, total, peak = _blocks(
        accs, total, peak, tile, q_factor, capped, since, upto, whole, parted,
        k, k_row, k_column, k_stride, k_rows, k_columns, v, v_row, v_slot, v_rows, v_columns,
        k_factors, v_factors, v_inverses, seqlen_kv,
        block_n, block_d, block_dv, stages, tma, False, left, softcapped, negative,
        k_per_key, v_per_key, promotion, parts, interleaved,
    )  # fmt: skip
    if right or tail:
        accs, total, peak = _blocks(
            accs, total, peak, tile, q_factor, capped, since, upto, parted, last,
            k, k_row, k_column, k_stride, k_rows, k_columns, v, v_row, v_slot, v_rows, v_columns,
            k_factors, v_factors, v_inverses, seqlen_kv,
            block_n, block_d, block_dv, stages, tma, True, left, softcapped, negative,
            k_per_key, v_per_key, promotion, parts, interleaved,
        )  # fmt: skip

    empty = total == 0.0
    share = 1.0 / tl.where(empty, 1.0, total)
    if not v_per_key:
        share = share * scale_of_keys(v_factors, seqlen_kv, tiles)
    logarithm = (peak - _HEADROOM + tl.log2(tl.where(empty, 1.0, total))) * _LN_2
    row = head_index.to(tl.int64) * seqlen_q + query if tiles is None else first_row + query
    tl.store(lse + row, tl.where(empty, _MINUS_INFINITY, logarithm), mask=query < seqlen_q)
    for i in tl.static_range(parts):
        _store(out, accs[i], share, row, i * (block_dv // parts), query < seqlen_q, head_dim_v, full_width)
