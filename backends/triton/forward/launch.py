"""From e4m3 operands to a launch of the forward kernel: matrices, factors, bounds, the order of programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnbench.kernels.contract import Result, gradient_dtype
from attnbench.problem.lengths import Lengths
from attnbench.problem.spec import AttentionSpec

from ...common.layout import rounded_up
from ..descales import in_fp32, steps
from ..descriptors import Described, all_of
from ..launching import KEPT, Launch, on
from ..quantise.interleaving import interleaved
from ..tile_map import Tiled, sequences_of, tile_map
from .extent import Extent
from .hopper import launch as hopper
from .kernel import triton_fp8_attention_forward
from .matrices import Matrix, Outline, loadable, matrix, read_size
from .tiles import Tile, chunks_of, default_tile, padded_size

__all__ = [
    "Given",
    "Layout",
    "Native",
    "Operand",
    "attend",
    "casts",
    "laid_out",
    "laid_out_by_block",
    "layout_of",
    "retiled",
    "transposed",
]

PADDING = 128  # keys of a transposed copy come in multiples of this
_LEAST = 2.0**-85  # of V's descales: 2^8 over it, summed over 2^30 keys, stays within FP32
_L2 = 32 * 2**20  # bytes of K and V that programs which run together may share; an H200 has 50 MiB, not all for them


class Operand(NamedTuple):
    """A tensor (B, H, S, D), e4m3 or for Q and K 16 bits, or V's transposed copy (B, Hkv, Dv, keys), and its fp32
    descale.

    The descale broadcasts to (B, H, S, 1), S being 1 if tokens share it.  Where sequences have lengths of their own it
    has each token's place, and ``by_sequence`` says that the tokens of a sequence share it.
    """

    data: Tensor
    descale: Tensor
    by_sequence: bool = False


class Factors(NamedTuple):
    """Where descales (B, H, S or 1, 1), contiguous along S, lie: the strides of batch and head."""

    by_batch: int
    by_head: int
    per_token: bool


class Layout(NamedTuple):
    """What calls share whose operands lie alike: the tile that serves, how what it loads is described, the launch.

    ``shape``: of the log-sum-exp.  ``tiled``: the table that the kernel reads where sequences have lengths of their
    own.
    """

    spec: AttentionSpec
    tile: Tile
    described: tuple[Described, ...] | None
    launch: Launch
    shape: tuple[int, int, int]
    tiled: Tiled | None


class Given(NamedTuple):
    """The tensors that the kernel reads.

    ``q`` and ``k`` (B, H, S, D) and ``v`` (B, Hkv, Dv, keys) are e4m3, Q and K perhaps of 16 bits.  ``descales`` are
    Q's, K's and V's in fp32; if tokens have their own, V's are log2 of them, and ``inverses`` one over them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    descales: tuple[Tensor, Tensor, Tensor]
    inverses: Tensor


class Native:
    """All arguments of the kernel but its outputs.

    ``begins``: the addresses of Q, K, V, the three descales and the inverses; ``make`` gives the tensors, asked once.
    ``tiles``: where the queries of each program are, if sequences have lengths of their own; V's keys then lie in
    slots.  ``padded``: there are rows of no sequence.
    """

    def __init__(
        self, layout: Layout, device: torch.device, begins: tuple[int, ...], make: Callable[[], Given],
        lengths: Lengths | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.device, self.begins, self._make = layout, device, begins, make
        self.tiles, self.padded = None, False
        if lengths is not None:
            self.padded = lengths.batch != "packed"
            if layout.tiled is not None:
                self.tiles = tile_map(lengths, layout.shape[0], layout.tiled, device)

    @cached_property
    def given(self) -> Given:
        """The tensors."""
        return self._make()

    @property
    def q(self) -> Tensor:
        """(B, H, Sq, D)."""
        return self.given.q

    @property
    def k(self) -> Tensor:
        """(B, Hkv, Skv, D)."""
        return self.given.k

    @property
    def tile(self) -> Tile:
        """That of the kernel that runs."""
        return self.layout.tile


def laid_out(
    spec: AttentionSpec, tile: Tile, q: Operand, k: Operand, v: Operand, lengths: Lengths | None = None
) -> Native:
    """The input of ``attend``.  Q and K are copied only if TMA could not load their rows.

    ``v.data`` is contiguous, its keys a multiple of 128 with zeros as padding, in the order of the tile.  With
    ``lengths`` it has slots of the tile's ``block_n`` keys.  Raises InputError if descales do not fit their tensors.
    """
    per_token = any(each.descale.shape[2] > 1 and not each.by_sequence for each in (q, k, v))
    by_query, by_key, by_value = (_in_rows(each.descale) for each in (q, k, v))
    inverses = by_value
    if by_value.shape[2] > 1 and not v.by_sequence:
        descales = by_value.contiguous().clamp_min(_LEAST)
        by_value, inverses = descales.log2(), descales.reciprocal()
    size = read_size(_served(spec, tile, per_token, hopper.runs_on(v.data.device)), spec.head_dim)
    operands = loadable(q.data, size), loadable(k.data, size), v.data
    shared = q.by_sequence, k.by_sequence, v.by_sequence
    return _native(spec, tile, operands, (by_query, by_key, by_value), inverses, lengths=lengths, shared=shared)


def casts(spec: AttentionSpec, tile: Tile, device: torch.device) -> bool:
    """Whether the kernel that would run casts Q itself and takes scales of K and V by its own blocks of keys."""
    return tile.hopper and hopper.runs_on(device) and hopper.serves(spec, per_token=False)


def laid_out_by_block(
    spec: AttentionSpec, tile: Tile, q: Tensor, k: Operand, v: Operand, lengths: Lengths | None = None
) -> Native:
    """The input of ``attend`` if it ``casts``: Q in 16 bits; descales of K and V are (B, Hkv, blocks of keys, 1).

    With ``lengths`` they are (B, Hkv, S, 1), each token having its block's.
    """
    operands = loadable(q, spec.head_dim), loadable(k.data, read_size(tile, spec.head_dim)), v.data
    descales = k.descale, k.descale, v.descale
    return _native(spec, tile, operands, descales, v.descale, casting=True, lengths=lengths)


def retiled(native: Native, tile: Tile) -> Native:
    """The same with another tile; V's keys are reordered if that tile needs another order."""
    spec, (q, k, values, descales, inverses) = native.layout.spec, native.given
    if tile.interleaved != native.tile.interleaved:
        values = interleaved(values, back=native.tile.interleaved)
    tile = _served(spec, tile, any(each.shape[2] > 1 for each in descales), hopper.runs_on(values.device))
    size = read_size(tile, spec.head_dim)
    return _native(spec, tile, (loadable(q, size), loadable(k, size), values), descales, inverses)


def transposed(x: Tensor) -> Tensor:
    """V (B, H, S, D) in e4m3 as (B, H, D, S rounded up to 128) with zeros behind; the same bits."""
    missing = rounded_up(x.shape[2], PADDING) - x.shape[2]
    return F.pad(x.view(torch.uint8).mT, (0, missing)).contiguous().view(x.dtype)


def attend(native: Native) -> Result:
    """(out, lse): out (B, H, Sq, Dv) in the gradients' dtype, lse (B, H, Sq) fp32, on the current stream."""
    (spec, tile, described, launch, shape, _), device, tiles = native.layout, native.device, native.tiles
    out = torch.empty((*shape, spec.head_dim_v), dtype=gradient_dtype(spec), device=device)
    lse = torch.empty(shape, dtype=torch.float32, device=device)
    if native.padded:  # of which the kernel writes the sequences alone
        out.zero_()
        lse.fill_(-torch.inf)
    q, k, v, *factors = native.begins
    if tile.hopper:
        factors.pop()
    written = out.data_ptr(), lse.data_ptr()
    addresses = (q, k, v, *written, *factors, None if tiles is None else tiles.data_ptr())
    together = reduce(or_, native.begins, written[0] | written[1])
    with on(device):
        if not launch.again(device.index, together, addresses):
            *operands, descales, inverses = native.given
            pointers = operands if described is None else all_of(described, operands)
            more = descales if tile.hopper else (*descales, inverses)
            launch((*pointers, out, lse, *more, tiles), together)
    return Result(out, lse)


def _native(
    spec: AttentionSpec,
    tile: Tile,
    operands: tuple[Tensor, Tensor, Tensor],
    descales: tuple[Tensor, Tensor, Tensor],
    inverses: Tensor,
    casting: bool = False,
    lengths: Lengths | None = None,
    shared: tuple[bool, bool, bool] = (False, False, False),
) -> Native:
    q, k, v = operands
    outlines = [(x.shape, x.stride()) for x in (q, k, *descales)]
    sequences = None if lengths is None else sequences_of(lengths, q.shape[0])
    layout = layout_of(
        spec, tile, v.shape, q.dtype, v.device, hopper.runs_on(v.device), casting, sequences, shared, *outlines
    )
    begins = tuple([x.data_ptr() for x in (*operands, *descales, inverses)])
    given = Given(*operands, descales, inverses)
    return Native(layout, v.device, begins, lambda: given, lengths)


@lru_cache(maxsize=KEPT)
def layout_of(
    spec: AttentionSpec,
    tile: Tile,
    values: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    here: bool,
    casting: bool,
    sequences: int | None,
    shared: tuple[bool, ...],
    q: Outline,
    k: Outline,
    *descales: Outline,
) -> Layout:
    """The layout of loadable Q and K in ``dtype``; ``here``: on a GPU that runs the Hopper kernel.

    ``casting``: the kernel casts Q, which has no descales, and those of K and V are of blocks.  ``sequences``: how many
    have lengths of their own, None where all are alike; ``shared``: Q's, K's and V's descales are one a sequence.
    """
    heads = spec.heads, spec.kv_heads, spec.kv_heads
    batch, lengths = q[0][0], (q[0][2], k[0][2], k[0][2])
    if casting:
        heads = spec.kv_heads, spec.kv_heads, spec.kv_heads
        lengths = (descales[0][0][2],) * 3
    found = [steps(*each, batch, *sizes) for each, *sizes in zip(descales, heads, lengths, strict=True)]
    factors = tuple(
        Factors(by_batch, by_head, by_token > 0 and not alike)
        for (by_batch, by_head, by_token), alike in zip(found, shared, strict=True)
    )
    slot = max(tile.block_n, PADDING)  # of the tile that V was laid out for, whichever serves
    if not casting:
        tile = _served(spec, tile, any(each.per_token for each in factors), here)
    size, itemsize = read_size(tile, spec.head_dim), dtype.itemsize
    by_query = matrix(*q, spec.head_dim if casting else size, itemsize)
    by_key = matrix(*k, size, 1 if casting else itemsize)
    assert by_query is not None
    assert by_key is not None
    matrices = by_query, by_key
    rows = values[0] * values[1] * values[2], values[3]
    described = _described(spec, tile, *matrices, rows)
    extent, shape = Extent(batch, q[0][2], k[0][2], sequences), (batch, spec.heads, q[0][2])
    tiled = None
    if sequences is not None:
        block_m = hopper.BLOCK_M if tile.hopper else tile.block_m
        tiled = Tiled("q", block_m, (PADDING, slot), (extent.seqlen_q, extent.seqlen_kv))
    if tile.hopper:
        places = tuple(each[3:] for each in matrices)
        programs = spec.heads if sequences is not None else spec.batch * spec.heads
        launch = hopper.launch(spec, tile, places, factors, _section(spec, programs), extent, device)
        return Layout(spec, tile, described, launch, shape, tiled)
    shapes = tuple((*each[3:], each.stride, each.rows, each.columns) for each in matrices)
    return Layout(spec, tile, described, _launch(spec, tile, (*shapes, rows), factors, extent), shape, tiled)


def _described(
    spec: AttentionSpec, tile: Tile, q: Matrix, k: Matrix, v: tuple[int, int]
) -> tuple[Described, ...] | None:
    """How Q, K and V are loaded, by blocks of a warpgroup's or a program's queries, and of keys; None by pointers."""
    if not tile.tma:
        return None
    if tile.hopper:
        kind, by_query = hopper.described, hopper.ROWS
        width, width_v = chunks_of(spec.head_dim).width, chunks_of(spec.head_dim_v).width
    else:
        kind, by_query = partial(Described, TensorDescriptor.from_tensor), tile.block_m
        width, width_v = padded_size(spec.head_dim), padded_size(spec.head_dim_v) // tile.parts
    return (
        kind(q[:2], (by_query, width), (q.stride, 1)),
        kind(k[:2], (tile.block_n, width), (k.stride, 1)),
        kind(v, (width_v, tile.block_n)),
    )


def _launch(
    spec: AttentionSpec, tile: Tile, shapes: tuple[Any, ...], factors: tuple[Factors, ...], extent: Extent
) -> Launch:
    """The kernel on matrices of these places and shapes, and these factors."""
    mask, unequal = spec.mask, extent.sequences is not None
    offset = 0 if unequal else mask.offset(spec.seqlen_q, spec.seqlen_kv)
    programs = spec.heads if unequal else spec.batch * spec.heads
    size, size_v = padded_size(spec.head_dim), padded_size(spec.head_dim_v)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.registers is not None:
        options["maxnreg"] = tile.registers
    constants = (
        spec.scale, spec.softcap or 1.0, *shapes[0], *shapes[1], *shapes[2],
        *(step for each in factors for step in each[:2]),
        extent.seqlen_q, extent.seqlen_kv, spec.head_dim_v, spec.heads, spec.group, programs, _section(spec, programs),
        0 if mask.left is None else offset - mask.left, 0 if mask.right is None else offset + mask.right,
        tile.block_m, tile.block_n, size, size_v, tile.stages, tile.tma,
        mask.left is not None, mask.right is not None, unequal or spec.seqlen_kv % tile.block_n != 0,
        spec.head_dim_v == size_v, spec.head_dim_v % 16 == 8, spec.softcap > 0, spec.scale < 0,
        *(each.per_token for each in factors),
        tile.promotion, tile.parts, tile.interleaved, unequal and mask.alignment == "bottom-right",
    )  # fmt: skip
    grid = spec.heads * extent.tiles(tile.block_m), 1, 1
    return Launch(triton_fp8_attention_forward, grid, constants, options)


def _served(spec: AttentionSpec, tile: Tile, per_token: bool, here: bool) -> Tile:
    """The tile, or another for keys in the same order where it is the Hopper kernel's and that does not serve."""
    if not tile.hopper or (here and hopper.serves(spec, per_token=per_token)):
        return tile
    return default_tile(spec, per_key=per_token)._replace(interleaved=tile.interleaved)


def _section(spec: AttentionSpec, programs: int) -> int:
    """How many of these heads take turns.

    Without a right side every block of queries costs the same, and a head's blocks run together.  With one the longest
    blocks of many heads start first, as many heads as fit their K and V into L2.
    """
    if spec.mask.right is None:
        return 1
    fitting = _L2 // (spec.seqlen_kv * (spec.head_dim + spec.head_dim_v))
    return min(programs, max(1, fitting) * spec.group)


def _in_rows(descale: Tensor) -> Tensor:
    """In fp32, and contiguous along the tokens where these have their own."""
    data = in_fp32(descale)
    return data if data.shape[2] == 1 or data.stride(2) == 1 else data.contiguous()
