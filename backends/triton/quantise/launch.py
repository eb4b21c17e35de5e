"""From 16 or 32 bits to FP8 operands, their scales and transposed copies, as fast as the memory allows.

The numbers are those of ``attnbench.problem.fp8.quantise``, bit for bit, except: sums of a rotation and of its bound
are in another order, so last bits of such scales and roundings at midpoints differ; in a group with a value that is not
finite other elements may be NaN; a mean is torch's, whose order of summation depends on the type.

Scales of a token or a block take one pass over memory; those of a head or a tensor two, the second starting with what
the first left in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attnbench.errors import InputError
from attnbench.problem.fp8 import BLOCK, Quantised, Recipe
from attnbench.problem.lengths import Lengths

from ..blocks import Memory
from ..launching import on
from ..tile_map import Tiled, one_sided, sequences_of, tile_map
from .deferred import Deferred
from .interleaving import interleaved
from .jobs import Job
from .kernels import PADDING
from .layout import TILES, Layout, Outline, Places, Tiles, layout_of, signs, tiles_for
from .stored import Stored

__all__ = [
    "TILES",
    "Quantisation",
    "QuantisedTensors",
    "Request",
    "Tiles",
    "Unequal",
    "quantise_tensors",
    "quantised",
    "quantised_together",
    "tiles_for",
    "unequal",
]

_TILES = Job._fields.index("tiles")


class Quantisation:
    """The result for a tensor (B, H, S, D), whose parts are views of memory that it shares with others.

    ``length`` is S.  ``mean`` (B, H, 1, D) fp32 was subtracted.  Of sequences of unequal length ``transposed`` is
    (1, H, D, slots), each sequence at its slot with zeros behind it, and needs rows beside it; ``descale`` is always
    (B, H, S, 1).
    """

    def __init__(self, outline: Outline, places: Places, kept: Memory, scratch: Memory, mean: Tensor | None) -> None:
        self._places, self._kept, self._scratch, self.mean = places, kept, scratch, mean
        self.length, self.interleaved = outline.shape[2], outline.interleaved

    @property
    def rows(self) -> Tensor | None:
        """(B, H, S, D) in FP8, rows at multiples of 16 bytes; None if not requested."""
        part = self._places.rows
        return None if part is None else self._kept.of(part)

    @property
    def transposed(self) -> Tensor | None:
        """(B, H, D, S rounded up to 128), zero-padded; with ``interleaved`` each 16 tokens in the order of
        ``interleaving``.  None if not requested.
        """
        part = self._places.transposed
        return None if part is None else self._scratch.of(part)

    @property
    def descale(self) -> Tensor:
        """fp32: (1, 1, 1, 1) for a tensor, (B, H, 1, 1) for a head, (B, H, ⌈S / 128⌉, 1) for blocks, (B, H, S, 1) for
        tokens.
        """
        return self._kept.of(self._places.descale)

    @property
    def data(self) -> Tensor:
        """(B, H, S, D): the rows, else a view of the transposed copy, or a new one where its tokens are interleaved."""
        rows, ordered = self.rows, self.transposed
        if rows is not None:
            return rows
        assert ordered is not None, "at least one of the two is there"
        if self.interleaved:
            ordered = interleaved(ordered, back=True)
        return ordered[..., : self.length].mT

    def operand(self, recipe: Recipe, *, block: int = BLOCK) -> Quantised:
        """The same as ``problem.fp8`` has it, with a block's scale at each of its ``block`` tokens; tensors are made
        when read.
        """

        places, granularity = self._places, recipe.granularity
        if places.stored is not None:
            return Stored.of(self._kept.block, places.stored)

        def of_tokens() -> Tensor:
            descale = self.descale
            if granularity == "block" and descale.shape[2] != self.length:
                return descale.repeat_interleave(block, dim=2)[:, :, : self.length]
            return descale

        rotated = places.signs is not None
        return Deferred.of(lambda: self.data, of_tokens, granularity, rotated=rotated, mean=self.mean)

    def job(self, x: Tensor, tiles: Tensor | None) -> Job:
        """What a kernel is given of the tensor x, of which this is made."""
        places, mean = self._places, self.mean
        partial, turn, moved = places.partial, places.signs, None
        if mean is not None and turn is not None:
            moved = mean @ signs(x.shape[3], mean.dtype, x.device)
        return Job(
            x, self.rows, self.transposed, self.descale, None if partial is None else self._scratch.of(partial),
            mean, moved, turn, places.factor, tiles, *places.fixed,
        )  # fmt: skip


class Unequal(NamedTuple):
    """The lengths of one side's sequences, ``q`` or ``kv``, and the tokens that their slots begin at multiples of."""

    lengths: Lengths
    side: Literal["q", "kv"]
    slot: int = PADDING


def unequal(lengths: Lengths | None, side: Literal["q", "kv"], slot: int = PADDING) -> Unequal | None:
    """``Unequal`` where there are lengths; slots begin at multiples of ``PADDING`` at least."""
    return None if lengths is None else Unequal(lengths, side, max(slot, PADDING))


class Request(NamedTuple):
    """A tensor x (B, H, S, D) of bf16, fp16 or fp32, of any strides, and the copies to make.

    ``rows`` and ``transposed``: at least one.  ``group`` consecutive heads share the scale of a head (the query heads
    of a key head).  ``rotate`` and ``smooth``: whether the recipe's rotation and smoothing apply.  ``interleaved``: the
    order of the transposed copy's tokens.  ``unequal``: the sequences' lengths, where they have their own.
    """

    x: Tensor
    rows: bool = True
    transposed: bool = False
    group: int = 1
    rotate: bool = False
    smooth: bool = False
    interleaved: bool = False
    unequal: Unequal | None = None


def quantised(x: Tensor, recipe: Recipe, **wanted: Any) -> Quantisation:
    """One tensor by the recipe; ``wanted`` are fields of ``Request``.  Raises as ``quantised_together`` does."""
    return quantised_together([Request(x, **wanted)], recipe)[0]


def quantised_together(
    requests: Sequence[Request], recipe: Recipe, tiles: Tiles | None = None, *, block: int = BLOCK
) -> list[Quantisation]:
    """Several tensors by one recipe in one launch, or two for scales of a head or a tensor.

    ``tiles`` replaces the committed ones, except for blocks; ``block``: tokens of a block, a power of two.  Raises
    InputError for a rank, dtype, device or group that does not fit, an empty tensor, a request for no copy.  On a CPU
    it needs Triton's interpreter.
    """
    device = requests[0].x.device
    if any(request.x.device != device for request in requests):
        raise InputError(f"tensors quantised together lie on one device, not {[str(r.x.device) for r in requests]}")
    layout = layout_of(tuple(map(_outline, requests)), recipe, device, tiles, block)
    own = [request.unequal for request in requests]
    return list(quantise_tensors(layout, [request.x for request in requests], own if any(own) else ()))


class QuantisedTensors:
    """What was quantised of tensors that have one layout: their parts' addresses, and by number what is made of each.

    ``begins``: of each the addresses of rows, transposed copy, descale and partial magnitudes, None for nothing.
    """

    __slots__ = ("_layout", "_means", "_scratch", "begins", "kept")

    def __init__(
        self, layout: Layout, kept: Memory, scratch: Memory, means: Sequence[Tensor | None],
        begins: Sequence[tuple[Any, ...]],
    ) -> None:  # fmt: skip
        """``means``: what was subtracted of each; empty where nothing was."""
        self._layout, self.kept, self._scratch, self._means, self.begins = layout, kept, scratch, means, begins

    def __getitem__(self, place: int) -> Quantisation:
        outline, places = self._layout.outlines[place], self._layout.places[place]
        mean = self._means[place] if self._means else None
        return Quantisation(outline, places, self.kept, self._scratch, mean)

    def __iter__(self) -> Iterator[Quantisation]:
        return map(self.__getitem__, range(len(self.begins)))


def quantise_tensors(layout: Layout, tensors: Sequence[Tensor], own: Sequence[Unequal | None] = ()) -> QuantisedTensors:
    """What is quantised of tensors that have this layout, on one device; ``own``: lengths of their sequences."""
    device = tensors[0].device
    kept = layout.kept.memory(device)
    scratch = kept if layout.scratch is None else layout.scratch.memory(device)
    begin, other, begins, jobs = kept.address, scratch.address, [], []
    together = begin | other
    for x, places in zip(tensors, layout.places, strict=True):
        rows, transposed, descale, partial = places.begins
        parts = (
            None if rows is None else begin + rows, None if transposed is None else other + transposed,
            begin + descale, None if partial is None else other + partial,
        )  # fmt: skip
        begins.append(parts)
        address = x.data_ptr()
        together |= address
        jobs.append((address, *parts, *places.rest))
    means: list[Tensor | None] = []
    if layout.smooth:
        for x, outline in zip(tensors, layout.outlines, strict=True):
            means.append(x.detach().mean(dim=2, keepdim=True, dtype=torch.float32) if outline.smooth else None)
    results, again = QuantisedTensors(layout, kept, scratch, means, begins), tuple(jobs)
    tables: list[Tensor | None] = [None] * len(jobs)
    with on(device):
        for launch, tiled in zip(layout.launches, layout.tiled, strict=True):
            if own:
                tables = list(map(_table, tensors, own, tiled))
                again = tuple(map(_with_table, jobs, tables))
            if means or not launch.again(device.index, together, (again,)):
                launch((tuple(map(Quantisation.job, results, tensors, tables)),), together)
    return results


def _table(x: Tensor, own: Unequal | None, tiled: Tiled | None) -> Tensor | None:
    """The table of a launch's tiles, where lengths differ."""
    if own is None or tiled is None:
        return None
    return tile_map(one_sided(own.lengths, own.side), x.shape[0], tiled, x.device)


def _with_table(job: tuple[Any, ...], table: Tensor | None) -> tuple[Any, ...]:
    """A job of addresses with its table's."""
    return job if table is None else (*job[:_TILES], table.data_ptr(), *job[_TILES + 1 :])


def _outline(request: Request) -> Outline:
    x, own = request.x, request.unequal
    unequal = None if own is None else (sequences_of(own.lengths, x.shape[0]), own.slot, own.lengths.batch != "packed")
    order = request.transposed and request.interleaved
    return Outline(
        x.shape, x.stride(), x.dtype, request.rows, request.transposed, request.group, request.rotate, request.smooth,
        order, unequal,
    )  # fmt: skip
