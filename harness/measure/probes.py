"""Checks that need a second run: what a row may not depend on, whether all is computed anew, whether it repeats.

Each check changes the inputs in place, because a fault may depend on their addresses, and knows the right result of the
second run without a second truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.problem.lengths import Lengths
from attnbench.problem.spec import AttentionSpec

from ..cases.inputs import Drawn
from .accuracy import TensorName, relative_l2

__all__ = ["LeakProbe", "negate", "same_bits", "undo_negation"]

# Not a power of two: that would move a scale over the sequence without changing how the rest is rounded.
_LARGER = 11.0
# Hidden values and their products must stay finite: 0 · infinity would be NaN in a correct kernel.
_LARGEST = 2.0**14
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class LeakProbe:
    """Detects whether a row depends on what it may not see: later keys, later queries, other sequences, padding.

    The rows ``begin`` to ``rows`` − 1 are compared.  They see no key outside ``first`` to ``stop`` − 1, and no row sees
    another's query.  ``change`` multiplies everything else by 11, so that whatever is computed over the sequence (a
    scale, a mean, a maximum) changes; these rows of out and LSE (and of dq, with the same grad_out) must not, in any
    bit.  ``entry`` is the row of the batch in which this is so; None stands for all.
    """

    rows: int
    first: int
    stop: int
    begin: int = 0
    entry: int | None = None

    @classmethod
    def of(cls, spec: AttentionSpec, inputs: Drawn | None = None) -> LeakProbe | None:
        """The probe of a spec; None if no row both sees a key and has a later one hidden from it.

        For sequences with lengths of their own, those of ``inputs``, it is the longest one's.
        """
        if inputs is not None and inputs.lengths is not None:
            return cls._of_longest(spec, inputs, inputs.lengths)
        mask, queries, keys = spec.mask, spec.seqlen_q, spec.seqlen_kv
        if mask.right is None:
            return None
        # Row i sees no key from i + reach on.
        reach = mask.offset(queries, keys) + mask.right + 1
        candidates = range(max(0, 1 - reach), min(queries, keys - reach))
        if not candidates:
            return None
        # A third of the way: the middle ends a tile if lengths are powers of two, and the border must lie inside
        # a tile of keys and queries.
        row = candidates[len(candidates) // 3]
        return cls(row + 1, mask.span(0, queries, keys)[0], mask.span(row, queries, keys)[1])

    @classmethod
    def _of_longest(cls, spec: AttentionSpec, inputs: Drawn, lengths: Lengths) -> LeakProbe | None:
        own = max(lengths.sequences(spec, inputs.q, inputs.k), key=lambda each: each.spec.seqlen_kv)
        probe = cls.of(own.spec)
        if probe is None:  # it sees all of its keys, but nothing beside itself
            if own.spec.seqlen_kv == inputs.k.shape[0] * inputs.k.shape[2]:
                return None
            probe = cls(own.spec.seqlen_q, 0, own.spec.seqlen_kv)
        keys, queries = own.keys.start, own.queries.start
        return cls(queries + probe.rows, keys + probe.first, keys + probe.stop, queries, own.row)

    def change(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Multiply in place all that the rows may not see of q, k, v (B, H, S, D)."""
        for x, seen in ((q, self._seen(q)), (k, self._seen(k, keys=True)), (v, self._seen(v, keys=True))):
            kept = seen.clone()
            x.mul_(_LARGER).clamp_(-_LARGEST, _LARGEST)
            seen.copy_(kept)

    def leak(self, before: Tensor, after: Tensor) -> float:
        """The relative L2 change of the rows of a tensor (B, H, Sq, ...); 0 if no bit changed that counts."""
        before, after = self._seen(before), self._seen(after)
        return 0.0 if same_bits(before, after) else relative_l2(after, before)

    def _seen(self, x: Tensor, keys: bool = False) -> Tensor:
        """The rows that are compared, or the keys that they see."""
        entries = x if self.entry is None else x[self.entry : self.entry + 1]
        return entries[:, :, self.first : self.stop] if keys else entries[:, :, self.begin : self.rows]


def negate(*inputs: Tensor) -> None:
    """Negate Q, K, V (and grad_out) in place; every answer then changes its sign, except the LSE.

    The scores stay the same (−Q · −K), out is linear in V, and one or three factors of each gradient change sign.
    Rounding is symmetric, so this is exact in every format and the truth stays valid after ``undo_negation``.  An
    output or operand cached from the call before has the wrong sign.
    """
    for x in inputs:
        x.neg_()


def undo_negation(values: Mapping[TensorName, Tensor]) -> dict[TensorName, Tensor]:
    """The results of a run on negated inputs with the signs that the truth of the original inputs has."""
    return {name: value if name == "lse" else -value for name, value in values.items()}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two results agree in every bit; NaNs at the same place count as equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = _INTEGERS[one.element_size()]
    same = one.view(bits) == other.view(bits)
    return bool((same | (one.isnan() & other.isnan())).all())
