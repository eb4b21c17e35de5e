"""dQ from the sums that the kernels for Hopper leave in bf16, where those are not dQ itself, and dK likewise."""

from __future__ import annotations

import triton
import triton.language as tl

from ..arithmetic import store_turned
from ..tile_rows import ROW

__all__ = ["ROWS", "finish_gradients"]

ROWS = 64  # tokens of a program


@triton.jit
def finish_gradients(
    sums,
    turn,
    out,
    tiles,
    heads,
    length,
    padded_length,
    size,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    pitch: tl.constexpr,
    rotated: tl.constexpr,
    of_keys: tl.constexpr,
):
    """dQ (B, H, Sq, D), or dK (``of_keys``), contiguous, of a block of tokens of one head.

    ``sums`` (B·H, padded S, padded D) are in bf16.  The rotation is undone, the padding left out, and the dtype is that
    of ``out``.  ``tiles``: the table of sequences that have lengths of their own, whose sums are in slots, or None.
    """
    head = tl.program_id(1)
    column = tl.arange(0, head_dim)[None, :]
    if tiles is None:
        token = tl.program_id(0) * rows + tl.arange(0, rows)
        row = head.to(tl.int64) * padded_length + token
        first = head.to(tl.int64) * length
    else:
        if tl.program_id(0) >= tl.load(tiles):
            return
        tiles += (1 + tl.program_id(0)) * ROW
        token = tl.load(tiles + 1) + tl.arange(0, rows)
        row = head.to(tl.int64) * padded_length + tl.load(tiles + (7 if of_keys else 6)) + token
        start = tl.load(tiles + (4 if of_keys else 2))
        first = (tl.load(tiles).to(tl.int64) * heads + head) * length + start
        length = tl.load(tiles + (5 if of_keys else 3))
    # What is behind a head may be anything, and a rotation's zeros times that no number.
    x = tl.load(sums + row[:, None] * pitch + column, mask=column < size, other=0.0).to(tl.float32)
    store_turned(out, x, 1.0, turn, first + token, token < length, size, rows, head_dim, rotated)
