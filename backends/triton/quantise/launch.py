"""From 16 or 32 bits to FP8 operands, their scales and transposed copies, as fast as the memory allows.

The numbers are those of ``attnbench.problem.fp8.quantise``, bit for bit, except: sums of a rotation and of its bound
are in another order, so last bits of such scales and roundings at midpoints differ; in a group with a value that is not
finite other elements may be NaN; a mean is torch's, whose order of summation depends on the type.

Scales of a token or a block take one pass over memory; those of a head or a tensor two, the second starting with what
the first left in the L2 cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attnbench.errors import InputError
from attnbench.graph_pools import permanent
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.fp8 import BLOCK, LARGEST, Quantised, Recipe, hadamard, rotation_shrink
from attnbench.problem.lengths import Lengths
from attnbench.problem.spec import Granularity

from ...common.layout import rounded_up
from ..launching import Launch, addresses, on
from ..tile_map import Tiled, capacity, one_sided, sequences_of, tile_map
from .deferred import Deferred
from .interleaving import interleaved
from .kernels import PADDING, Job, Size, cast, largest_magnitudes

__all__ = [
    "TILES",
    "Quantisation",
    "Request",
    "Tiles",
    "Unequal",
    "quantised",
    "quantised_together",
    "tiles_for",
    "unequal",
]


class Tiles(NamedTuple):
    """Tokens and warps of a program: for rows alone, with a transposed copy, and in the first pass."""

    rows: int
    rows_flipped: int
    warps: int
    first_rows: int = 128
    first_warps: int = 8


# By the head dimension up to which they serve.  Those for 64 and 128 were the fastest on an H200 of those in
# tests/gpu/tune/tune_quantise.py, within 1 %: a first pass over 256 tokens wins less.  Those for 256 were not measured:
# a thread has about as many elements as at 128.
_SHARED = {64: Tiles(64, 64, 4, 64, 4), 128: Tiles(64, 64, 8, 128, 8), 256: Tiles(32, 64, 8, 64, 8)}
# Where Q and K are rotated, every program reads the rotation's matrix: longer tiles read it less often.  Q, K and V of
# 16,384 tokens of width 2048 took 0.154, 0.169 and 0.237 ms on an H200, with the tiles above 0.159, 0.249 and 0.304.
# Of 192 and 128 (MLA), 8,192 tokens and 16 heads, on an H100 0.229 ms, with the tiles for 256 0.249.
_ROTATED = {
    64: Tiles(128, 64, 4, 128, 8),
    128: Tiles(128, 64, 4, 128, 8),
    192: Tiles(128, 64, 8, 128, 8),
    256: Tiles(128, 32, 8, 128, 8),
}
TILES: dict[Granularity, dict[int, Tiles]] = {
    "tensor": _SHARED,
    "head": _SHARED,
    "block": {64: Tiles(BLOCK, BLOCK, 4), 128: Tiles(BLOCK, BLOCK, 4), 256: Tiles(BLOCK, BLOCK, 8)},
    "token": {64: Tiles(128, 64, 4), 128: Tiles(64, 64, 4), 256: Tiles(32, 32, 4)},
}
# Warps for blocks of 16 bits that are not rotated, of BLOCK tokens and of more, by head dimension.  On an H200 K and V
# of 16,384 tokens of width 2048 take 0.059 ms for the longer blocks at 128 and 0.065 for BLOCK at 256; with twice as
# many warps 0.075 and 0.075.  One tensor after the other they took 0.068 and 0.067, and with half as many warps 0.086.
_BLOCK_WARPS = {64: (4, 8), 128: (4, 16), 256: (4, 8)}
_MOST_PARTIAL = 1024  # magnitudes that a program of the second pass has to look through
_MEMORY = 8  # of a job's fields
_INPUTS = (torch.bfloat16, torch.float16, torch.float32)


class Quantisation(NamedTuple):
    """The result for a tensor (B, H, S, D).

    ``rows`` (B, H, S, D) in FP8, rows at multiples of 16 bytes.  ``transposed`` (B, H, D, S rounded up to 128),
    zero-padded, with ``interleaved`` each 16 tokens in the order of ``interleaving``.  Either is None if not requested.
    ``descale`` fp32: (1, 1, 1, 1) for a tensor, (B, H, 1, 1) for a head, (B, H, ⌈S / 128⌉, 1) for blocks, (B, H, S, 1)
    for tokens.  ``mean`` (B, H, 1, D) fp32 was subtracted.

    Of sequences of unequal length ``transposed`` is (1, H, D, slots), each sequence at its slot with zeros behind it,
    and needs rows beside it; ``descale`` is always (B, H, S, 1).
    """

    rows: Tensor | None
    descale: Tensor
    transposed: Tensor | None
    mean: Tensor | None
    length: int
    interleaved: bool

    @property
    def data(self) -> Tensor:
        """(B, H, S, D): the rows, else a view of the transposed copy, or a new one where its tokens are interleaved."""
        if self.rows is not None:
            return self.rows
        assert self.transposed is not None, "at least one of the two is there"
        ordered = self.transposed
        if self.interleaved:
            ordered = interleaved(ordered, back=True)
        return ordered[..., : self.length].mT

    def operand(self, recipe: Recipe, *, rotated: bool = False, block: int = BLOCK) -> Quantised:
        """The same as ``problem.fp8`` has it, with a block's scale at each of its ``block`` tokens; copies are made
        when read.
        """
        if recipe.granularity == "block" and self.descale.shape[2] != self.length:

            def of_tokens() -> Tensor:
                return self.descale.repeat_interleave(block, dim=2)[:, :, : self.length]

        elif self.rows is None and self.interleaved:

            def of_tokens() -> Tensor:
                return self.descale

        else:
            return Quantised(self.data, self.descale, recipe.granularity, rotated, self.mean)
        return Deferred.of(lambda: self.data, of_tokens, recipe.granularity, rotated=rotated, mean=self.mean)


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


def tiles_for(recipe: Recipe, dim: int) -> Tiles:
    """The committed tiles for tensors whose largest head dimension is ``dim``."""
    rotated = recipe.rotation == "hadamard" and recipe.granularity in ("head", "tensor")
    table = _ROTATED if rotated else TILES[recipe.granularity]
    return next((tiles for most, tiles in table.items() if dim <= most), table[256])


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
    layout = _layout(tuple(map(_outline, requests)), recipe, tiles, block)
    results, jobs = [], []
    collected = _zeros(layout.memories, requests)
    for request, memory in zip(requests, layout.memories, strict=True):
        result, job = _allocated(request, memory, recipe, collected)
        results.append(result)
        jobs.append(job)
    begins = addresses(each for job in jobs for each in job[:_MEMORY])
    with on(device):
        for launch, tiled in zip(layout.launches, layout.tiled, strict=True):
            launch((tuple(map(_with_tiles, jobs, requests, tiled)),), begins)
    return results


def _with_tiles(job: Job, request: Request, tiled: Tiled | None) -> Job:
    """The job with the table of its tiles, where lengths differ."""
    if request.unequal is None or tiled is None:
        return job
    x, lengths = request.x, one_sided(request.unequal.lengths, request.unequal.side)
    return job._replace(tiles=tile_map(lengths, x.shape[0], tiled, x.device))


def _zeros(memories: Sequence[_Memory], requests: Sequence[Request]) -> Iterator[Tensor]:
    """Memory for the magnitudes of each request whose sequences have lengths of their own, zeroed in one launch."""
    shapes = [
        memory.partial
        for memory, request in zip(memories, requests, strict=True)
        if request.unequal is not None and memory.partial is not None
    ]
    if not shapes:
        return iter(())
    sizes = [rounded_up(math.prod(shape), 4) for shape in shapes]  # each begins at a multiple of 16 bytes
    return iter(torch.split(torch.zeros(sum(sizes), dtype=torch.int32, device=requests[0].x.device), sizes))


class _Outline(NamedTuple):
    """What the layout of a request depends on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    rows: bool
    transposed: bool
    group: int
    rotate: bool
    smooth: bool
    interleaved: bool
    unequal: tuple[int, int] | None  # how many sequences, and what their slots begin at multiples of


class _Memory(NamedTuple):
    """Shapes of what is written for a request, None where nothing is, and whether what a tile reads lies far apart."""

    data: tuple[int, ...] | None
    transposed: tuple[int, ...] | None
    descale: tuple[int, ...]
    partial: tuple[int, ...] | None
    slots: int | None  # tokens of a head's slots, where sequences have lengths of their own
    far: int | None  # 1 or None, which Triton makes constants


class _Layout(NamedTuple):
    """All that calls with the same shapes share."""

    memories: tuple[_Memory, ...]
    launches: tuple[Launch, ...]
    tiled: tuple[tuple[Tiled | None, ...], ...]  # by launch, of each request


def _outline(request: Request) -> _Outline:
    x = request.x
    order = request.transposed and request.interleaved
    asked = request.rows, request.transposed, request.group, request.rotate, request.smooth
    own = request.unequal
    unequal = None if own is None else (sequences_of(own.lengths, x.shape[0]), own.slot)
    return _Outline(x.shape, x.stride(), x.dtype, *asked, order, unequal)


@lru_cache(maxsize=1024)
def _layout(outlines: tuple[_Outline, ...], recipe: Recipe, asked: Tiles | None, block: int) -> _Layout:
    for outline in outlines:
        _check(outline)
    granularity = recipe.granularity
    tiles = asked or tiles_for(recipe, max(outline.shape[3] for outline in outlines))
    if granularity == "block":
        tiles = tiles._replace(rows=block, rows_flipped=block, warps=_block_warps(outlines, recipe, block, tiles.warps))
    memories: list[_Memory] = []
    first: list[Size] = []
    second: list[Size] = []
    tables: tuple[list[Tiled | None], list[Tiled | None]] = [], []
    for outline in outlines:
        batch, heads, length, dim = outline.shape
        longest = min(length, max(tiles.rows, tiles.rows_flipped, tiles.first_rows))
        reach = (longest - 1) * outline.stride[2] + (dim - 1) * outline.stride[3]
        far = 1 if reach >= 2**31 else None
        # Programs that run together should read what lies together: heads side by side, or one after another.
        beside = outline.stride[1] < outline.stride[2]
        rows = (batch, heads, length, rounded_up(dim, 16)) if outline.rows else None
        if outline.unequal is not None:
            sequences, slot = outline.unequal
            slots = capacity(sequences, batch, length, slot) * slot
            share = {"tensor": heads, "head": outline.group}.get(granularity, 1)
            collected = (heads // share, slots // PADDING) if granularity in ("tensor", "head") else None
            turned = (1, heads, dim, slots) if outline.transposed else None
            memories.append(_Memory(rows, turned, (batch, heads, length, 1), collected, slots, far))
            written = tiles.rows_flipped if outline.transposed else tiles.rows
            for passes, found, step in ((first, tables[0], tiles.first_rows), (second, tables[1], written)):
                whole = passes is second and outline.transposed
                tiled = Tiled("q", step, (slot, slot), (length, length), whole)
                found.append(tiled)
                parts = tiled.capacity(sequences, batch)
                turns = (1, heads, parts) if beside else (0, parts, heads)
                passes.append(Size(0, heads * parts, heads, length, parts, 1, *turns, share))
            continue
        for each in tables:
            each.append(None)
        padding = rounded_up(length, PADDING)
        written = -(-padding // tiles.rows_flipped) if outline.transposed else -(-length // tiles.rows)
        share = {"tensor": batch * heads, "head": outline.group}.get(granularity, 1)
        read = -(-length // tiles.first_rows)
        chunks = -(-read // -(-read * share // _MOST_PARTIAL))
        scales = {"tensor": (1, 1, 1, 1), "head": (batch, heads, 1, 1), "token": (batch, heads, length, 1)}
        memories.append(
            _Memory(
                rows,
                (batch, heads, dim, padding) if outline.transposed else None,
                scales.get(granularity, (batch, heads, -(-length // block), 1)),
                (batch, heads, chunks) if granularity in ("tensor", "head") else None,
                None,
                far,
            )
        )
        for passes, parts, count in ((first, chunks, read), (second, written, written)):
            turns = (1, heads, parts) if beside else (0, parts, heads)
            passes.append(Size(0, batch * heads * parts, heads, length, count, chunks, *turns, share))
    dims = tuple(outline.shape[3] for outline in outlines)
    orders = tuple(outline.interleaved for outline in outlines)
    sizes, grid = _numbered(second)
    in_turns = len({size.programs for size in second}) == 1
    told = granularity, LARGEST[recipe.format], tiles.rows, tiles.rows_flipped, orders, in_turns
    launches: tuple[Launch, ...] = (Launch(cast, grid, (sizes, dims, *told), {"num_warps": tiles.warps}),)
    if granularity in ("tensor", "head"):
        sizes, grid = _numbered(first)
        magnitudes = Launch(largest_magnitudes, grid, (sizes, dims, tiles.first_rows), {"num_warps": tiles.first_warps})
        launches = (magnitudes, *launches)
    return _Layout(tuple(memories), launches, tuple(map(tuple, tables[2 - len(launches) :])))


def _block_warps(outlines: Sequence[_Outline], recipe: Recipe, block: int, otherwise: int) -> int:
    """Of a program that has a block of so many tokens."""
    widest = max(outline.shape[3] for outline in outlines)
    if recipe.rotation != "none" or widest > max(_BLOCK_WARPS) or any(each.dtype.itemsize > 2 for each in outlines):
        return max(1, otherwise * block // BLOCK)
    return next(warps for most, warps in _BLOCK_WARPS.items() if widest <= most)[block > BLOCK]


def _check(outline: _Outline) -> None:
    if len(outline.shape) != 4 or 0 in outline.shape:
        raise InputError(f"what is quantised is (B, H, S, D) and not empty, got {tuple(outline.shape)}")
    if outline.dtype not in _INPUTS:
        raise InputError(f"what is quantised is bf16, fp16 or fp32, got {outline.dtype}")
    if outline.group < 1 or outline.shape[1] % outline.group:
        raise InputError(f"{outline.shape[1]} heads are no whole number of groups of {outline.group}")
    if not (outline.rows or outline.transposed):
        raise InputError("a request is for rows, a transposed copy or both")


def _numbered(sizes: Sequence[Size]) -> tuple[tuple[Size, ...], tuple[int, int, int]]:
    """Sizes and grid of one launch for all: the programs of each tensor follow those of the one before it."""
    ends = list(accumulate((size.programs for size in sizes), initial=0))
    numbered = (size._replace(first=end).coded() for size, end in zip(sizes, ends, strict=False))
    return tuple(numbered), (ends[-1], 1, 1)


def _memory(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, padded: bool) -> Tensor:
    """New memory; zeros where it has ``padded`` rows, which no kernel writes in full."""
    return x.new_zeros(shape, dtype=dtype) if padded else x.new_empty(shape, dtype=dtype)


def _allocated(
    request: Request, memory: _Memory, recipe: Recipe, collected: Iterator[Tensor]
) -> tuple[Quantisation, Job]:
    """``collected``: memory for the magnitudes of sequences with lengths of their own."""
    x, narrow = request.x, TO_TORCH[recipe.format]
    length, dim = x.shape[2:]
    padded = request.unequal is not None and request.unequal.lengths.batch != "packed"
    data = None if memory.data is None else _memory(x, memory.data, narrow, padded)
    transposed = None if memory.transposed is None else x.new_empty(memory.transposed, dtype=narrow)
    partial = None
    if memory.partial is not None:
        partial = x.new_empty(memory.partial, dtype=torch.int32) if request.unequal is None else next(collected)
    descale = _memory(x, memory.descale, torch.float32, padded)
    mean = moved = signs = factor = None
    if request.smooth and recipe.smoothing:
        mean = x.detach().mean(dim=2, keepdim=True, dtype=torch.float32)
    if request.rotate and recipe.rotation == "hadamard":
        signs, factor = _signs(dim, x.dtype, x.device), (dim & -dim) ** -0.5 / rotation_shrink(dim)
        moved = None if mean is None else mean @ _signs(dim, mean.dtype, x.device)
    job = Job(
        x, data, transposed, descale, partial, mean, moved, signs, factor, None, memory.slots, memory.far, *x.stride()
    )
    rows = data if data is None or dim % 16 == 0 else data[..., :dim]
    order = request.transposed and request.interleaved
    return Quantisation(rows, descale, transposed, mean, length, order), job


@permanent
def _signs(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The rotation less a factor: zeros and plus or minus ``rotation_shrink``, exact in every dtype."""
    return (hadamard(dim).sign() * rotation_shrink(dim)).to(dtype).to(device)
