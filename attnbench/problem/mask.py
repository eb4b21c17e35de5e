"""Which keys a query may see: no mask, causal, or a window, with the alignment stated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ..errors import InputError
from ..text.printable import brief

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ALIGNMENTS", "Alignment", "Mask"]

Alignment = Literal["top-left", "bottom-right"]
ALIGNMENTS: tuple[Alignment, ...] = get_args(Alignment)


@dataclass(frozen=True)
class Mask:
    """Query i sees key j when ``i + o - left <= j <= i + o + right``; None lifts that side.

    ``o`` is 0 for the top-left alignment (as in ``torch.nn.functional.scaled_dot_product_attention``) and
    ``seqlen_kv - seqlen_q`` for bottom-right (as in FlashAttention).  Causal is ``right=0``.  Sides count keys and are
    not negative.
    """

    left: int | None = None
    right: int | None = None
    alignment: Alignment = "top-left"

    def __post_init__(self) -> None:
        for side in ("left", "right"):
            reach = getattr(self, side)
            if reach is None:
                continue
            if isinstance(reach, bool) or not isinstance(reach, int):
                raise InputError(f"the window's {side} side must be a whole number of keys or None, not {brief(reach)}")
            if reach < 0:
                raise InputError(
                    f"the window's {side} side must not be negative, got {brief(reach)}; None means unlimited"
                )
        if self.alignment not in ALIGNMENTS:
            raise InputError(f"causal_alignment must be one of {', '.join(ALIGNMENTS)}, not {brief(self.alignment)}")

    @property
    def kind(self) -> Literal["none", "causal", "window"]:
        """The kind of mask."""
        if self.left is None:
            return "none" if self.right is None else "causal" if self.right == 0 else "window"
        return "window"

    def offset(self, seqlen_q: int, seqlen_kv: int) -> int:
        """Where query 0 stands among the keys."""
        return seqlen_kv - seqlen_q if self.alignment == "bottom-right" else 0

    def span(self, row: int, seqlen_q: int, seqlen_kv: int) -> tuple[int, int]:
        """The first key that query ``row`` sees and one past the last, clipped to the keys; equal when it sees none."""
        centre = row + self.offset(seqlen_q, seqlen_kv)
        start = 0 if self.left is None else min(max(0, centre - self.left), seqlen_kv)
        stop = seqlen_kv if self.right is None else min(seqlen_kv, centre + self.right + 1)
        return start, max(start, stop)

    def edges(self, rows: Tensor, seqlen_q: int, seqlen_kv: int) -> tuple[Tensor, Tensor]:
        """``span`` of each of ``rows``, not clipped to the keys; the rows as they are for a side without a limit."""
        offset = self.offset(seqlen_q, seqlen_kv)
        start = rows if self.left is None else rows + (offset - self.left)
        return start, rows if self.right is None else rows + (offset + self.right + 1)

    def outside(self, keys: Tensor, start: Tensor, stop: Tensor) -> Tensor | None:
        """Which ``keys`` (..., keys) lie outside ``start`` to ``stop`` (..., rows, 1): (..., rows, keys), None if the
        mask is none.

        One operator a side: on a GPU each is a launch.
        """
        early = None if self.left is None else keys < start
        late = None if self.right is None else keys >= stop
        return late if early is None else early if late is None else early.logical_or_(late)

    def hidden(self, rows: Tensor, keys: Tensor, seqlen_q: int, seqlen_kv: int) -> Tensor | None:
        """Which ``keys`` (keys,) are hidden from the queries ``rows`` (rows,): (rows, keys), or None if nothing is
        hidden.
        """
        return self.outside(keys, *self.edges(rows.unsqueeze(-1), seqlen_q, seqlen_kv))

    def area(self, seqlen_q: int, seqlen_kv: int) -> int:
        """How many (query, key) pairs are visible: the work that exact attention has to do."""
        offset = self.offset(seqlen_q, seqlen_kv)
        starts = 0 if self.left is None else _clipped_sum(offset - self.left, seqlen_q, seqlen_kv)
        if self.right is None:
            return seqlen_q * seqlen_kv - starts
        return _clipped_sum(offset + self.right + 1, seqlen_q, seqlen_kv) - starts

    def has_empty_rows(self, seqlen_q: int, seqlen_kv: int) -> bool:
        """Whether some query sees no key at all; its output is 0, its LSE minus infinity, its gradients 0."""
        if self.left is None and (self.right is None or (self.right >= 0 and self.alignment == "top-left")):
            return False
        # Visible keys only move to the right with the row, so an empty row is the first or the last one.
        return any(start == stop for start, stop in (self.span(i, seqlen_q, seqlen_kv) for i in (0, seqlen_q - 1)))

    def canonical(self, seqlen_q: int, seqlen_kv: int) -> Mask:
        """The same mask in one spelling: sides that cut nothing lifted, an alignment that changes nothing top-left."""
        offset = self.offset(seqlen_q, seqlen_kv)
        left = None if self.left is None or self.left >= seqlen_q - 1 + offset else self.left
        right = None if self.right is None or self.right >= seqlen_kv - 1 - offset else self.right
        unaligned = offset == 0 or (left is None and right is None)
        return Mask(left, right, "top-left" if unaligned else self.alignment)

    def canonical_within(self, longest_q: int, longest_kv: int) -> Mask:
        """``canonical`` for sequences of any lengths up to these, each with its own offset."""
        top_left = self.alignment == "top-left"
        behind, ahead = (longest_q, longest_kv) if top_left else (longest_kv, longest_q)
        left = None if self.left is None or self.left >= behind - 1 else self.left
        right = None if self.right is None or self.right >= ahead - 1 else self.right
        return Mask(left, right, "top-left" if left is None and right is None else self.alignment)

    def __str__(self) -> str:
        if self.kind == "none":
            return "none"
        name = "causal"
        if self.kind == "window":
            sides = ["inf" if side is None else str(side) for side in (self.left, self.right)]
            name = f"window({sides[0]},{sides[1]})"
        return name if self.alignment == "top-left" else f"{name}/bottom-right"


def _clipped_sum(first: int, count: int, limit: int) -> int:
    """The sum of ``count`` consecutive numbers from ``first`` on, each clipped into 0..limit."""
    begin = min(count, max(0, -first))
    end = min(count, max(begin, limit - first))
    return (2 * first + begin + end - 1) * (end - begin) // 2 + (count - end) * limit
