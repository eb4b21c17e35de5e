"""Masks as FlashAttention's kernels take them: windows over the first keys, aligned bottom-right."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

__all__ = ["Window", "bottom_right", "flash2_window", "flash2_window_of", "window_of"]


class Window(NamedTuple):
    """A window over the first ``keys`` keys, aligned bottom-right; -1 stands for an unlimited side."""

    keys: int
    left: int
    right: int

    @property
    def causal(self) -> bool:
        """Whether it is the causal mask, for which kernels have a path of their own."""
        return self.left < 0 and self.right == 0

    @property
    def local(self) -> bool:
        """Whether a side is limited, other than as in the causal mask."""
        return not self.causal and (self.left >= 0 or self.right >= 0)


@lru_cache(maxsize=1024)
def bottom_right(mask: Mask, seqlen_q: int, seqlen_kv: int) -> Window | str:
    """The window that makes a kernel with bottom-right windows compute ``mask``, or why there is none.

    A top-left window is shifted by the difference of the lengths.  Keys behind the last visible one are cut off, so no
    right side is negative.  A negative left side (the last queries see no key) would mean an unlimited one to kernels.
    """
    if mask.kind == "none":
        return Window(seqlen_kv, -1, -1)
    keys = mask.span(seqlen_q - 1, seqlen_q, seqlen_kv)[1]
    shift = keys - seqlen_q - mask.offset(seqlen_q, seqlen_kv)
    left = -1 if mask.left is None else mask.left + shift
    right = -1 if mask.right is None else mask.right - shift
    if mask.left is not None and left < 0:
        return "its window cannot end before the last key of the last query"
    return Window(keys, left, right)


def window_of(spec: AttentionSpec) -> Window | str:
    """``bottom_right`` for a spec.  Where sequences have lengths of their own, the window within each sequence."""
    if spec.lengths is None:
        return bottom_right(spec.mask, spec.seqlen_q, spec.seqlen_kv)
    if spec.mask.kind != "none" and not spec.lengths.square and spec.mask.alignment == "top-left":
        return "aligns masks at the last query and key of each sequence, not at the first"
    left, right = (-1 if side is None else side for side in (spec.mask.left, spec.mask.right))
    return Window(spec.seqlen_kv, left, right)


@lru_cache(maxsize=1024)
def flash2_window(mask: Mask, seqlen_q: int, seqlen_kv: int) -> Window | str:
    """The same for FlashAttention-2, whose windows cannot reach beyond all keys.

    The kernel lifts sides as long as the keys (``mha_fwd`` in torch's flash_api.cpp) and replaces them by the number of
    keys if the other side is limited, which differs if there are more queries than keys.
    """
    window = bottom_right(mask, seqlen_q, seqlen_kv)
    if isinstance(window, str) or mask.kind == "none":
        return window
    reach = seqlen_q - 1 if mask.right is None else window.right
    if reach > window.keys or (reach == window.keys and mask.left is None):
        return f"its window cannot reach {reach} keys to the right, beyond all {window.keys}"
    return window


def flash2_window_of(spec: AttentionSpec) -> Window | str:
    """``flash2_window`` for a spec.  Where sequences have lengths of their own, the window within each sequence."""
    if spec.lengths is None:
        return flash2_window(spec.mask, spec.seqlen_q, spec.seqlen_kv)
    if spec.mask.left is not None and spec.mask.right is None and not spec.lengths.square:
        return "its window cannot reach beyond all keys, as it must in sequences with more queries"
    return window_of(spec)
