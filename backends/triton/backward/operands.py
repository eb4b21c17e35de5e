"""The operands of the FP8 backward's kernels: shapes and kinds that calls share, and the tensors of one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnbench.kernels.contract import gradient_dtype
from attnbench.problem.fp8 import hadamard
from attnbench.problem.lengths import Lengths
from attnbench.problem.spec import AttentionSpec

from ...common.layout import rounded_up
from ..blocks import Piece
from ..descales import steps
from ..tile_map import Tiled, tile_map
from .copies import PADDING, Laid, halves, padded
from .layout import LOG2E, Gradient

__all__ = ["Extent", "Layout", "Prepared", "turn_factor"]

_SLOTS = PADDING, PADDING


class Extent(NamedTuple):
    """Of Q and K in memory; how many ``sequences`` have lengths of their own, None where all are alike.

    ``shared``: the tokens of a sequence share their descales, which have each token's place.
    """

    batch: int
    seqlen_q: int
    seqlen_kv: int
    sequences: int | None = None
    shared: bool = False

    def tiled(self, side: Literal["q", "kv"], block: int, whole: bool = False) -> Tiled | None:
        """The table by blocks of one side's tokens, or None."""
        return None if self.sequences is None else Tiled(side, block, _SLOTS, (self.seqlen_q, self.seqlen_kv), whole)

    def tiles(self, side: Literal["q", "kv"], block: int) -> int:
        """How many blocks of one side's tokens there are at most, of a head of one batch entry or of all sequences."""
        tiled = self.tiled(side, block)
        if tiled is None or self.sequences is None:
            return -(-(self.seqlen_q if side == "q" else self.seqlen_kv) // block)
        return tiled.capacity(self.sequences, self.batch)

    @property
    def entries(self) -> int:
        """Batch entries of what is laid out: all sequences have their slots in one."""
        return self.batch if self.sequences is None else 1

    def long(self, side: Literal["q", "kv"]) -> int:
        """Tokens of an entry of what is laid out."""
        if self.sequences is not None:
            return self.tiles(side, PADDING) * PADDING
        return rounded_up(self.seqlen_q if side == "q" else self.seqlen_kv, PADDING)


class Layout:
    """What calls with the same spec and scale layout share; looked up once a call, and a key by identity."""

    def __init__(
        self,
        spec: AttentionSpec,
        rotated: bool,
        served: bool,
        scales: tuple[tuple[Sequence[int], Sequence[int]], ...],
        extent: Extent | None = None,
        keys_in_place: bool = False,
        pieces: tuple[int, int] | None = None,
    ) -> None:
        """``rotated``: Q and K were.  ``served``: by the Hopper kernels.  ``scales``: shapes and strides of the
        descales.  ``extent``: the spec's own where all sequences have its lengths.  ``keys_in_place``: of such that
        have their own, a Hopper kernel reads K and V where they lie.  ``pieces``: columns of Q, K, V and dO that a
        Hopper kernel reads apart.
        """
        self.spec, self.rotated = spec, rotated
        self.extent = extent = extent or Extent(spec.batch, spec.seqlen_q, spec.seqlen_kv)
        unequal = extent.sequences is not None
        by_query = extent.batch, spec.heads, extent.seqlen_q
        by_key = extent.batch, spec.kv_heads, extent.seqlen_kv
        steps(*scales[0], *by_query)
        # Strides (batch, head, token) of their descales.
        self.k_steps, self.v_steps = (steps(*each, *by_key) for each in scales[1:])
        varies = tuple(shape[2] > 1 and not extent.shared for shape, _ in scales)
        self.served, self.keys_in_place = served, keys_in_place and served
        # Shapes of dQ, dK and dV, and whether they have rows of no sequence, which no kernel writes.
        self.gradients = (*by_query, spec.head_dim), (*by_key, spec.head_dim), (*by_key, spec.head_dim_v)
        self.gaps = spec.lengths is not None and spec.lengths.batch != "packed"
        # Padded, and so the shapes of Q, dO, K and V as they are laid out; ``rest`` and ``rest_v``: columns of Q and K,
        # and of V and dO, behind ``head_dim`` and ``head_dim_v``.
        self.head_dim, self.rest = pieces or halves(spec.head_dim)
        self.head_dim_v, self.rest_v = pieces or (padded(spec.head_dim_v), 0)
        self.pitch, self.pitch_v = self.head_dim + self.rest, self.head_dim_v + self.rest_v
        self.values_apart = self.pitch > 128  # the fused kernel makes dK and dQ, and another one dV
        self.padded_q, self.padded_kv = extent.long("q"), extent.long("kv")
        if self.keys_in_place:
            self.padded_kv = extent.seqlen_kv
        queries = extent.entries, spec.heads, self.padded_q
        keys = extent.batch if self.keys_in_place else extent.entries, spec.kv_heads, self.padded_kv
        self.q, self.do = (*queries, self.pitch), (*queries, self.pitch_v)
        self.k, self.v = (*keys, self.pitch), (*keys, self.pitch_v)
        self.plane = math.prod(queries)
        mask, offset = spec.mask, 0 if unequal else spec.mask.offset(spec.seqlen_q, spec.seqlen_kv)
        # Whether every sequence adds an offset of its own to both.
        self.aligned = unequal and mask.alignment == "bottom-right"
        self.before = 0 if mask.left is None else mask.left - offset
        self.after = 0 if mask.right is None else mask.right + offset
        self.edges = mask.left is not None, mask.right is not None
        # Whether P of the fused kernel is scaled up by dO's descale, so that no block has a factor to wait for, and dO
        # is copied, divided by it: where that was no slower on an H200, with a causal mask up to 64 columns and MLA.
        # Of sequences of unequal length it is faster with MLA, and up to 64 columns with several heads a key head.
        narrow = self.pitch <= 64
        suits = not any(self.edges) or (self.edges == (False, True) and (self.values_apart or narrow))
        self.scaled_up = suits and (not unequal or self.values_apart or (narrow and spec.group > 1))
        self.scale = spec.scale * (turn_factor(spec.head_dim) if rotated else 1.0)
        # Whether the fused kernel's sums, which are in bf16, are dQ itself.
        # Where a key head has several query heads, hiding what lies behind each costs more than a pass over dQ.
        whole = self.pitch == spec.head_dim and (
            spec.group == 1 and not self.rest if unequal else self.padded_q == spec.seqlen_q
        )
        self.summed_in_place = whole and gradient_dtype(spec) == torch.bfloat16
        self.sums = self.gradients[0] if self.summed_in_place else self.q
        # What turns an unscaled score into the exponent of 2: of exp(s), or of exp(2x) in the softcap's tanh(x).
        self.exponent = LOG2E * (2.0 * spec.scale / spec.softcap if spec.softcap else spec.scale)
        # What kind of program it takes: edges, whose scales vary, a soft cap, a rotation.
        self.kinds = (*self.edges, *varies, spec.softcap > 0, rotated)


class Prepared(NamedTuple):
    """Everything that the two kernels read.

    ``k_scale`` and ``v_scale`` are the descales in fp32; ``turn`` is the matrix that undoes a rotation.  ``sums``:
    zeros in bf16 for the fused kernel, dQ itself or (B, H, padded Sq, padded D); that kernel reads ``gradient`` in its
    own units, no ``k.wide``, and a ``q.wide`` that bears Q's descale where heads share a key head.  ``lengths`` are
    None where all sequences have the spec's.
    """

    layout: Layout
    q: Laid
    k: Laid
    v: Laid
    gradient: Gradient
    k_scale: Tensor | Piece
    v_scale: Tensor | Piece
    turn: Tensor | None
    sums: Tensor | Piece | None
    lengths: Lengths | None = None

    def tiles(self, side: Literal["q", "kv"], block: int) -> Tensor | None:
        """The table that a kernel with blocks of one side's tokens reads where sequences have lengths of their own."""
        tiled = self.layout.extent.tiled(side, block)
        if tiled is None or self.lengths is None:
            return None
        return tile_map(self.lengths, self.layout.extent.batch, tiled, self.k_scale.device)

    @property
    def served(self) -> bool:
        """By the Hopper kernels, where a tile asks for them."""
        return self.layout.served


@lru_cache(maxsize=256)
def turn_factor(size: int) -> float:
    """The factor of the rotation's signs."""
    return float(hadamard(size).abs().max())
