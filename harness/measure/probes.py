"""Questions that one run cannot answer: what a row may not depend on, what is computed afresh, what repeats.

Each probe changes the inputs where they lie, because a fault may depend on their
addresses, and knows what must come out of the second run without a second truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.problem.spec import AttentionSpec

from .accuracy import TensorName, relative_l2

__all__ = ["LeakProbe", "negate", "same_bits", "unnegated"]

# No power of two: that would move a scale over the sequence without moving a rounding of the rest.
_LARGER = 11.0
# Hidden values stay finite, and so do their products: 0 · infinity would be NaN in a kernel that is right.
_LARGEST = 2.0**14
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class LeakProbe:
    """Whether a row depends on what its mask hides: later keys, or later queries.

    ``rows`` first rows are compared.  They see no key outside ``first`` to ``stop`` − 1, and
    no row sees another's query.  ``change`` makes all the rest 11 times as large, so that
    whatever is computed over the sequence (a scale, a mean, a maximum) changes, and these
    rows of out and LSE (and of dq, with the same grad_out) must not, in any bit.
    """

    rows: int
    first: int
    stop: int

    @classmethod
    def of(cls, spec: AttentionSpec) -> LeakProbe | None:
        """The probe of a spec; None where no row both sees a key and has a later one hidden from it."""
        mask, queries, keys = spec.mask, spec.seqlen_q, spec.seqlen_kv
        if mask.right is None:
            return None
        # Row i sees no key from i + reach on.
        reach = mask.offset(queries, keys) + mask.right + 1
        candidates = range(max(0, 1 - reach), min(queries, keys - reach))
        if not candidates:
            return None
        # A third of the way, and not the middle, which ends a tile wherever lengths are powers of two:
        # the probe is to part keys and queries that one tile holds.
        row = candidates[len(candidates) // 3]
        return cls(row + 1, mask.span(0, queries, keys)[0], mask.span(row, queries, keys)[1])

    def change(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Write larger values over all that the rows may not see of q, k, v (B, H, S, D), where they lie."""
        for x in (q[:, :, self.rows :], *(y[:, :, part] for y in (k, v) for part in self._hidden)):
            x.mul_(_LARGER).clamp_(-_LARGEST, _LARGEST)

    def leak(self, before: Tensor, after: Tensor) -> float:
        """The relative L2 change of the rows of a tensor (B, H, Sq, ...): 0 means that no bit changed that counts."""
        before, after = before[:, :, : self.rows], after[:, :, : self.rows]
        return 0.0 if same_bits(before, after) else relative_l2(after, before)

    @property
    def _hidden(self) -> tuple[slice, slice]:
        return slice(0, self.first), slice(self.stop, None)


def negate(*inputs: Tensor) -> None:
    """Negate Q, K, V (and grad_out) where they lie: all of them, so that all of the answers change sign but the LSE.

    The scores are those of before, −Q · −K, out is linear in V, and of each gradient's
    factors one or three change sign.  Rounding is symmetric, so this is exact in every
    format, and the truth is that of before: ``unnegated`` goes with it.  What was kept from
    the call before, be it an output or an operand under its old address, has the wrong sign.
    """
    for x in inputs:
        x.neg_()


def unnegated(values: Mapping[TensorName, Tensor]) -> dict[TensorName, Tensor]:
    """What a run on negated inputs returned, brought back to the truth of the inputs as they were."""
    return {name: value if name == "lse" else -value for name, value in values.items()}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two runs answered the same in every bit; a NaN is the same as any NaN at its place."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = _INTEGERS[one.element_size()]
    same = one.view(bits) == other.view(bits)
    return bool((same | (one.isnan() & other.isnan())).all())
