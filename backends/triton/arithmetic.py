"""What the kernels of attention share; casts, products and loop bounds hold under Triton's interpreter as well.

Compiled code is the plain instruction.  The interpreter (3.6.0) truncates where it casts to bf16, loses carries
where it casts to FP8, multiplies the bit patterns of bf16 matrices, and takes no computed bounds of a range where numpy
refuses to make a number of an array with one element.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["bound", "probabilities", "product", "steps", "store_turned", "to_bf16", "to_e4m3", "visible"]

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_EXPONENT = tl.constexpr(0x7F800000)  # the exponent's bits of an fp32 number
_STEP = tl.constexpr(1.0 / 448.0)  # 448 is the largest e4m3 number
_LEAST = tl.constexpr(1e-30)
_PART = tl.constexpr(128)  # columns of a rotation's product
_WHOLE = tl.constexpr(12582912.0)  # 1.5·2^23: adding it rounds to a whole number, to nearest even


@triton.jit
def bound(x):
    """x as a bound of a range."""
    if _INTERPRETED:
        return (tl.zeros([1], tl.int32) + x).handle.data.item()
    return x


@triton.jit
def to_e4m3(x):
    """fp32 x in e4m3, rounded to nearest even and saturated (cvt.rn.satfinite.e4m3x2.f32)."""
    if _INTERPRETED:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
        power = (x.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
        unit = tl.maximum(power * 0.125, 0.001953125)
        x = ((x / unit + _WHOLE) - _WHOLE) * unit
    return x.to(tl.float8e4nv)


@triton.jit
def to_bf16(x):
    """fp32 x in bf16, rounded to nearest even."""
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def product(a, b, acc):
    """acc + a · b, in fp32; of bf16 matrices too."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def steps(x):
    """What each row of x is to be divided by so that e4m3 holds it as exactly as it can."""
    return tl.maximum(tl.max(tl.abs(x), 1) * _STEP, _LEAST)


@triton.jit
def probabilities(exponent, base, cap, capped: tl.constexpr):
    """P and the softcap's slope, which must not be read without a softcap."""
    if capped:
        # cap · tanh(x) from exp(2x)
        score = 1.0 - 2.0 / (1.0 + tl.exp2(exponent))
        slope = 1.0 - score * score
        p = tl.exp2(score * cap - base)
    else:
        p = tl.exp2(exponent - base)
        slope = p
    return p, slope


@triton.jit
def visible(query, key, before, after, has_left: tl.constexpr, has_right: tl.constexpr):
    """Whether a query sees a key, of tensors that broadcast."""
    sees = key >= 0
    if has_left:
        sees = sees & (key >= query - before)
    if has_right:
        sees = sees & (key <= query + after)
    return sees


@triton.jit
def store_turned(
    out, x, factor, turn, row, inside, size,
    rows: tl.constexpr, head_dim: tl.constexpr, begin: tl.constexpr, pitch: tl.constexpr, rotated: tl.constexpr,
):  # fmt: skip
    """x (rows, head_dim) · factor as rows ``row`` of ``out`` (-, size), from the column ``begin`` on.

    Where ``rotated``, x · ``turn`` before, a matrix of that ``pitch`` whose blocks lie on its diagonal, so that no
    other columns count.  Such products are in fp32 from bf16; a rotation's signs are exact there, its factor is left
    out.  They come in parts of the columns, so that no program needs the registers of a whole matrix of 256 by 256.
    """
    part: tl.constexpr = min(head_dim, _PART) if rotated else head_dim
    if rotated:
        down, x16 = begin + tl.arange(0, head_dim)[:, None], to_bf16(x)
    for first in tl.static_range(begin, begin + head_dim, part):
        column = first + tl.arange(0, part)[None, :]
        made = x
        if rotated:
            matrix = tl.load(turn + down * pitch + column)
            made = product(x16, matrix, tl.zeros([rows, part], tl.float32))
        place = out + row[:, None] * size + column
        tl.store(place, (made * factor).to(out.dtype.element_ty), mask=inside[:, None] & (column < size))
