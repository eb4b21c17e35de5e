"""What stands before the FP8 backward: dO in e4m3 with delta, and the operands where the tensor cores want them.

The kernels of the backward read whole tiles through TMA, without bounds: every tensor here is (heads, padded length,
padded head dimension) in one piece, or its transpose, and zero behind the last token and the last dimension.
An FP8 tensor core takes both operands with the axis that it sums over contiguous (PTX ISA, wgmma: only 16-bit
types may be transposed), so a sum over tokens in FP8 reads a transposed copy, and one in bf16 a widened copy.
Widening is exact: e4m3 has 3 mantissa bits, bf16 has 7.  For the Hopper kernels a transposed copy's tokens are
interleaved, as registers hold the other operand (``backward_hopper_narrow``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnbench.fp8 import Quantised
from attnbench.spec import AttentionSpec

from ..padding import rounded_up
from .arithmetic import to_bf16, to_e4m3
from .launching import Launches, addresses

__all__ = ["BLOCK", "LOG2E", "PADDING", "PEAK", "Gradient", "Laid", "lay_out", "lay_out_gradient", "padded"]

PADDING = 128  # tokens; the largest tile
LOG2E = 1.4426950408889634
PEAK = 256.0  # of P in e4m3: 448 is the largest number, and the rounding of the log-sum-exp may lift P above 1
BLOCK = PADDING  # queries that share dO's descale; no tile is longer
_ROWS = 3  # vectors over the queries
_TOKENS = 64  # that one program of _lay_out copies
_SMALLEST = 32  # what an FP8 tensor core sums over at once


class Laid(NamedTuple):
    """An e4m3 operand of H heads: ``data`` (H, S, D) e4m3; ``wide`` the same numbers in bf16; ``transposed`` (H, D, S).

    S and D are padded; what was not asked for is None.  ``interleaved``: of each 16 tokens of ``transposed`` the order
    is 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15.
    """

    data: Tensor
    wide: Tensor | None
    transposed: Tensor | None
    interleaved: bool


class Gradient(NamedTuple):
    """dO as ``Laid`` has it, except that ``wide`` is dO itself over its descale in bf16.

    ``descale`` (H, S / BLOCK) fp32: dO's, a power of two for each block of queries, so that dO over it is exact.
    ``rows`` (3, H, S) fp32 describes the queries.  0: LSE·log2(e), less the exponent by which P is wanted larger,
    infinite where no key is seen; 1: delta in units of dO·v as the e4m3 numbers give it (of V's descale too, where
    that varies); 2: Q's descale.
    P is wanted larger by dO's descale where the sums over tokens are wide, because ``wide`` is smaller by it, and
    by PEAK where they are e4m3.
    """

    laid: Laid
    descale: Tensor
    rows: Tensor


def padded(size: int) -> int:
    """The head dimension that a tile has: a power of two that an FP8 tensor core can sum over."""
    return max(_SMALLEST, 1 << (size - 1).bit_length())


@triton.jit
def _token(place, interleaved: tl.constexpr):
    """The token that stands at a place of a transposed copy, from where whole rows are read."""
    if interleaved:
        return (place & -16) + ((place >> 2) & 3) * 2 + ((place >> 1) & 1) * 8 + (place & 1)
    return place


@triton.jit
def _lay_out(
    x,
    data,
    wide,
    transposed,
    batch_stride,
    head_stride,
    token_stride,
    size_stride,
    heads,
    length,
    size,
    padded_length,
    padded_size: tl.constexpr,
    tokens: tl.constexpr,
    write_data: tl.constexpr,
    write_wide: tl.constexpr,
    write_transposed: tl.constexpr,
    interleaved: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * tokens + tl.arange(0, tokens)
    token = _token(row, interleaved)
    column = tl.arange(0, padded_size)
    place = x + head // heads * batch_stride + head % heads * head_stride
    place += token.to(tl.int64)[:, None] * token_stride + column[None, :] * size_stride
    tile = tl.load(place, mask=(token < length)[:, None] & (column < size)[None, :], other=0.0)
    flat = head * padded_length * padded_size + token.to(tl.int64)[:, None] * padded_size + column[None, :]
    if write_data:
        tl.store(data + flat, tile)
    if write_wide:
        tl.store(wide + flat, tile.to(tl.bfloat16))
    if write_transposed:
        across = (head * padded_size + column.to(tl.int64)[:, None]) * padded_length + row[None, :]
        tl.store(transposed + across, tl.trans(tile))


@triton.jit
def _lay_out_gradient(
    grad,
    out,
    lse,
    q_descale,
    v_descale,
    data,
    wide,
    descales,
    rows,
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
    v_batch,
    v_head,
    heads,
    group,
    length,
    size,
    plane,
    padded_length,
    log2e: tl.constexpr,
    log2_peak: tl.constexpr,
    padded_size: tl.constexpr,
    tokens: tl.constexpr,
    v_varies: tl.constexpr,
    write_wide: tl.constexpr,
):
    each = tl.program_id(1).to(tl.int64)
    batch, head = each // heads, each % heads
    token = (tl.program_id(0) * tokens + tl.arange(0, tokens)).to(tl.int64)
    column = tl.arange(0, padded_size)
    inside = token < length
    both = inside[:, None] & (column < size)[None, :]
    place = grad + batch * grad_batch + head * grad_head + token[:, None] * grad_token + column[None, :] * grad_size
    exact = tl.load(place, mask=both, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(exact), 1), 0)
    # The power of two that is not below largest / 448, and no smaller than fp32's smallest normal number.
    bits = ((largest * (1.0 / 448.0)).to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    descale = tl.where(largest == 0.0, 1.0, tl.maximum(bits, 0x00800000).to(tl.float32, bitcast=True))
    scaled = exact * (1.0 / descale)
    narrow = to_e4m3(scaled)
    flat = each * padded_length * padded_size + token[:, None] * padded_size + column[None, :]
    tl.store(data + flat, narrow)
    if write_wide:
        tl.store(wide + flat, to_bf16(scaled))
    tl.store(descales + each * (padded_length // tokens) + tl.program_id(0), descale)

    place = out + batch * out_batch + head * out_head + token[:, None] * out_token + column[None, :] * out_size
    seen = tl.load(place, mask=both, other=0.0).to(tl.float32)
    # dO as dP sees it: what the rounding does to dO then cancels in dP - delta where the values of V agree.
    delta = tl.sum(narrow.to(tl.float32) * seen, 1)
    if not v_varies:
        delta = delta / tl.load(v_descale + batch * v_batch + head // group * v_head)
    own_lse = tl.load(lse + batch * lse_batch + head * lse_head + token * lse_token, mask=inside, other=0.0)
    larger = tl.log2(descale) if write_wide else log2_peak
    # exp2(s - infinity) is 0, for queries that see no key and for those behind the last one; NaN stays NaN.
    seeing = inside & (own_lse != -float("inf"))
    base = tl.where(seeing, own_lse.to(tl.float32) * log2e - larger, float("inf"))
    q_own = tl.load(q_descale + batch * q_batch + head * q_head + token * q_token, mask=inside, other=0.0)
    row = rows + each * padded_length + token
    tl.store(row, base)
    tl.store(row + plane, delta)
    tl.store(row + 2 * plane, q_own)


_COPIES = Launches(_lay_out)
_GRADIENTS = Launches(_lay_out_gradient)


def lay_out(x: Tensor, *, wide: bool = False, transposed: bool = False, interleaved: bool = False) -> Laid:
    """e4m3 x (B, H, S, D) of any strides as the backward's kernels read it; no copy of what already lies so."""
    batch, heads, length, size = x.shape
    whole, long = padded(size), rounded_up(length, PADDING)
    shape = (batch * heads, long, whole)
    ready = shape == (batch * heads, length, size) and x.is_contiguous() and x.data_ptr() % 16 == 0
    data = x.view(shape) if ready else torch.empty(shape, dtype=x.dtype, device=x.device)
    widened = torch.empty(shape, dtype=torch.bfloat16, device=x.device) if wide else None
    turned = torch.empty(shape[0], whole, long, dtype=x.dtype, device=x.device) if transposed else None
    if not ready or wide or transposed:
        constants = *x.stride(), heads, length, size, long, whole, _TOKENS, not ready, wide, transposed, interleaved
        memory = x, data, data if widened is None else widened, data if turned is None else turned
        _COPIES((long // _TOKENS, shape[0], 1), constants, ())(memory, addresses(memory))
    return Laid(data, widened, turned, interleaved)


def lay_out_gradient(
    spec: AttentionSpec, grad_out: Tensor, out: Tensor, lse: Tensor, q: Quantised, v: Quantised, *, narrow: bool,
    interleaved: bool = False,
) -> Gradient:  # fmt: skip
    """dO (B, H, Sq, Dv) of any strides in e4m3, and delta = rowsum(dO∘O), in one pass; a transposed copy takes another.

    ptxas 12.8 loses bytes of a conversion to FP8 that two stores read, one of them transposed: on fp32 it did here.
    ``out`` (B, H, Sq, Dv) is what the forward returned, ``lse`` (B, H, Sq) its log-sum-exp.  ``narrow`` says which
    copy of dO the kernels will read: the transposed one, ``interleaved`` or not, else the wide one.
    """
    batch, heads, length, size = grad_out.shape
    whole, long = padded(size), rounded_up(length, PADDING)
    shape, device = (batch * heads, long, whole), grad_out.device
    data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    wide = None if narrow else torch.empty(shape, dtype=torch.bfloat16, device=device)
    descale = torch.empty(batch * heads, long // BLOCK, dtype=torch.float32, device=device)
    rows = torch.empty(_ROWS, batch * heads, long, dtype=torch.float32, device=device)
    q_descale = q.descale.expand(batch, heads, length, 1)
    v_descale = v.descale.expand(batch, spec.kv_heads, v.descale.shape[2], 1)
    constants = (
        *grad_out.stride(), *out.stride(), *lse.stride(), *q_descale.stride()[:3], *v_descale.stride()[:2],
        heads, spec.group, length, size, rows.stride(0), long,
        LOG2E, math.log2(PEAK), whole, BLOCK, v.descale.shape[2] > 1, not narrow,
    )  # fmt: skip
    memory = (
        grad_out, out, lse, q_descale, v_descale,
        data, data if wide is None else wide, descale, rows,
    )  # fmt: skip
    dtypes = grad_out.dtype, out.dtype, lse.dtype, q_descale.dtype, v_descale.dtype
    launch = _GRADIENTS((long // BLOCK, shape[0], 1), constants, dtypes, num_warps=8)
    launch(memory, addresses(memory))
    turned = lay_out(data.view(batch, heads, long, whole), transposed=narrow, interleaved=interleaved).transposed
    return Gradient(Laid(data, wide, turned, interleaved), descale, rows)
