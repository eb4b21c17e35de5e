"""The softmax of the Hopper kernel: what a thread of a warpgroup does with its scores, in registers alone.

A warpgroup's four warps have 16 rows each.  Of a row four threads have every eighth pair of keys (PTX ISA, the
fragment of D of wgmma.m64nNk32), which is why scores are taken apart as (rows, keys / 8, 4, 2) here: an axis of four is
the threads', and any other a thread's own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["HEADROOM", "MINUS_INFINITY", "ROWS", "block_weights", "soft_capped", "spread", "to_e4m3", "totals"]

ROWS = gl.constexpr(64)  # queries of a warpgroup: the height of its matrix instruction
HEADROOM = gl.constexpr(8.0)  # log2 of P's largest value, as in forward_kernel
MINUS_INFINITY = gl.constexpr(float("-inf"))


@gluon.jit
def _masked(scores, start, since, upto, left: gl.constexpr):
    """Minus infinity where a query does not see a key.

    Of a row's keys a thread has 8 i + 2 t and 8 i + 2 t + 1, t being its place among four: with t taken from the
    bounds, every key is compared as a constant.
    """
    split = scores.reshape(ROWS, scores.shape[1] // 8, 4, 2)
    layout: gl.constexpr = split.type.layout
    eighth = gl.arange(0, split.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    place = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    which = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    key = eighth[None, :, None, None] * 8 + which[None, None, None, :]
    offset = start + place[None, None, :, None] * 2
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    seen = key <= gl.convert_layout(upto, rows)[:, None, None, None] - offset
    if left:
        seen = seen & (key >= gl.convert_layout(since, rows)[:, None, None, None] - offset)
    return gl.convert_layout(gl.where(seen, split, MINUS_INFINITY).reshape(scores.shape), scores.type.layout)


@gluon.jit
def _in_chains(x):
    """(rows, keys) as (rows, 4, keys / 32, 4, 2): four threads share a row, and each reduces axis 2 in eight chains."""
    return x.reshape(x.shape[0], 4, x.shape[1] // 32, 4, 2)


@gluon.jit
def totals(x):
    """The sums of what each thread has of a row: (rows, keys) to (rows, 4)."""
    return gl.sum(gl.sum(gl.sum(_in_chains(x), 2), 3), 1)


@gluon.jit
def _greatest(x):
    """Each row's largest, one thread's first, then four threads'."""
    largest = gl.max(gl.max(gl.max(gl.max(_in_chains(x), 2), 3), 1), 1)
    return gl.convert_layout(largest, gl.SliceLayout(1, x.type.layout))


@gluon.jit
def spread(x, like):
    """A number a row as a column beside ``like``; the threads that have the row have the number."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def to_e4m3(x):
    """x in e4m3, to nearest, four numbers at a time; Triton's conversion puts each byte in its place by hand."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }
        """,
        "=r,f,f,f,f",
        [x],
        dtype=gl.float8e4nv,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def soft_capped(scores, factor):
    """tanh of the scores times ``factor``, off by 2^-11 at most relative to it: one instruction for each number."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [scores * factor], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _weights(scores, factor, peak, total, layout: gl.constexpr, by_row: gl.constexpr):
    """P as the product's left operand, how far what was summed before decays, the new peak and total.

    ``factor``: of all scores, or ``by_row`` each row's.
    """
    peak_here = gl.maximum(peak, _greatest(scores) * factor)
    shift = gl.where(peak_here == MINUS_INFINITY, 0.0, peak_here - HEADROOM)
    by_score = factor[:, None] if by_row else factor
    p = gl.exp2(scores * by_score - shift[:, None])
    decay = gl.exp2(peak - HEADROOM - shift)
    total = total * spread(decay, total) + totals(p)
    keys: gl.constexpr = p.shape[1]
    p = p.reshape(ROWS, keys // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, keys)
    return to_e4m3(gl.convert_layout(p, layout, assert_trivial=True)), decay, peak_here, total


@gluon.jit
def block_weights(
    scores, start, whole, parted, since, upto, factor, peak, total, layout: gl.constexpr, left: gl.constexpr,
    by_row: gl.constexpr,
):  # fmt: skip
    """``_weights`` of the keys from ``start`` on, masked unless it lies between ``whole`` and ``parted``."""
    if (start < whole) | (start >= parted):
        scores = _masked(scores, start, since, upto, left)
    return _weights(scores, factor, peak, total, layout, by_row)
