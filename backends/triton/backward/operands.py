"""The operands of the FP8 backward's kernels: shapes and kinds that calls share, and the tensors of one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from attnbench.problem.fp8 import hadamard
from attnbench.problem.spec import AttentionSpec

from ...common.layout import rounded_up
from ..descales import steps
from .copies import PADDING, Laid, padded
from .layout import LOG2E, Gradient

__all__ = ["Layout", "Prepared", "turn_factor"]


class Layout:
    """What calls with the same spec and scale layout share; looked up once a call, and a key by identity."""

    def __init__(
        self, spec: AttentionSpec, rotated: bool, served: bool, scales: tuple[tuple[Sequence[int], Sequence[int]], ...]
    ) -> None:
        """``rotated``: Q and K were.  ``served``: by the Hopper kernels.  ``scales``: shapes and strides of the
        descales.
        """
        self.spec, self.rotated = spec, rotated
        by_query, by_key = (spec.batch, spec.heads, spec.seqlen_q), (spec.batch, spec.kv_heads, spec.seqlen_kv)
        steps(*scales[0], *by_query)
        # Strides (batch, head, token) of their descales.
        self.k_steps, self.v_steps = (steps(*each, *by_key) for each in scales[1:])
        varies = tuple(shape[2] > 1 for shape, _ in scales)
        self.served = served
        # Padded, and so the shapes of Q, dO, K and V as they are laid out.
        self.head_dim, self.head_dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
        self.padded_q, self.padded_kv = rounded_up(spec.seqlen_q, PADDING), rounded_up(spec.seqlen_kv, PADDING)
        queries, keys = (spec.batch, spec.heads, self.padded_q), (spec.batch, spec.kv_heads, self.padded_kv)
        self.q, self.do = (*queries, self.head_dim), (*queries, self.head_dim_v)
        self.k, self.v = (*keys, self.head_dim), (*keys, self.head_dim_v)
        self.plane = math.prod(queries)
        mask, offset = spec.mask, spec.mask.offset(spec.seqlen_q, spec.seqlen_kv)
        self.before = 0 if mask.left is None else mask.left - offset
        self.after = 0 if mask.right is None else mask.right + offset
        self.edges = mask.left is not None, mask.right is not None
        self.scale = spec.scale * (turn_factor(spec.head_dim) if rotated else 1.0)
        # Whether the fused kernel's sums, which are in bf16, are dQ itself.
        self.summed_in_place = not rotated and self.q == (*queries[:2], spec.seqlen_q, spec.head_dim)
        # What turns an unscaled score into the exponent of 2: of exp(s), or of exp(2x) in the softcap's tanh(x).
        self.exponent = LOG2E * (2.0 * spec.scale / spec.softcap if spec.softcap else spec.scale)
        # What kind of program it takes: edges, whose scales vary, a soft cap, a rotation.
        self.kinds = (*self.edges, *varies, spec.softcap > 0, rotated)


class Prepared(NamedTuple):
    """Everything that the two kernels read.

    ``k_scale`` and ``v_scale`` are the descales in fp32; ``turn`` is the matrix that undoes a rotation.  ``sums``:
    zeros (B, H, padded Sq, padded D) in bf16 for the fused kernel, which reads ``gradient`` in its own units and no
    ``k.wide``.
    """

    layout: Layout
    q: Laid
    k: Laid
    v: Laid
    gradient: Gradient
    k_scale: Tensor
    v_scale: Tensor
    turn: Tensor | None
    sums: Tensor | None

    @property
    def served(self) -> bool:
        """By the Hopper kernels, where a tile asks for them."""
        return self.layout.served


@lru_cache(maxsize=256)
def turn_factor(size: int) -> float:
    """The factor of the rotation's signs."""
    return float(hadamard(size).abs().max())
