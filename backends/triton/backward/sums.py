"""dQ from the sums that the fused kernel for Hopper leaves in bf16, where those are not dQ itself."""

from __future__ import annotations

import triton
import triton.language as tl

from ..tile_rows import ROW

__all__ = ["ROWS", "finish_query_gradients"]

ROWS = 64  # queries of a program


@triton.jit
def finish_query_gradients(
    sums,
    dq_out,
    tiles,
    heads,
    seqlen_q,
    padded_q,
    size: tl.constexpr,
    block_m: tl.constexpr,
    head_dim: tl.constexpr,
    rest: tl.constexpr,
):
    """dQ (B, H, Sq, D), contiguous, of a block of queries of one head; ``sums`` (B·H, padded Sq, padded D) bf16.

    The padding is left out, and the dtype is dQ's.  ``rest``: columns behind ``head_dim``, if the two are not one power
    of two.  ``tiles``: the table of sequences that have lengths of their own, whose sums are in slots, or None.
    """
    head = tl.program_id(1)
    if tiles is None:
        query = tl.program_id(0) * block_m + tl.arange(0, block_m)
        row = head.to(tl.int64) * padded_q + query
        first = head.to(tl.int64) * seqlen_q
    else:
        if tl.program_id(0) >= tl.load(tiles):
            return
        tiles += (1 + tl.program_id(0)) * ROW
        query = tl.load(tiles + 1) + tl.arange(0, block_m)
        row = head.to(tl.int64) * padded_q + tl.load(tiles + 6) + query
        first = (tl.load(tiles).to(tl.int64) * heads + head) * seqlen_q + tl.load(tiles + 2)
        seqlen_q = tl.load(tiles + 3)
    pitch: tl.constexpr = head_dim + rest
    inside = (query < seqlen_q)[:, None]
    sums += row[:, None] * pitch
    dq_out += (first + query)[:, None] * size
    column = tl.arange(0, head_dim)[None, :]
    tl.store(dq_out + column, tl.load(sums + column).to(dq_out.dtype.element_ty), mask=inside & (column < size))
    if rest:
        column = head_dim + tl.arange(0, rest)[None, :]
        tl.store(dq_out + column, tl.load(sums + column).to(dq_out.dtype.element_ty), mask=inside & (column < size))
