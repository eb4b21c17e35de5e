"""A number's way to FP8 in the quantise kernels: magnitudes as bits, scales, exact quotients, bytes and their turn."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["INFINITY", "descale_of", "divided", "magnitude", "narrow", "turned_words"]

INFINITY = tl.constexpr(0x7F800000)  # its bits, and one less those of the largest number
_TINY = tl.constexpr(2.0**-126)  # fp32's smallest normal number: a scale below it could be 0
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # its cast to FP8 loses carries


def _assembly(pair: str) -> str:
    """PTX from 16 numbers, four of each of four tokens, to $0 .. $3, the tokens' bytes, and $4 .. $7, those turned.

    A number's place in a word is its token's in the turned words, and its own in the tokens'.  ``cvt`` puts its second
    source into the lower byte; a digit of ``prmt`` is a byte of the first source or, from 4, of the second.
    """
    lines = []
    for token in range(4):
        a, b, c, d = (f"${8 + 4 * token + i}" for i in range(4))
        lines += [
            f"cvt.rn.satfinite.{pair}.f32 low, {b}, {a};",
            f"cvt.rn.satfinite.{pair}.f32 high, {d}, {c};",
            f"mov.b32 r{token}, {{low, high}};",
        ]
    for half, order in (("l", "0x5140"), ("h", "0x7362")):
        lines += [f"prmt.b32 {half}{i}, r{2 * i}, r{2 * i + 1}, {order};" for i in range(2)]
    for i, (half, order) in enumerate((("l", "0x5410"), ("l", "0x7632"), ("h", "0x5410"), ("h", "0x7632"))):
        lines.append(f"prmt.b32 ${4 + i}, {half}0, {half}1, {order};")
    lines += [f"mov.b32 ${token}, r{token};" for token in range(4)]
    return "{ .reg .b16 low, high; .reg .b32 r<4>, l<2>, h<2>; " + " ".join(lines) + " }"


_E4M3 = tl.constexpr(_assembly("e4m3x2"))
_E5M2 = tl.constexpr(_assembly("e5m2x2"))
_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 8 + ["f"] * 16))


@triton.jit
def magnitude(value):
    """Bits of |value|: integers that order as the magnitudes do, infinity above all numbers, NaN above it."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def divided(value, divisor, inverse):
    """value / divisor as IEEE 754 rounds it, given the reciprocal to within two last bits.

    The remainder of a product with the reciprocal is exact, and corrects it (Markstein, IBM J. Res. Dev. 34, 1990):
    three instructions where a division takes ten.  Of 2·10^8 random quotients 18 were a last bit of fp32 off, none
    with the divisors 448 and 57344; FP8 sees that only next to the middle between two of its numbers.
    The interpreter's multiply-add rounds twice, its division once.
    """
    if _INTERPRETED:
        return value / divisor
    quotient = value * inverse
    # With the signs this way round -0 stays -0.  Triton's unary minus is 0 - x, an instruction that loses it as well.
    excess = tl.fma(quotient, divisor, value * -1.0)
    return tl.fma(excess, inverse * -1.0, quotient)


@triton.jit
def descale_of(bits, largest: tl.constexpr):
    """What brings a magnitude, given by its bits, to the format's largest number; 1 for nothing but zeros."""
    amax = bits.to(tl.float32, bitcast=True)
    descale = tl.maximum(divided(amax, largest, 1.0 / largest), _TINY)
    descale = tl.where(bits >= INFINITY, amax, descale)  # an infinity or NaN as it is
    return tl.where(bits == 0, 1.0, descale)


@triton.jit
def _rounded(x, mantissa: tl.constexpr, least: tl.constexpr):
    """x rounded to nearest even with so many mantissa bits, to multiples of ``least`` where that is coarser."""
    bits = x.to(tl.int32, bitcast=True)
    drop: tl.constexpr = 23 - mantissa
    up = (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)
    normal = ((bits + up) & (-1 << drop)).to(tl.float32, bitcast=True)
    anchor: tl.constexpr = 1.5 * 2.0**23 * least  # whose last bit is worth ``least``
    whole = tl.where(tl.abs(x) < least * 2.0**mantissa, (x + anchor) - anchor, normal).to(tl.int32, bitcast=True)
    return (whole | (bits & -0x80000000)).to(tl.float32, bitcast=True)  # a negative zero stays one


@triton.jit
def narrow(values, dtype: tl.constexpr):
    """The bytes of each tensor in ``dtype``, saturated, as the instruction does by itself."""
    bytes_of = ()
    for i in tl.static_range(len(values)):
        value = values[i]
        if _INTERPRETED:
            e4m3: tl.constexpr = dtype == tl.float8e4nv
            largest: tl.constexpr = 448.0 if e4m3 else 57344.0
            value = _rounded(tl.clamp(value, -largest, largest), 3 if e4m3 else 2, 2.0**-9 if e4m3 else 2.0**-16)
        bytes_of += (value.to(dtype).to(tl.uint8, bitcast=True),)
    return bytes_of


@triton.jit
def turned_words(values, dtype: tl.constexpr):
    """The bytes of four tokens' values in ``dtype``, and words of them: the first token's byte is the lowest.

    Compiled, both come from one piece of PTX, where a token's four bytes are packed first and all else is made of
    the packed word.  Converted by Triton, the bytes of a pair would be read twice: to be packed for the store, and
    one by one for the words.  ptxas 12.8.93 (for sm_90) moves such a conversion into the packing (F2FP with a merge)
    and leaves the other readers of the pair a register that nothing has written.
    """
    if _INTERPRETED:
        a, b, c, d = narrow(values, dtype)
        low = a.to(tl.int32) | (b.to(tl.int32) << 8)
        return a, b, c, d, low | (c.to(tl.int32) << 16) | (d.to(tl.int32) << 24)
    return tl.inline_asm_elementwise(
        _E4M3 if dtype == tl.float8e4nv else _E5M2,
        _CONSTRAINTS,
        [values[0], values[1], values[2], values[3]],
        (tl.uint8, tl.uint8, tl.uint8, tl.uint8, tl.int32),
        is_pure=True,
        pack=4,
    )
