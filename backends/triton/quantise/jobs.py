"""What a launch of the quantise kernels is given of each tensor: its memory and its numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Job", "Size"]


class Job(NamedTuple):
    """One tensor's memory: what is read, x, mean, moved and signs; what is written; x's strides.  None for nothing."""

    x: Any
    data: Any  # (B, H, S, D rounded up to 16)
    flipped: Any  # (B, H, D, S rounded up to PADDING); (H, D, slots) where there are ``tiles``
    descale: Any  # one for each group; (B, H, S) where there are ``tiles``
    partial: Any  # (B, H, chunks) int32: bits of magnitudes; with ``tiles`` (groups, slots / PADDING), zeros at first
    mean: Any  # (B, H, D) fp32
    moved: Any  # (B, H, D) fp32: mean @ signs
    signs: Any  # (D, D): 0 and ± rotation_shrink(D), with which no sum overflows
    factor: Any  # that makes ``signs`` orthogonal
    tiles: Any  # the table of ``tile_map`` with this side's tokens as both sides'; None where all lengths are alike
    slots: Any  # tokens of a head's slots, a multiple of PADDING; None where all lengths are alike
    far: Any  # None where the elements of a tile lie within 2^31 of each other
    eights: Any  # 1 where the strides of batch, head and token are all multiples of 8 but not all of 16, else None
    stride_b: Any
    stride_h: Any
    stride_s: Any
    stride_d: Any


class Size(NamedTuple):
    """One tensor's numbers.

    Kernels take them ``coded``: Triton compiles anew for integers that are 1 or multiples of 16, which these never
    are, so that one compilation serves all lengths.
    """

    first: Any  # the number of its first program
    programs: Any
    heads: Any
    seqlen: Any
    tiles: Any  # of a head
    chunks: Any  # of a head, each with one partial magnitude
    beside: Any  # 1 where programs that follow each other have the heads of one place, 0 where the places of one head
    inner: Any  # programs until the other of the two changes: ``heads`` or parts (tiles, chunks) of a head
    outer: Any  # how often it changes in one batch entry
    share: Any  # consecutive heads, over all batches, that have one scale

    def coded(self) -> Size:
        """Each number n as 2 n + 3."""
        return Size(*(2 * number + 3 for number in self))
