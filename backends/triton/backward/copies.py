"""Copies of FP8 operands as the backward's kernels read them: rows, widened rows, and transposed ones, in one launch.

The kernels read whole tiles through TMA, without bounds: every tensor is (heads, padded length, padded head dimension)
or its transpose, contiguous, with zeros as padding.  An FP8 tensor core needs the axis that it sums over contiguous in
both operands (PTX ISA, wgmma: only 16-bit types may be transposed), so a sum over tokens in FP8 reads a transposed
copy, and one in bf16 a widened copy, which is exact.  For the Hopper kernels the tokens of a transposed copy are
interleaved (``hopper.narrow``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.layout import rounded_up
from ..blocks import Piece, tensor_of
from ..launching import KEPT, Launch, Launches
from ..tile_map import Tiled
from ..tile_rows import ROW

__all__ = [
    "PADDING",
    "TOKENS",
    "Laid",
    "Own",
    "Wanted",
    "aligned",
    "halves",
    "lay_out",
    "lay_out_together",
    "padded",
    "ready",
]

PADDING = 128  # tokens; the largest tile
TOKENS = 64  # that one program copies
_VECTOR = 16  # bytes: what TMA reads begins at multiples of it
_WIDE = 128  # of a head dimension, from which on one power of two pads too much
_SMALLEST = 32  # what an FP8 tensor core sums over at once


class Laid(NamedTuple):
    """An operand: ``data`` (B, H, S, D) e4m3; ``wide`` the same in bf16; ``transposed`` (B, H, D, S); None if not
    requested.

    S and D are padded; of sequences of unequal length (1, H, slots, D), each at its slot.  ``interleaved``: each 16
    tokens of ``transposed`` are in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15.
    """

    data: Tensor | Piece
    wide: Tensor | None
    transposed: Tensor | None
    interleaved: bool

    def further(self, narrow: bool, *, interleaved: bool) -> Tensor:
        """What a sum over tokens reads: the transposed copy for FP8, its tokens in that order, else the wide one."""
        copy = self.transposed if narrow else self.wide
        assert copy is not None
        assert self.interleaved is (narrow and interleaved)
        return copy


class Own(NamedTuple):
    """Lengths that the sequences of one side have of their own: their number, and that side's table for a program's
    tokens.
    """

    sequences: int
    tiled: Tiled
    table: Tensor


class Wanted(NamedTuple):
    """An e4m3 tensor x (B, H, S, D), the copies of ``Laid`` to make, and ``zeros``, bf16 memory to fill with zeros.

    Where sequences have their ``own`` lengths all copies consist of slots, ``zeros`` too.  ``halved``: the head
    dimension is padded as ``halves`` has it, else to a power of two.
    """

    x: Tensor | Piece
    wide: bool = False
    transposed: bool = False
    interleaved: bool = False
    zeros: Tensor | None = None
    own: Own | None = None
    halved: bool = False


class _Shapes(NamedTuple):
    """Of what is laid out for a tensor."""

    whole: tuple[int, ...]
    across: tuple[int, ...]
    there: bool  # whether x itself is its rows
    busy: bool  # whether there is anything to copy


class _Layout(NamedTuple):
    """All that calls share whose tensors lie alike; no launch where every tensor is ready."""

    shapes: tuple[_Shapes, ...]
    launch: Launch | None


def padded(size: int) -> int:
    """The head dimension that a tile has: a power of two that an FP8 tensor core can sum over."""
    return max(_SMALLEST, 1 << (size - 1).bit_length())


def halves(size: int) -> tuple[int, int]:
    """A head dimension as two powers of two where those are less than one, 192 as 128 and 64; the second may be 0."""
    rest = padded(size - _WIDE) if size > _WIDE else 0
    return (_WIDE, rest) if 0 < rest < _WIDE else (padded(size), 0)


def aligned(x: Tensor | Piece) -> bool:
    """Whether x begins where TMA may begin to read."""
    return not x.data_ptr() % _VECTOR


def ready(shape: Sequence[int], strides: Sequence[int], pitch: int) -> bool:
    """Whether a tensor (B, H, S, D), if ``aligned``, lies as the kernels read it: padded, and in one piece."""
    whole = (rounded_up(shape[2], PADDING), pitch) == tuple(shape[2:])
    return whole and _contiguous(shape, strides)


@triton.jit
def _token(place, interleaved: tl.constexpr):
    """The token that stands at a place of a transposed copy, from where whole rows are read."""
    if interleaved:
        return (place & -16) + ((place >> 2) & 3) * 2 + ((place >> 1) & 1) * 8 + (place & 1)
    return place


class _Copy(NamedTuple):
    """The memory of a copy: x, what is written in e4m3, in bf16 and transposed, and what gets zeros; or None."""

    x: Any
    data: Any
    wide: Any
    transposed: Any
    zeros: Any
    tiles: Any  # the table of sequences of unequal length, or None


class _Extent(NamedTuple):
    """The numbers of a copy, each n as 2 n + 3.

    Triton compiles anew for integers that are 1 or multiples of 16, which those never are.
    """

    first: Any  # the number of its first program
    programs: Any
    heads: Any  # of a batch entry
    blocks: Any  # of tokens, the padded length's
    length: Any


@triton.jit
def _copy_block(
    job,
    extent,
    steps,
    number,
    size: tl.constexpr,
    padded_size: tl.constexpr,
    pitch: tl.constexpr,
    tokens: tl.constexpr,
    interleaved: tl.constexpr,
):
    """Block ``number`` of a copy; ``steps`` are x's strides."""
    heads, blocks, length = (extent.heads - 3) >> 1, (extent.blocks - 3) >> 1, (extent.length - 3) >> 1
    head, padded_length = (number // blocks).to(tl.int64), blocks * tokens
    if job.tiles is None:
        row = number % blocks * tokens + tl.arange(0, tokens)
        token = _token(row, interleaved)
        place = job.x + head // heads * steps[0] + head % heads * steps[1]
    else:
        tiles = job.tiles + (1 + number % blocks) * ROW
        row = tl.load(tiles + 1) + tl.arange(0, tokens)
        token, length = _token(row, interleaved), tl.load(tiles + 3)
        place = job.x + tl.load(tiles).to(tl.int64) * steps[0] + head * steps[1]
        place += tl.load(tiles + 2).to(tl.int64) * steps[2]
    column = tl.arange(0, padded_size)
    place += token.to(tl.int64)[:, None] * steps[2] + column[None, :] * steps[3]
    tile = tl.load(place, mask=(token < length)[:, None] & (column < size)[None, :], other=0.0)
    if job.tiles is not None:
        row += tl.load(tiles + 6)
        token += tl.load(tiles + 6)
    flat = head * padded_length * pitch + token.to(tl.int64)[:, None] * pitch + column[None, :]
    inside = (column < pitch)[None, :] if pitch < padded_size else None
    if job.data is not None:
        tl.store(job.data + flat, tile, inside)
    if job.wide is not None:
        tl.store(job.wide + flat, tile.to(tl.bfloat16), inside)
    if job.transposed is not None:
        across = (head * pitch + column.to(tl.int64)[:, None]) * padded_length + row[None, :]
        tl.store(job.transposed + across, tl.trans(tile), (column < pitch)[:, None] if pitch < padded_size else None)
    if job.zeros is not None:
        tl.store(job.zeros + flat, tl.zeros([tokens, padded_size], job.zeros.dtype.element_ty), inside)


@triton.jit
def _lay_out(
    jobs,
    extents,
    steps,
    sizes: tl.constexpr,
    padded_sizes: tl.constexpr,
    pitches: tl.constexpr,
    tokens: tl.constexpr,
    interleaved: tl.constexpr,
):
    """Every copy of ``jobs``, ``tokens`` rows of a head by each program; the programs of a copy follow each other."""
    program = tl.program_id(0)
    for i in tl.static_range(len(sizes)):
        number = program - ((extents[i].first - 3) >> 1)
        there = (number >= 0) & (number < ((extents[i].programs - 3) >> 1))
        if jobs[i].tiles is not None:
            there = there & (number % ((extents[i].blocks - 3) >> 1) < tl.load(jobs[i].tiles))
        if there:
            _copy_block(
                jobs[i], extents[i], steps[i], number, sizes[i], padded_sizes[i], pitches[i], tokens, interleaved[i]
            )


_COPIES = Launches(_lay_out)


def lay_out(x: Tensor, *, wide: bool = False, transposed: bool = False, interleaved: bool = False) -> Laid:
    """One tensor; see ``lay_out_together``."""
    return lay_out_together((Wanted(x, wide, transposed, interleaved),))[0]


def lay_out_together(wanted: Sequence[Wanted]) -> list[Laid]:
    """Tensors as the backward's kernels read them, in one launch at most; no copy of what already lies so."""
    outlines = tuple(
        [
            (
                x.shape,
                x.stride(),
                x.dtype,
                aligned(x),
                *asked,
                None if zeros is None else zeros.dtype,
                None if own is None else own[:2],
                halved,
            )
            for x, *asked, zeros, own, halved in wanted
        ]
    )
    shapes, launch = _layout(outlines)
    found, jobs = [], []
    for (x, wide, transposed, interleaved, zeros, own, _), (whole, across, there, busy) in zip(
        wanted, shapes, strict=True
    ):
        data = None if there else torch.empty(whole, dtype=x.dtype, device=x.device)
        widened = torch.empty(whole, dtype=torch.bfloat16, device=x.device) if wide else None
        turned = torch.empty(across, dtype=x.dtype, device=x.device) if transposed else None
        found.append(Laid(x if data is None else data, widened, turned, interleaved))
        if busy:
            jobs.append(_Copy(x, data, widened, turned, zeros, None if own is None else own.table))
    if launch is not None:
        places = tuple([tuple([None if each is None else each.data_ptr() for each in job]) for job in jobs])
        begins = reduce(or_, [place or 0 for job in places for place in job])
        if not launch.again(wanted[0].x.device.index, begins, (places,)):
            launch((tuple(_Copy(*map(tensor_of, job)) for job in jobs),), begins)
    return found


@lru_cache(maxsize=KEPT)
def _layout(outlines: tuple[tuple[Any, ...], ...]) -> _Layout:
    """``outlines``: shape, strides, dtype, whether it is aligned, and what is wanted, by tensor."""
    shapes: list[_Shapes] = []
    extents: list[_Extent] = []
    steps, sizes, padded_sizes, pitches, orders, programs = [], [], [], [], [], 0
    for shape, strides, _, readable, wide, transposed, interleaved, zeroed, own, halved in outlines:
        batch, heads, length, size = shape
        whole, long = sum(halves(size)) if halved else padded(size), rounded_up(length, PADDING)
        if own is not None:
            sequences, tiled = own
            long, batch = tiled.capacity(sequences, batch) * TOKENS, 1
        there = own is None and readable and ready(shape, strides, whole)
        busy = not there or wide or transposed or zeroed is not None
        shapes.append(_Shapes((batch, heads, long, whole), (batch, heads, whole, long), there, busy))
        if busy:
            blocks = long // TOKENS
            numbers = programs, batch * heads * blocks, heads, blocks, length
            extents.append(_Extent(*(2 * number + 3 for number in numbers)))
            programs += numbers[1]
            steps.append(strides)
            sizes.append(size)
            padded_sizes.append(padded(size))
            pitches.append(whole)
            orders.append(transposed and interleaved)
    if not sizes:
        return _Layout(tuple(shapes), None)
    memory = tuple(each[2:] for each, shape in zip(outlines, shapes, strict=True) if shape.busy)
    constants = (
        tuple(extents), tuple(steps), tuple(sizes), tuple(padded_sizes), tuple(pitches), TOKENS, tuple(orders)
    )  # fmt: skip
    return _Layout(tuple(shapes), _COPIES((programs, 1, 1), constants, memory))


def _contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor, none of whose sizes is 0, lies in one piece, as torch says it."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
