"""What quantising tensors that lie alike has in common: the launches, and the places of what they write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnbench.errors import InputError
from attnbench.graph_pools import permanent
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.fp8 import BLOCK, LARGEST, Recipe, hadamard, rotation_shrink
from attnbench.problem.spec import Granularity

from ...common.layout import rounded_up
from ..blocks import Block, Part, Wanted
from ..launching import KEPT, Launch
from ..tile_map import Tiled, capacity
from .jobs import Size
from .kernels import PADDING, cast, largest_magnitudes
from .stored import Form

__all__ = ["TILES", "Layout", "Outline", "Places", "Tiles", "layout_of", "signs", "tiles_for"]


class Tiles(NamedTuple):
    """Tokens and warps of a program: for rows alone, with a transposed copy, and in the first pass."""

    rows: int
    rows_flipped: int
    warps: int
    first_rows: int = 128
    first_warps: int = 8
    registers: int | None = None  # of a thread that casts


# By the head dimension up to which they serve.  Those for 64 and 128 were the fastest on an H200 of those in
# tests/gpu/tune/tune_quantise.py, within 1 %: a first pass over 256 tokens wins less.  Those for 256 were not measured:
# a thread has about as many elements as at 128.
# With half as many warps as at 128, Q, K and V of 72, 80 and 96 columns take 0.97, 0.94 and 0.95 of the time.  With the
# tiles for 192, heads of 160, of 192 and MLA's take 0.74, 0.90 and 0.98 of the time that they take with those for 256.
_SHARED = {
    64: Tiles(64, 64, 4, 64, 4),
    96: Tiles(64, 64, 4, 128, 8),
    128: Tiles(64, 64, 8, 128, 8),
    192: Tiles(64, 64, 4, 64, 8),
    256: Tiles(32, 64, 8, 64, 8),
}
# Where Q and K are rotated, every program reads the rotation's matrix: longer tiles read it less often.  Q, K and V of
# 16,384 tokens of width 2048 took 0.154, 0.169 and 0.237 ms on an H200, with the tiles above 0.159, 0.249 and 0.304.
# Of 192 and 128 (MLA), 8,192 tokens and 16 heads, on an H100 0.229 ms, with the tiles for 256 0.249.
# With 168 registers instead of 239 a multiprocessor has room for three programs: at 128 the cast took 115 us for 130.
_ROTATED = {
    64: Tiles(128, 64, 4, 128, 8),
    128: Tiles(128, 64, 4, 128, 8, 168),
    192: Tiles(128, 64, 8, 128, 8),
    256: Tiles(128, 32, 8, 128, 8),
}
TILES: dict[Granularity, dict[int, Tiles]] = {
    "tensor": _SHARED,
    "head": _SHARED,
    "block": {64: Tiles(BLOCK, BLOCK, 4), 128: Tiles(BLOCK, BLOCK, 4), 256: Tiles(BLOCK, BLOCK, 8)},
    "token": {64: Tiles(128, 64, 4), 128: Tiles(64, 64, 4), 256: Tiles(32, 32, 4)},
}
# Options for blocks of 16 bits that are not rotated, of BLOCK tokens and of more, by columns of a tile.  On an H200 K
# and V of 16,384 tokens of width 2048 take 0.059 ms for the longer blocks at 128 and 0.065 for BLOCK at 256, with twice
# as many warps 0.075 and 0.075; one tensor after the other they took 0.068 and 0.067, with half as many warps 0.086.
# With 64 registers a thread a multiprocessor has room for two programs of 16 warps, with 128 for two of 8: 0.098 ms for
# 0.128 at 96, and 0.081 for 0.101 for MLA.
_BLOCK_OPTIONS = {
    64: ({"num_warps": 4}, {"num_warps": 8}),
    128: ({"num_warps": 4}, {"num_warps": 16, "maxnreg": 64}),
    192: ({"num_warps": 4}, {"num_warps": 8, "maxnreg": 128}),
    256: ({"num_warps": 4}, {"num_warps": 8}),
}
_LEAST_REST = 32  # columns: fewer would leave threads without work
_MOST_PARTIAL = 1024  # magnitudes that a program of the second pass has to look through
_INPUTS = (torch.bfloat16, torch.float16, torch.float32)


class Outline(NamedTuple):
    """What the layout of a request depends on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    rows: bool = True
    transposed: bool = False
    group: int = 1
    rotate: bool = False
    smooth: bool = False
    interleaved: bool = False
    # How many sequences have lengths of their own, what their slots begin at multiples of, whether rows are padded.
    unequal: tuple[int, int, bool] | None = None


class Places(NamedTuple):
    """Places of what is written for a request, None where nothing is.

    ``rows`` and ``descale`` lie in the block that is kept.  ``signs`` and ``factor`` are the rotation's.  A job of
    addresses has x, then the parts, which begin at ``begins`` in their blocks, then the ``rest``.  ``stored``: how rows
    and descale are an operand; None where that takes more than reading them.
    """

    rows: Part | None
    transposed: Part | None
    descale: Part
    partial: Part | None
    signs: Tensor | None
    factor: float | None
    fixed: tuple[int | None, ...]  # a job's numbers behind its table; 1 and None become constants in Triton
    begins: tuple[int | None, int | None, int, int | None]
    rest: tuple[Any, ...]
    stored: Form | None


class Layout(NamedTuple):
    """All that calls with the same shapes share.

    ``scratch`` has the transposed copies and partial magnitudes where ``kept`` may live longer than they, else None.
    ``smooth``: means are made of some tensors.
    """

    outlines: tuple[Outline, ...]
    kept: Block
    scratch: Block | None
    places: tuple[Places, ...]
    launches: tuple[Launch, ...]
    tiled: tuple[tuple[Tiled | None, ...], ...]  # by launch, of each request
    smooth: bool

    @property
    def forms(self) -> tuple[Form | None, ...]:
        """How each is an operand that lies in ``kept``."""
        return tuple([each.stored for each in self.places])


def tiles_for(recipe: Recipe, dim: int) -> Tiles:
    """The committed tiles for tensors whose largest head dimension is ``dim``."""
    rotated = recipe.rotation == "hadamard" and recipe.granularity in ("head", "tensor")
    table = _ROTATED if rotated else TILES[recipe.granularity]
    return next((tiles for most, tiles in table.items() if dim <= most), table[256])


@lru_cache(maxsize=KEPT)
def layout_of(
    outlines: tuple[Outline, ...], recipe: Recipe, device: torch.device, asked: Tiles | None = None, block: int = BLOCK
) -> Layout:
    """The layout of tensors by one recipe; ``asked`` replaces the committed tiles.

    Raises as ``quantised_together``.
    """
    for outline in outlines:
        _check(outline)
    outlines = tuple(each._replace(smooth=each.smooth and recipe.smoothing) for each in outlines)
    granularity = recipe.granularity
    tiles = asked or tiles_for(recipe, max(outline.shape[3] for outline in outlines))
    if granularity == "block":
        tiles = tiles._replace(rows=block, rows_flipped=block)
    wanted: list[tuple[Wanted | None, ...]] = []
    slots: list[int | None] = []
    first: list[Size] = []
    second: list[Size] = []
    tables: tuple[list[Tiled | None], list[Tiled | None]] = [], []
    for outline in outlines:
        batch, heads, length, dim = outline.shape
        # Programs that run together should read what lies together: heads side by side, or one after another.
        beside = outline.stride[1] < outline.stride[2]
        if outline.unequal is not None:
            sequences, slot, _ = outline.unequal
            tokens = capacity(sequences, batch, length, slot) * slot
            share = {"tensor": heads, "head": outline.group}.get(granularity, 1)
            slots.append(tokens)
            wanted.append(
                _wanted(
                    outline,
                    recipe,
                    (1, heads, dim, tokens),
                    (batch, heads, length, 1),
                    (heads // share, tokens // PADDING),
                )
            )
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
        scale = scales.get(granularity, (batch, heads, -(-length // block), 1))
        slots.append(None)
        wanted.append(_wanted(outline, recipe, (batch, heads, dim, padding), scale, (batch, heads, chunks)))
        for passes, parts, count in ((first, chunks, read), (second, written, written)):
            turns = (1, heads, parts) if beside else (0, parts, heads)
            passes.append(Size(0, batch * heads * parts, heads, length, count, chunks, *turns, share))
    dims = tuple(outline.shape[3] for outline in outlines)
    orders = tuple(outline.interleaved for outline in outlines)
    sizes, grid = _numbered(second)
    in_turns = len({size.programs for size in second}) == 1
    rests = tuple(_rest(each, recipe) for each in outlines)
    arguments = rests, granularity, LARGEST[recipe.format], tiles.rows, tiles.rows_flipped, orders, in_turns
    options = _options(outlines, rests, recipe, block, tiles)
    launches: tuple[Launch, ...] = (Launch(cast, grid, (sizes, dims, *arguments), options),)
    if granularity in ("tensor", "head"):
        sizes, grid = _numbered(first)
        magnitudes = Launch(largest_magnitudes, grid, (sizes, dims, tiles.first_rows), {"num_warps": tiles.first_warps})
        launches = (magnitudes, *launches)
    kept, scratch, places = _placed(wanted)
    all_places = tuple(map(partial(_places, recipe, device, tiles), outlines, places, slots))
    tiled_by = tuple(map(tuple, tables[2 - len(launches) :]))
    return Layout(outlines, kept, scratch, all_places, launches, tiled_by, any(each.smooth for each in outlines))


def _wanted(
    outline: Outline, recipe: Recipe, turned: tuple[int, ...], scale: tuple[int, ...], magnitudes: tuple[int, ...]
) -> tuple[Wanted | None, ...]:
    """Rows, transposed copy, descale and partial magnitudes, of these shapes where they are written at all.

    Padded rows and their descales are zero at first, because no kernel writes them in full, and magnitudes that all
    tiles of a sequence share.
    """
    batch, heads, length, dim = outline.shape
    padded = outline.unequal is not None and outline.unequal[2]
    narrow = TO_TORCH[recipe.format]
    return (
        Wanted((batch, heads, length, rounded_up(dim, 16)), narrow, padded, dim) if outline.rows else None,
        Wanted(turned, narrow) if outline.transposed else None,
        Wanted(scale, torch.float32, padded),
        Wanted(magnitudes, torch.int32, outline.unequal is not None)
        if recipe.granularity in ("tensor", "head")
        else None,
    )


def _placed(
    wanted: Sequence[tuple[Wanted | None, ...]],
) -> tuple[Block, Block | None, list[tuple[Part | None, ...]]]:
    """The blocks of ``Layout``, and each request's parts in the order of a job."""
    if not any(rows is not None and transposed is not None for rows, transposed, *_ in wanted):
        block, count = Block([each for request in wanted for each in request]), 4
        return block, None, [block.parts[i : i + count] for i in range(0, count * len(wanted), count)]
    kept = Block([request[i] for request in wanted for i in (0, 2)])
    scratch = Block([request[i] for request in wanted for i in (1, 3)])
    places: list[tuple[Part | None, ...]] = []
    for i in range(0, 2 * len(wanted), 2):
        places.append((kept.parts[i], scratch.parts[i], kept.parts[i + 1], scratch.parts[i + 1]))
    return kept, scratch, places


def _places(
    recipe: Recipe, device: torch.device, tiles: Tiles, outline: Outline, places: tuple[Part | None, ...],
    slots: int | None,
) -> Places:  # fmt: skip
    """The places of a request, with what is constant of its job."""
    longest = min(outline.shape[2], max(tiles.rows, tiles.rows_flipped, tiles.first_rows))
    reach = (longest - 1) * outline.stride[2] + (outline.shape[3] - 1) * outline.stride[3]
    turn, factor, dim = None, None, outline.shape[3]
    if outline.rotate and recipe.rotation == "hadamard":
        turn, factor = signs(dim, outline.dtype, device), (dim & -dim) ** -0.5 / rotation_shrink(dim)
    rows, transposed, descale, magnitudes = places
    assert descale is not None, "every request has scales"
    rows_begin, transposed_begin, magnitudes_begin = (
        None if each is None else each.begin for each in (rows, transposed, magnitudes)
    )
    begins = rows_begin, transposed_begin, descale.begin, magnitudes_begin
    far = 1 if reach >= 2**31 else None
    # Triton itself finds out of an argument only whether 16 divides it: with a stride of 72 it loads number by number.
    common = gcd(*outline.stride[:3])
    eights = 1 if common % 8 == 0 and common % 16 else None
    fixed = slots, far, eights, *outline.stride
    rest = None, None, None if turn is None else turn.data_ptr(), factor, None, *fixed
    stored = None
    if rows is not None and recipe.granularity != "block" and not outline.smooth:
        stored = Form(rows, descale, recipe.granularity, turn is not None)
    return Places(rows, transposed, descale, magnitudes, turn, factor, fixed, begins, rest, stored)


def _options(
    outlines: Sequence[Outline], rests: Sequence[int], recipe: Recipe, block: int, tiles: Tiles
) -> dict[str, int]:
    """How the cast is compiled.  ``rests``: of each tensor, as ``_rest`` says; ``block``: tokens that share a scale."""
    of_16_bits = all(each.dtype.itemsize <= 2 for each in outlines)
    if recipe.granularity != "block":
        limit = {"maxnreg": tiles.registers} if tiles.registers is not None and of_16_bits else {}
        return {"num_warps": tiles.warps, **limit}
    wholes = (triton.next_power_of_2(each.shape[3]) for each in outlines)
    widest = max(whole // 2 + rest if rest else whole for whole, rest in zip(wholes, rests, strict=True))
    if recipe.rotation != "none" or widest > max(_BLOCK_OPTIONS) or not of_16_bits:
        return {"num_warps": max(1, tiles.warps * block // BLOCK)}
    return next(options for most, options in _BLOCK_OPTIONS.items() if widest <= most)[block > BLOCK]


def _rest(outline: Outline, recipe: Recipe) -> int:
    """Columns of a tile's second part, behind the largest power of two below the head dimension: 64 of 192's.

    0 where two parts would pad the head dimension as much as one does, and where the kernel needs whole rows.
    """
    dim = outline.shape[3]
    half = triton.next_power_of_2(dim) // 2
    rest = max(_LEAST_REST, triton.next_power_of_2(dim - half))
    rotated = outline.rotate and recipe.rotation == "hadamard"
    return 0 if outline.transposed or rotated or rest >= half else rest


def _check(outline: Outline) -> None:
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


@permanent
def signs(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The rotation less a factor: zeros and plus or minus ``rotation_shrink``, exact in every dtype."""
    return (hadamard(dim).sign() * rotation_shrink(dim)).to(dtype).to(device)
