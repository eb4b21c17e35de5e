"""What the Hopper kernels with e4m3 in the sums over tokens have of their own: operands, steps, sums in parts.

A block's P or dS becomes the first operand of its product where it is, in registers: a thread that holds four columns
of a row has 2t, 2t + 1, 2t + 8 and 2t + 9 of 16, and as an operand 4t to 4t + 3 (PTX ISA, the fragments of D and A of
wgmma.m64nNk32).  So the second operand, a transposed copy, has its tokens in that order (``backward.copies``).

The tensor core's accumulator is short: each block's product starts at zero and is added in fp32.  Sums are tuples of
as many columns each as there are registers for products under way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ...forward.hopper.softmax import to_e4m3
from .shared import ROWS, operand, store

__all__ = [
    "PART",
    "added",
    "narrow_operand",
    "part_product",
    "scaled",
    "steps",
    "store_parts",
    "turned_parts",
    "zero_parts",
]

PART = gl.constexpr(64)  # columns of a sum that are multiplied at a time
_STEP = gl.constexpr(1.0 / 448.0)  # 448 is the largest e4m3 number
_LEAST = gl.constexpr(1e-30)


@gluon.jit
def narrow_operand(x, layout: gl.constexpr):
    """x in e4m3 as a product's first operand, columns as above; every thread has what it needs already."""
    columns: gl.constexpr = x.shape[1]
    x = x.reshape(ROWS, columns // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, columns)
    return to_e4m3(gl.convert_layout(x, layout, assert_trivial=True))


@gluon.jit
def steps(x):
    """What each row of x is to be divided by so that e4m3 holds it as exactly as it can."""
    # One thread's largest first, in eight chains, then four threads'.
    split = gl.abs(x).reshape(x.shape[0], 4, x.shape[1] // 32, 4, 2)
    largest = gl.max(gl.max(gl.max(gl.max(split, 2), 3), 1), 1)
    return gl.maximum(gl.convert_layout(largest, gl.SliceLayout(1, x.type.layout)) * _STEP, _LEAST)


@gluon.jit
def scaled(x, step):
    """x over its rows' steps."""
    inverse = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [step], dtype=gl.float32, is_pure=True, pack=1
    )
    return x * inverse[:, None]


@gluon.jit
def part_product(x, across, index: gl.constexpr, layout: gl.constexpr):
    """Starts x (rows, tokens) · acrossᵀ for the columns of one part; ``across`` (columns, tokens) in shared memory."""
    zeros = gl.zeros([ROWS, PART], gl.float32, layout)
    columns = across.slice(index * PART, PART, 0).permute([1, 0])
    return warpgroup_mma(x, columns, zeros, use_acc=False, is_async=True)


@gluon.jit
def added(total, product, factor):
    """A sum and a block's product with a factor for each row."""
    rows: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    return total + product * gl.convert_layout(factor, rows)[:, None]


@gluon.jit
def zero_parts(parts: gl.constexpr, layout: gl.constexpr):
    """A sum of nothing."""
    sums = ()
    for _part in gl.static_range(parts):
        sums = sums + (gl.zeros([ROWS, PART], gl.float32, layout),)  # noqa: RUF005
    return sums


@gluon.jit
def turned_parts(sums, turning, parts: gl.constexpr, layout: gl.constexpr):
    """The sums' columns · the matrix whose rows lie by parts in ``turning``, as one part with all columns."""
    made = gl.zeros([ROWS, PART * parts], gl.float32, layout)
    for i in gl.static_range(parts):
        x = operand(sums[i], gl.DotOperandLayout(0, layout, 2))
        made = warpgroup_mma(x, turning.index(i), made, is_async=True)
    return (warpgroup_mma_wait(0, [made]),)


@gluon.jit
def store_parts(out, sums, factor, at, top, length, size, width: gl.constexpr, layout: gl.constexpr):
    """A sum of ``width`` columns times a factor, as ``store`` has the places."""
    each: gl.constexpr = sums[0].shape[1]
    for i in gl.static_range(width // each):
        store(out, sums[i] * factor, at, top, length, i * each, size, layout)
