"""What forwards of tensors that lie alike have in common: how they are quantised, and how the kernel reads that."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnbench.problem.fp8 import Recipe
from attnbench.problem.lengths import Lengths
from attnbench.problem.spec import AttentionSpec

from ..blocks import Part
from ..launching import KEPT
from ..quantise.kernels import PADDING
from ..quantise.launch import QuantisedTensors, Unequal, quantise_tensors
from ..quantise.layout import Layout as Quantising
from ..quantise.layout import Outline, Places, layout_of
from . import launch
from .launch import Given, Layout, Native, casts
from .matrices import aligned, matrix
from .tiles import Tile

__all__ = ["Plan", "casting_plan", "plan", "values_plan"]

_Side = Literal["q", "kv"]
_Outline = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # a tensor's shape, strides and dtype
_Own = tuple[int, bool]  # how many sequences have lengths of their own, and whether they are rows with padding


class Plan(NamedTuple):
    """How tensors are quantised, in order, and the kernel's layout of that.

    ``slots``: by tensor its side, and what the slots of sequences with lengths of their own begin at multiples of.
    ``layout`` is None where the kernel reads other tensors than the quantiser writes.
    """

    quantising: Quantising
    slots: tuple[tuple[_Side, int], ...]
    layout: Layout | None

    def quantised(self, tensors: Sequence[Tensor], lengths: Lengths | None) -> QuantisedTensors:
        """The tensors quantised."""
        own = () if lengths is None else [Unequal(lengths, side, slot) for side, slot in self.slots]
        return quantise_tensors(self.quantising, tensors, own)

    def reads(self, q: Tensor) -> bool:
        """Whether the kernel has a layout, and reads Q, which it casts, where it lies."""
        return self.layout is not None and aligned(q)

    def native(self, device: torch.device, q: Tensor | None, made: QuantisedTensors, lengths: Lengths | None) -> Native:
        """The kernel's arguments where it has a layout: all quantised, or ``q`` as it is, which then has no descales,
        and K and V quantised.
        """
        assert self.layout is not None, "another layout is made of the tensors"
        k, v = made.begins[-2:]
        first, scale = (made.begins[0][0], made.begins[0][2]) if q is None else (q.data_ptr(), k[2])
        begins = first, k[0], v[1], scale, k[2], v[2], v[2]

        def make() -> Given:
            scale, k, v = made[0], made[-2], made[-1]
            rows, keys, values = scale.rows if q is None else q, k.rows, v.transposed
            assert rows is not None, "they were asked for"
            assert keys is not None, "they were asked for"
            assert values is not None, "they were asked for"
            return Given(rows, keys, values, (scale.descale, k.descale, v.descale), v.descale)

        return Native(self.layout, device, begins, make, lengths)


@lru_cache(maxsize=KEPT)
def plan(
    recipe: Recipe, spec: AttentionSpec, tile: Tile, device: torch.device, here: bool, own: _Own | None,
    q: _Outline, k: _Outline, v: _Outline,
) -> Plan:  # fmt: skip
    """Q and K in rows and V transposed, for training V in rows as well; ``here``: where the Hopper kernel runs."""
    slots = _slots(tile)
    wanted = _wanted(q, own, PADDING, rotate=True), _wanted(k, own, PADDING, rotate=True), _values(spec, tile, own, v)
    quantising = layout_of(wanted, recipe, device)
    of_q, of_k, of_v = quantising.places
    layout = None
    if recipe.granularity in ("head", "tensor"):  # else V's descales of tokens are turned about first
        shared = own is not None
        layout = _layout(spec, tile, device, here, False, own, (shared,) * 3, _part(of_q.rows), of_k, of_v, of_q)
    return Plan(quantising, (("q", PADDING), ("kv", PADDING), slots), layout)


@lru_cache(maxsize=KEPT)
def casting_plan(
    recipe: Recipe, spec: AttentionSpec, tile: Tile, device: torch.device, here: bool, own: _Own | None,
    q: _Outline, k: _Outline, v: _Outline,
) -> Plan:  # fmt: skip
    """K in rows and V transposed, by the tile's blocks of keys, and Q as it is where the kernel casts it."""
    slots = _slots(tile)
    quantising = layout_of((_wanted(k, own, slots[1]), _values(spec, tile, own, v)), recipe, device, None, tile.block_n)
    of_k, of_v = quantising.places
    layout = None
    if here and casts(spec, tile, device) and matrix(*q[:2], spec.head_dim, q[2].itemsize) is not None:
        layout = _layout(spec, tile, device, here, True, own, (False,) * 3, q, of_k, of_v, of_k)
    return Plan(quantising, (("kv", slots[1]), slots), layout)


@lru_cache(maxsize=KEPT)
def values_plan(
    recipe: Recipe, spec: AttentionSpec, tile: Tile, device: torch.device, own: _Own | None, v: _Outline
) -> Plan:
    """V alone, transposed, for training in rows as well."""
    return Plan(layout_of((_values(spec, tile, own, v),), recipe, device), (_slots(tile),), None)


def _slots(tile: Tile) -> tuple[_Side, int]:
    """Of keys that the kernel reads by blocks."""
    return "kv", max(tile.block_n, PADDING)


def _wanted(x: _Outline, own: _Own | None, slot: int, *, rotate: bool = False) -> Outline:
    return Outline(*x, rotate=rotate, unequal=None if own is None else (own[0], slot, own[1]))


def _values(spec: AttentionSpec, tile: Tile, own: _Own | None, v: _Outline) -> Outline:
    """What of V the kernel reads, and for training a backward."""
    slot = _slots(tile)[1]
    return _wanted(v, own, slot)._replace(rows=spec.training, transposed=True, interleaved=tile.interleaved)


def _part(part: Part | None) -> _Outline:
    assert part is not None, "it was asked for"
    return part.shape, part.strides, part.dtype


def _layout(
    spec: AttentionSpec, tile: Tile, device: torch.device, here: bool, casting: bool, own: _Own | None,
    shared: tuple[bool, ...], q: _Outline, k: Places, v: Places, scale: Places,
) -> Layout:  # fmt: skip
    """The kernel's on these operands; ``scale`` has Q's descales, or any others where the kernel casts Q."""
    places = [_part(each)[:2] for each in (k.rows, scale.descale, k.descale, v.descale)]
    sequences = None if own is None else own[0]
    values = _part(v.transposed)[0]
    return launch.layout_of(spec, tile, values, q[2], device, here, casting, sequences, shared, q[:2], *places)
