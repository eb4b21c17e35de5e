"""Copies of FP8 operands as the backward's kernels read them: rows, widened rows, and transposed ones, in one launch.

The kernels read whole tiles through TMA, without bounds: every tensor is (heads, padded length, padded head dimension)
or its transpose, contiguous, with zeros as padding.  An FP8 tensor core needs the axis that it sums over contiguous in
both operands (PTX ISA, wgmma: only 16-bit types may be transposed), so a sum over tokens in FP8 reads a transposed
copy, and one in bf16 a widened copy, which is exact.  For the Hopper kernels the tokens of a transposed copy are
interleaved (``hopper.narrow``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.layout import rounded_up
from ..arithmetic import to_bf16
from ..blocks import Piece, Wanted, tensor_of
from ..launching import Launch, Launches
from ..tile_map import Tiled
from ..tile_rows import ROW

__all__ = [
    "PADDING",
    "TOKENS",
    "Copies",
    "Laid",
    "Source",
    "aligned",
    "contiguous",
    "copies_of",
    "halves",
    "lay_out",
    "padded",
    "ready",
]

PADDING = 128  # tokens; the largest tile
TOKENS = 64  # that one program copies
_VECTOR = 16  # bytes: what TMA reads begins at multiples of it
_WIDE = 128  # of a head dimension, from which on one power of two pads too much
_SMALLEST = 32  # what an FP8 tensor core sums over at once


class Laid(NamedTuple):
    """An operand: ``data`` (B, H, S, D) e4m3; ``wide`` the same in bf16, perhaps ``Source.scaled``; ``transposed``
    (B, H, D, S); None if not requested.

    S and D are padded; of sequences of unequal length (1, H, slots, D), each at its slot, unless ``data`` is the tensor
    itself.  ``interleaved``: each 16 tokens of ``transposed`` are in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15.
    """

    data: Tensor | Piece
    wide: Tensor | Piece | None
    transposed: Piece | None
    interleaved: bool

    def further(self, narrow: bool, *, interleaved: bool) -> Tensor | Piece:
        """What a sum over tokens reads: the transposed copy for FP8, its tokens in that order, else the wide one."""
        copy = self.transposed if narrow else self.wide
        assert copy is not None
        assert self.interleaved is (narrow and interleaved)
        return copy


class Source(NamedTuple):
    """An e4m3 tensor x (B, H, S, D) that lies so, and the copies of ``Laid`` to make of it.

    ``aligned``: whether TMA may begin to read where it begins.  ``zeroed``: bf16 memory of its copy's shape is filled
    with zeros beside.  Where ``sequences`` have lengths of their own, by the tiles of the pair, all copies consist of
    slots.  ``pitch``: the padded head dimension.  ``in_place``: a kernel reads it as it is.  ``scaled``: the wide copy
    is multiplied by the descale, which has these strides (batch, head, token) and is one for a sequence and head.
    """

    shape: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype
    aligned: bool
    pitch: int
    wide: bool = False
    transposed: bool = False
    interleaved: bool = False
    zeroed: bool = False
    sequences: tuple[int, Tiled] | None = None
    in_place: bool = False
    scaled: tuple[int, int, int] | None = None


class Copies(NamedTuple):
    """What calls share whose tensors lie alike.

    ``wanted``: memory for the data, the wide and the transposed copy of each in turn, None where there is none.
    ``busy``: whether there is anything to do for it.  No launch where every tensor is ready.
    """

    sources: tuple[Source, ...]
    wanted: tuple[Wanted | None, ...]
    busy: tuple[bool, ...]
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
    return whole and contiguous(shape, strides)


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
    scale: Any  # what the wide copy is multiplied by, or None


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
    """Block ``number`` of a copy; ``steps`` are x's strides, and those of its scale."""
    heads, blocks, length = (extent.heads - 3) >> 1, (extent.blocks - 3) >> 1, (extent.length - 3) >> 1
    head, padded_length = (number // blocks).to(tl.int64), blocks * tokens
    if job.tiles is None:
        row = number % blocks * tokens + tl.arange(0, tokens)
        token = _token(row, interleaved)
        batch, own, begin = head // heads, head % heads, 0
    else:
        tiles = job.tiles + (1 + number % blocks) * ROW
        row = tl.load(tiles + 1) + tl.arange(0, tokens)
        token, length = _token(row, interleaved), tl.load(tiles + 3)
        batch, own, begin = tl.load(tiles).to(tl.int64), head, tl.load(tiles + 2).to(tl.int64)
    column = tl.arange(0, padded_size)
    place = job.x + batch * steps[0] + own * steps[1] + begin * steps[2]
    place += token.to(tl.int64)[:, None] * steps[2] + column[None, :] * steps[3]
    if job.scale is not None:  # before the tile, so that a program waits once; the last sequence may have no token
        scale = tl.load(job.scale + batch * steps[4] + own * steps[5] + begin * steps[6], mask=length > 0, other=1.0)
    tile = tl.load(place, mask=(token < length)[:, None] & (column < size)[None, :], other=0.0)
    if job.tiles is not None:
        row += tl.load(tiles + 6)
        token += tl.load(tiles + 6)
    flat = head * padded_length * pitch + token.to(tl.int64)[:, None] * pitch + column[None, :]
    inside = (column < pitch)[None, :] if pitch < padded_size else None
    if job.data is not None:
        tl.store(job.data + flat, tile, inside)
    if job.wide is not None:
        wide = tile.to(tl.bfloat16) if job.scale is None else to_bf16(tile.to(tl.float32) * scale)
        tl.store(job.wide + flat, wide, inside)
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


def copies_of(sources: Sequence[Source]) -> Copies:
    """The copies of tensors as the backward's kernels read them, in one launch; none of what already lies so."""
    wanted: list[Wanted | None] = []
    busy: list[bool] = []
    extents: list[_Extent] = []
    steps, sizes, padded_sizes, pitches, orders, programs = [], [], [], [], [], 0
    for source in sources:
        batch, heads, length, size = source.shape
        whole, long = source.pitch, rounded_up(length, PADDING)
        if source.sequences is not None:
            sequences, tiled = source.sequences
            long, batch = tiled.capacity(sequences, batch) * TOKENS, 1
        there = source.in_place or (
            source.sequences is None and source.aligned and ready(source.shape, source.strides, whole)
        )
        rows = batch, heads, long, whole
        wanted += (
            None if there else Wanted(rows, source.dtype),
            Wanted(rows, torch.bfloat16) if source.wide else None,
            Wanted((batch, heads, whole, long), source.dtype) if source.transposed else None,
        )
        busy.append(not there or source.wide or source.transposed or source.zeroed)
        if busy[-1]:
            blocks = long // TOKENS
            numbers = programs, batch * heads * blocks, heads, blocks, length
            extents.append(_Extent(*(2 * number + 3 for number in numbers)))
            programs += numbers[1]
            steps.append((*source.strides, *(source.scaled or ())))
            sizes.append(size)
            padded_sizes.append(padded(size))
            pitches.append(whole)
            orders.append(source.transposed and source.interleaved)
    sources = tuple(sources)
    if not sizes:
        return Copies(sources, tuple(wanted), tuple(busy), None)
    memory = tuple(source[2:] for source, at_work in zip(sources, busy, strict=True) if at_work)
    constants = (
        tuple(extents), tuple(steps), tuple(sizes), tuple(padded_sizes), tuple(pitches), TOKENS, tuple(orders)
    )  # fmt: skip
    return Copies(sources, tuple(wanted), tuple(busy), _COPIES((programs, 1, 1), constants, memory))


def lay_out(
    copies: Copies, tensors: Sequence[Tensor | Piece], places: Sequence[Piece | None],
    zeros: Sequence[Tensor | Piece | None], tables: Sequence[Tensor | None], scales: Sequence[Tensor | Piece | None],
    device: torch.device,
) -> list[Laid]:  # fmt: skip
    """Copies of ``tensors`` at the ``places`` that were wanted; ``zeros``, tables of lengths, scales by tensor."""
    found, jobs = [], []
    for i, source in enumerate(copies.sources):
        x, (data, wide, transposed) = tensors[i], places[3 * i : 3 * i + 3]
        found.append(Laid(x if data is None else data, wide, transposed, source.interleaved))
        if copies.busy[i]:
            scale = None if source.scaled is None else scales[i]
            jobs.append((x, data, wide, transposed, zeros[i], tables[i], scale))
    if copies.launch is not None:
        addresses, begins = [], 0
        for job in jobs:
            found_at = [x.address if type(x) is Piece else None if x is None else x.data_ptr() for x in job]
            addresses.append(tuple(found_at))
            for place in found_at:
                begins |= place or 0
        if not copies.launch.again(device.index, begins, (tuple(addresses),)):
            copies.launch((tuple(_Copy(*map(tensor_of, job)) for job in jobs),), begins)
    return found


def contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor, none of whose sizes is 0, lies in one piece, as torch says it."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
