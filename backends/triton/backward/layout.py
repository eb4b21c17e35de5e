"""What stands before the FP8 backward's products: dO in e4m3 with delta, a number for each query, in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.problem.spec import AttentionSpec

from ...common.layout import rounded_up
from ..arithmetic import to_bf16, to_e4m3
from ..blocks import Part, Piece, Wanted
from ..descales import steps
from ..launching import Launch, Launches
from ..tile_map import Tiled
from ..tile_rows import ROW, scale_of_keys
from .copies import PADDING, Laid, padded, ready

__all__ = ["BLOCK", "LOG2E", "PEAK", "VECTORS", "Gradient", "GradientPlan", "gradient_plan", "lay_out_gradient"]

LOG2E = 1.4426950408889634
PEAK = 256.0  # of P in e4m3: 448 is the largest number, and the rounding of the log-sum-exp may lift P above 1
BLOCK = PADDING  # queries that share dO's descale; no tile is longer
VECTORS = 3  # over the queries, in ``rows``
_LARGEST = tl.constexpr(torch.finfo(torch.bfloat16).max)


class Gradient(NamedTuple):
    """dO as ``Laid`` has it, except that ``wide`` is dO itself over its descale in bf16.

    ``descale`` (B, H, S / BLOCK) fp32: dO's, a power of two for each block of queries, so that dividing dO is exact.
    ``rows`` (3, B, H, S) fp32 describes the queries.  0: LSE·log2(e), less the exponent by which P is scaled up,
    infinite if no key is seen; 1: delta in units of dO·v of the e4m3 numbers (and V's descale, if it varies); 2: Q's
    descale.  P is scaled up by dO's descale for wide sums over tokens, because ``wide`` is smaller by it, and by PEAK
    for e4m3 sums.

    For the fused kernel ``descale`` is the factor of dO·v, already applied to delta, so that dQ is dS · K of the e4m3
    numbers: it includes V's and K's descales and the score's scale, and dO's unless P is scaled up by that
    (``Layout.scaled_up``).  If it is not, ``wide`` is dO itself, copied only if it is not bf16 or readable.
    """

    laid: Laid
    descale: Piece
    rows: Piece


@triton.jit
def _lay_out_gradient(
    grad,
    out,
    lse,
    q_descale,
    k_descale,
    v_descale,
    data,
    wide,
    descales,
    rows,
    tiles,
    grad_batch,
    grad_head,
    grad_token,
    grad_size,
    out_batch,
    out_head,
    out_token,
    out_size,
    lse_batch,
    lse_head,
    lse_token,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    v_batch,
    v_head,
    heads,
    group,
    length,
    size: tl.constexpr,
    plane,
    padded_length,
    factor,
    log2e: tl.constexpr,
    log2_larger: tl.constexpr,
    padded_size: tl.constexpr,
    pitch: tl.constexpr,
    tokens: tl.constexpr,
    v_varies: tl.constexpr,
    write_wide: tl.constexpr,
    fused: tl.constexpr,
    scaled_up: tl.constexpr,
    eights: tl.constexpr,
):
    if eights:  # Triton itself finds out of an argument only whether 16 divides it
        grad_batch, grad_head, grad_token = grad_batch // 8 * 8, grad_head // 8 * 8, grad_token // 8 * 8
        out_batch, out_head, out_token = out_batch // 8 * 8, out_head // 8 * 8, out_token // 8 * 8
    each = tl.program_id(1).to(tl.int64)
    batch, head = each // heads, each % heads
    column = tl.arange(0, padded_size)
    if tiles is None:
        block = tl.program_id(0)
        token = (block * tokens + tl.arange(0, tokens)).to(tl.int64)
        inside, seqlen_kv = token < length, 1
    else:
        row = tiles + (1 + tl.program_id(0)) * ROW
        # Asked for before it is known whether there is such a tile: a program waits once.
        batch, top, start, queries = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
        any_key, seqlen_kv, slot = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
        if tl.program_id(0) >= tl.load(tiles):
            return
        batch = batch.to(tl.int64)
        block = (slot + top) // tokens
        token = (start + top + tl.arange(0, tokens)).to(tl.int64)
        inside = token < start + queries
        # K's and V's descales of a sequence have the places of its tokens, one behind the other.
        k_descale += any_key.to(tl.int64)
        v_descale += any_key.to(tl.int64)
    both = inside[:, None] & (column < size)[None, :]
    place = grad + batch * grad_batch + head * grad_head + token[:, None] * grad_token + column[None, :] * grad_size
    exact = tl.load(place, mask=both, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(exact), 1), 0)
    # The power of two that is not below largest / 448, and no smaller than fp32's smallest normal number.
    bits = ((largest * (1.0 / 448.0)).to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    power = tl.where(largest == 0.0, 1.0, tl.maximum(bits, 0x00800000).to(tl.float32, bitcast=True))
    scaled = exact * (1.0 / power)
    narrow = to_e4m3(scaled)
    laid = token if tiles is None else (block * tokens + tl.arange(0, tokens)).to(tl.int64)
    flat = each * padded_length * pitch + laid[:, None] * pitch + column[None, :]
    stored = (column < pitch)[None, :] if pitch < padded_size else None
    tl.store(data + flat, narrow, stored)
    if write_wide:
        if fused and not scaled_up:  # of fp32's largest numbers a rounding to bf16 would make infinity
            held = tl.minimum(tl.maximum(exact, -_LARGEST), _LARGEST)
            tl.store(wide + flat, to_bf16(tl.where(tl.abs(exact) < float("inf"), held, exact)), stored)
        else:
            tl.store(wide + flat, to_bf16(scaled), stored)

    place = out + batch * out_batch + head * out_head + token[:, None] * out_token + column[None, :] * out_size
    seen = tl.load(place, mask=both, other=0.0).to(tl.float32)
    # dO as dP sees it: what the rounding does to dO then cancels in dP - delta where the values of V agree.
    delta = tl.sum(narrow.to(tl.float32) * seen, 1)
    v_own = v_descale + batch * v_batch + head // group * v_head
    descale = power
    if fused:
        unit = factor * scale_of_keys(k_descale + batch * k_batch + head // group * k_head, seqlen_kv, tiles)
        if not scaled_up:
            unit = power * unit
        delta = delta * unit
        descale = unit * scale_of_keys(v_own, seqlen_kv, tiles)
    elif not v_varies:
        delta = delta / scale_of_keys(v_own, seqlen_kv, tiles)
    tl.store(descales + each * (padded_length // tokens) + block, descale)
    own_lse = tl.load(lse + batch * lse_batch + head * lse_head + token * lse_token, mask=inside, other=0.0)
    larger = tl.log2(power) if log2_larger is None else log2_larger
    # exp2(s - infinity) is 0, for queries that see no key and for those behind the last one; NaN stays NaN.
    seeing = inside & (own_lse != -float("inf"))
    base = tl.where(seeing, own_lse.to(tl.float32) * log2e - larger, float("inf"))
    place = q_descale + batch * q_batch + head * q_head + token * q_token
    # A sequence may have no query, and a kernel divides by the first one's descale.
    q_own = tl.load(place, mask=inside, other=0.0 if tiles is None else 1.0)
    row = rows + each * padded_length + laid
    tl.store(row, base)
    tl.store(row + plane, delta)
    tl.store(row + 2 * plane, q_own)


_GRADIENTS = Launches(_lay_out_gradient)
# By the padded head dimension.  Up to 128 a multiprocessor has as many warps as it can have: on an H200 the pass over
# 16,384 tokens of width 2048 took 60 us for 74 at 64 (102 registers), and 62 for 67 at 128 (8 warps, 128 registers).
_OPTIONS = {
    64: {"num_warps": 8, "maxnreg": 64},
    128: {"num_warps": 16, "maxnreg": 64},
    256: {"num_warps": 16, "maxnreg": 128},
}


class GradientPlan(NamedTuple):
    """What calls share whose dO lies alike: memory for data, wide copy, descale and rows, and the launch.

    ``there``: dO is its wide copy.
    """

    wanted: tuple[Wanted | None, ...]
    there: bool
    launch: Launch


def gradient_plan(
    spec: AttentionSpec, grad: tuple[Any, ...], out: tuple[Any, ...], lse: tuple[Any, ...],
    descales: Sequence[Part], *,
    narrow: bool, pitch: int, factor: float | None = None, scaled_up: bool = False,
    sequences: tuple[int, Tiled] | None = None, shared: bool = False,
) -> GradientPlan:  # fmt: skip
    """For dO (B, H, Sq, Dv) of any strides, in e4m3 with delta = rowsum(dO∘O), in one pass.

    ``grad``: dO's shape, strides, dtype, and whether TMA may begin to read where it begins; ``out`` (B, H, Sq, Dv) and
    ``lse`` (B, H, Sq) are the forward's strides and dtypes; ``descales`` those of Q, K and V, (B, heads, S, 1) or 1 for
    any axis.  ``narrow``: the kernels will read a transposed copy of dO, not made here, else the wide one.  ``pitch``:
    the padded head dimension.  ``factor``: for the fused kernel, whose dQ is that times dS · K; then no token of K or V
    may have its own scale, and P is ``scaled_up`` or not.  ``sequences``: how many there are with lengths of their own,
    by tiles of ``BLOCK`` queries; then everything has slots, and with ``shared`` the tokens of a sequence share their
    descales.
    ptxas 12.8 loses bytes of a conversion to FP8 that two stores read, one of them transposed (seen on fp32).
    """
    (batch, heads, length, size), keys = grad[0], spec.seqlen_kv
    whole, long = padded(size), rounded_up(length, PADDING)
    entries, blocks = batch, long // BLOCK
    if sequences is not None:
        count, tiled = sequences
        entries, blocks, keys = 1, tiled.capacity(count, batch), tiled.stored[1]
        long = blocks * BLOCK
    fused = factor is not None
    readable = grad[3] and sequences is None and grad[2] == torch.bfloat16 and ready(grad[0], grad[1], pitch)
    there = fused and not scaled_up and readable
    larger = 0.0 if fused and not scaled_up else math.log2(PEAK) if narrow else None
    of_q, of_k, of_v = descales
    constants = (
        *grad[1], *out[0], *lse[0], *steps(of_q.shape, of_q.strides, batch, heads, length),
        *[step for x in (of_k, of_v) for step in steps(x.shape, x.strides, batch, spec.kv_heads, keys)[:2]],
        heads, spec.group, length, size, entries * heads * long, long, factor or 0.0,
        LOG2E, larger, whole, pitch, BLOCK, of_v.shape[2] > 1 and not shared, not (narrow or there), fused,
        scaled_up, math.gcd(*grad[1][:3], *out[0][:3]) % 16 == 8,
    )  # fmt: skip
    dtypes = grad[2], out[1], lse[1], *[x.dtype for x in descales], sequences is None
    how = next(options for most, options in _OPTIONS.items() if whole <= most)
    wanted = (
        Wanted((entries, heads, long, pitch), torch.float8_e4m3fn),
        None if narrow or there else Wanted((entries, heads, long, pitch), torch.bfloat16),
        Wanted((entries, heads, blocks), torch.float32),
        Wanted((VECTORS, entries, heads, long), torch.float32),
    )
    return GradientPlan(wanted, there, _GRADIENTS((blocks, entries * heads, 1), constants, dtypes, **how))


def lay_out_gradient(
    plan: GradientPlan, grad_out: Tensor, out: Tensor, lse: Tensor, descales: Sequence[Tensor | Piece],
    places: Sequence[Piece | None], table: Tensor | None,
) -> Gradient:  # fmt: skip
    """Writes them to the ``places`` that were wanted; ``table``: that of the queries' tiles."""
    data, wide, descale, rows = places
    assert data is not None
    assert descale is not None
    assert rows is not None
    # A copy in e4m3 alone has the data where the kernel's unused pointer is.
    more = grad_out if plan.there else wide
    plan.launch.on(
        grad_out.device, (grad_out, out, lse, *descales, data, data if more is None else more, descale, rows, table)
    )
    return Gradient(Laid(data, more, None, False), descale, rows)
