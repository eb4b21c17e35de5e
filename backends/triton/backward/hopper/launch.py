"""From prepared operands to launches of the backward's Hopper kernels.  Imports no Gluon before ``serves`` is asked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Literal

import torch
from torch import Tensor

from attnbench.problem.spec import AttentionSpec

from ...blocks import Piece
from ...descriptors import Described, Shape, flipped, rows_of
from ...forward.hopper import launch as forward
from ...forward.hopper.launch import described, registers
from ...launching import KEPT as MOST
from ...launching import Launch, Launches
from ..copies import halves, padded
from ..layout import BLOCK, PEAK, VECTORS
from ..operands import Layout, Prepared
from ..tiles import Ring

__all__ = [
    "KEPT",
    "MOST_SUMMED",
    "adds",
    "pieces_of",
    "run_all",
    "run_keys",
    "run_queries",
    "run_values",
    "serves",
]

KEPT = 128  # keys (or queries) that a program keeps: 64 for each of two warpgroups
# Keys of the fused kernel, which rounds dQ's sums to bf16 at the addition of every 128.  Its error is as random steps
# are, the root of how many there were: on an H200 dQ was off by 0.0138 (relative L2, no mask) after the 128 additions
# of 16,384 keys, so that 32,768 leave 0.02, where FP8 itself costs 0.058.
MOST_SUMMED = 32768
_ROWS = 64
_PART = 64  # columns of an e4m3 sum at a time, and so rows of a rotation's matrix
_SIZES = (64, 128)  # padded head dimensions
_NARROW, _WIDE = (64, 32), (128, 64)  # pieces of heads of 96 and of 192


def serves(spec: AttentionSpec, *, per_token: bool, rotated: bool) -> bool:
    """Whether the Hopper kernels support this: scales of tokens (``per_token``) and a soft cap take registers, and the
    gradient of several query heads is divided by the spec's scale.
    """
    wide = halves(spec.head_dim) == _WIDE and not rotated
    fits = wide or padded(spec.head_dim) in _SIZES
    takes_v = padded(spec.head_dim_v) in _SIZES or (wide and halves(spec.head_dim_v) == _WIDE)
    return fits and takes_v and spec.softcap == 0 and spec.scale > 0 and forward.serves(spec, per_token=per_token)


def pieces_of(spec: AttentionSpec, *, rotated: bool) -> tuple[int, int] | None:
    """The columns of the pieces in which the kernel of all gradients takes Q, K and V alike, not padded to 128 or 256.

    None where it does not, as a rotation mixes the columns of both.  MLA's Q and K are in pieces, and its V is not.
    """
    sizes = spec.head_dim, spec.head_dim_v
    if rotated:
        return None
    if all(_NARROW[0] < size <= sum(_NARROW) for size in sizes):
        return _NARROW
    return _WIDE if all(halves(size) == _WIDE for size in sizes) else None


@cache
def adds() -> bool:
    """Whether this Triton lets Gluon's functions add to memory by TMA, which its language does not name yet."""
    try:
        from triton._C.libtriton import gluon_ir, ir
        from triton.experimental.gluon.language import _core
    except ImportError:
        return False
    needed = (gluon_ir.GluonOpBuilder, "create_async_tma_reduce"), (ir, "DESCRIPTOR_REDUCE_KIND"), (_core, "builtin")
    return all(hasattr(place, name) for place, name in needed)


def run_keys(given: Prepared, ring: Ring, narrow: bool, dk_out: Tensor, dv_out: Tensor) -> None:
    """Writes dK (B, Hkv, Skv, D) and dV (B, Hkv, Skv, Dv), contiguous, on the current stream."""
    do, rows = given.gradient.laid, given.gradient.rows
    tiles, start = _keys(given.layout, ring, narrow, dk_out.dtype)
    tiled = (
        given.q.data, do.data, given.k.data, given.v.data,
        given.q.further(narrow, interleaved=True), do.further(narrow, interleaved=True), rows, _turn(given),
    )  # fmt: skip
    memory = rows, *_descales(given, narrow), given.k_scale, given.v_scale, dk_out, dv_out
    start.on(rows.device, (*tiled, *memory), tiles)


@lru_cache(maxsize=MOST)
def _keys(layout: Layout, ring: Ring, narrow: bool, dtype: torch.dtype) -> tuple[tuple[Described, ...], Launch]:
    """What of the launch does not depend on memory."""
    spec, tokens = layout.spec, ring.block
    tiles = (
        _tiles(layout.q, tokens), _tiles(layout.do, tokens), _tiles(layout.k, _ROWS), _tiles(layout.v, _ROWS),
        _further(layout.q, tokens, narrow), _further(layout.do, tokens, narrow),
        _pieces(layout, tokens), _turning(layout, narrow),
    )  # fmt: skip
    constants = (
        *layout.k_steps[:2], *layout.v_steps[:2],
        spec.kv_heads, spec.seqlen_q, spec.seqlen_kv, layout.padded_q, layout.padded_kv, layout.plane,
        spec.head_dim, spec.head_dim_v, layout.scale, layout.exponent, layout.before, layout.after,
        spec.group, ring.stages, *layout.edges, *_ends(layout, narrow),
    )  # fmt: skip
    # The descriptors' tiles are no constants of the call.
    alike = dtype, ring.block, layout.head_dim, layout.head_dim_v
    grid = -(-spec.seqlen_kv // KEPT), spec.batch * spec.kv_heads, 1
    return tiles, _launches("keys", narrow)(grid, constants, alike, **_options())


def run_all(given: Prepared, dq_sums: Tensor | Piece, dk_out: Tensor, dv_out: Tensor) -> None:
    """Adds to dQ's sums, in bf16, and writes each share's dK and dV, on the current stream.

    dV is not written if it is ``Layout.values_apart``.
    """
    do, rows = given.gradient.laid, given.gradient.rows
    if given.layout.rest:
        tiles, start = _in_pieces(given.layout, dk_out.dtype, dk_out.shape[1] // given.layout.spec.kv_heads)
        wide, do_wide = (each.further(False, interleaved=False) for each in (given.q, do))
        pairs = given.q.data, do.data, given.k.data, given.v.data, wide, do_wide
        tiled = *[each for each in pairs for _piece in range(2)], rows, dq_sums, dq_sums
        memory = rows, given.gradient.descale, given.k_scale, dk_out, dv_out, given.tiles("kv", KEPT)
        start.on(rows.device, (*tiled, *memory), tiles)
        return
    tiles, start = _all(given.layout, dk_out.dtype, dk_out.shape[1] // given.layout.spec.kv_heads)
    tiled = (
        given.q.data, do.data, given.k.data, given.v.data,
        given.q.further(False, interleaved=False), do.further(False, interleaved=False), rows, _turn(given), dq_sums,
    )  # fmt: skip
    memory = rows, given.gradient.descale, given.k_scale, dk_out, dv_out, given.tiles("kv", KEPT)
    start.on(rows.device, (*tiled, *memory), tiles)


@lru_cache(maxsize=MOST)
def _all(layout: Layout, dtype: torch.dtype, shares: int) -> tuple[tuple[Described, ...], Launch]:
    """What of the launch does not depend on memory."""
    spec = layout.spec
    # The sums of heads of 64 leave registers for twice the queries at a time.
    queries = 2 * _ROWS if layout.pitch == layout.head_dim_v == _ROWS else _ROWS
    tiles = (
        _tiles(layout.q, queries), _tiles(layout.do, queries), _tiles(layout.k, _ROWS), _tiles(layout.v, _ROWS),
        _tiles(layout.q, queries), _tiles(layout.do, queries),
        _pieces(layout, queries), _turning(layout, narrow=False), _halves(layout.sums, queries),
    )  # fmt: skip
    extent = layout.extent
    unequal = extent.sequences is not None
    constants = (
        *layout.k_steps[:2],
        spec.kv_heads, extent.seqlen_q, extent.seqlen_kv, layout.padded_q, layout.padded_kv, layout.plane,
        spec.head_dim, spec.head_dim_v, layout.exponent, layout.before, layout.after, spec.group, shares,
        *layout.edges, unequal or spec.seqlen_kv % KEPT != 0, *_ends(layout, narrow=False), layout.aligned,
        layout.keys_in_place, unequal and layout.summed_in_place, layout.scaled_up,
    )  # fmt: skip
    alike = dtype, layout.head_dim, layout.head_dim_v, unequal
    grid = extent.tiles("kv", KEPT), extent.entries * spec.kv_heads * shares, 1
    return tiles, _launches("all", narrow=False)(grid, constants, alike, **_options())


@lru_cache(maxsize=MOST)
def _in_pieces(layout: Layout, dtype: torch.dtype, shares: int) -> tuple[tuple[Described, ...], Launch]:
    """The same where Q and K are in two pieces, and perhaps V."""
    spec, columns, columns_v = layout.spec, (layout.head_dim, layout.rest), _of_values(layout)
    with_values = not layout.values_apart
    tiles = (
        *_columns(layout.q, columns), *_columns(layout.do, columns_v), *_columns(layout.k, columns),
        *_columns(layout.v, columns_v), *_columns(layout.q, columns), *_columns(layout.do, columns_v),
        _pieces(layout, _ROWS), *_columns(layout.sums, columns if with_values else [each // 2 for each in columns]),
    )  # fmt: skip
    extent = layout.extent
    unequal = extent.sequences is not None
    constants = (
        *layout.k_steps[:2],
        spec.kv_heads, extent.seqlen_q, extent.seqlen_kv, layout.padded_q, layout.padded_kv, layout.plane,
        spec.head_dim, spec.head_dim_v, layout.exponent, layout.before, layout.after, spec.group, shares,
        *layout.edges, unequal or spec.seqlen_kv % KEPT != 0, with_values, layout.rest_v > 0, registers()[1],
        layout.aligned, layout.scaled_up,
    )  # fmt: skip
    grid = extent.tiles("kv", KEPT), extent.entries * spec.kv_heads * shares, 1
    alike = dtype, *columns, *columns_v, unequal
    return tiles, _launches("pieces", narrow=False)(grid, constants, alike, **_options())


def run_values(given: Prepared, dv_out: Tensor) -> None:
    """Writes each share's dV where it is ``Layout.values_apart``, on the current stream."""
    rows = given.gradient.rows
    tiles, start = _values(given.layout, dv_out.dtype, dv_out.shape[1] // given.layout.spec.kv_heads)
    q, k, do_wide = given.q.data, given.k.data, given.gradient.laid.further(False, interleaved=False)
    tiled = q, q, k, k, do_wide, do_wide, rows
    start.on(rows.device, (*tiled, rows, given.k_scale, dv_out, given.tiles("kv", KEPT)), tiles)


@lru_cache(maxsize=MOST)
def _values(layout: Layout, dtype: torch.dtype, shares: int) -> tuple[tuple[Described, ...], Launch]:
    """What of the launch does not depend on memory."""
    spec, columns, columns_v, extent = layout.spec, (layout.head_dim, layout.rest), _of_values(layout), layout.extent
    unequal = extent.sequences is not None
    tiles = (
        *_columns(layout.q, columns), *_columns(layout.k, columns), *_columns(layout.do, columns_v),
        _pieces(layout, _ROWS),
    )  # fmt: skip
    stages = 4 if layout.rest_v else 5  # as many as shared memory holds
    constants = (
        *layout.k_steps[:2],
        spec.kv_heads, extent.seqlen_q, extent.seqlen_kv, layout.padded_q, layout.padded_kv, layout.plane,
        spec.head_dim_v, layout.exponent, layout.before, layout.after, spec.group, shares, stages,
        *layout.edges, unequal or spec.seqlen_kv % KEPT != 0, layout.rest_v > 0, registers()[1], layout.aligned,
    )  # fmt: skip
    grid = extent.tiles("kv", KEPT), extent.entries * spec.kv_heads * shares, 1
    return tiles, _launches("values", narrow=False)(
        grid, constants, (dtype, *columns, *columns_v, unequal), **_options()
    )


def run_queries(given: Prepared, ring: Ring, narrow: bool, dq_out: Tensor) -> None:
    """Writes dQ (B, H, Sq, D), contiguous, on the current stream."""
    rows = given.gradient.rows
    tiles, start = _queries(given.layout, ring, narrow, dq_out.dtype)
    tiled = (
        given.q.data, given.gradient.laid.data, given.k.data, given.v.data,
        given.k.further(narrow, interleaved=True), _turn(given),
    )  # fmt: skip
    memory = rows, *_descales(given, narrow), given.k_scale, given.v_scale, dq_out
    start.on(rows.device, (*tiled, *memory), tiles)


@lru_cache(maxsize=MOST)
def _queries(layout: Layout, ring: Ring, narrow: bool, dtype: torch.dtype) -> tuple[tuple[Described, ...], Launch]:
    """What of the launch does not depend on memory."""
    spec = layout.spec
    tiles = (
        _tiles(layout.q, _ROWS), _tiles(layout.do, _ROWS), _tiles(layout.k, ring.block),
        _tiles(layout.v, ring.block), _further(layout.k, ring.block, narrow), _turning(layout, narrow),
    )  # fmt: skip
    constants = (
        *layout.k_steps[:2], *layout.v_steps[:2],
        spec.heads, spec.group, spec.seqlen_q, spec.seqlen_kv, layout.padded_q, layout.padded_kv, layout.plane,
        spec.head_dim, layout.scale, layout.exponent, layout.before, layout.after,
        ring.stages, *layout.edges, spec.seqlen_kv % ring.block != 0, *_ends(layout, narrow),
    )  # fmt: skip
    alike = dtype, ring.block, layout.head_dim, layout.head_dim_v
    grid = -(-spec.seqlen_q // KEPT), spec.batch * spec.heads, 1
    return tiles, _launches("queries", narrow)(grid, constants, alike, **_options())


@cache
def _launches(kind: Literal["all", "pieces", "values", "keys", "queries"], narrow: bool) -> Launches:
    if kind in ("all", "pieces"):
        from .fused import all_gradients_hopper, all_gradients_in_pieces_hopper

        return Launches(all_gradients_hopper if kind == "all" else all_gradients_in_pieces_hopper)
    if kind == "values":
        from .values import value_gradients_hopper

        return Launches(value_gradients_hopper)
    if narrow:
        from .narrow_keys import narrow_key_gradients_hopper as keys
        from .narrow_queries import narrow_query_gradients_hopper as queries
    else:
        from .keys import key_gradients_hopper as keys
        from .queries import query_gradients_hopper as queries
    return Launches(keys if kind == "keys" else queries)


def _ends(layout: Layout, narrow: bool) -> tuple[int | float | bool, ...]:
    """Rotation; queries that share dO's descale and P's peak, for e4m3; registers of a computing thread."""
    return layout.rotated, *((BLOCK, PEAK) if narrow else ()), registers()[1]


def _options() -> dict[str, int]:
    return {"num_warps": 4, "maxnreg": registers()[0]}


def _descales(given: Prepared, narrow: bool) -> tuple[Piece, ...]:
    """dO's: P in bf16 is as much larger as the wide copy is smaller, and no sum needs them."""
    return (given.gradient.descale,) if narrow else ()


def _tiles(shape: Shape, tokens: int) -> Described:
    """Of (B, H, S, D) as a matrix (B·H·S, D), by so many tokens."""
    return described(rows_of(shape), (tokens, shape[3]))


def _columns(shape: Shape, columns: Sequence[int]) -> tuple[Described, ...]:
    """The same by blocks of so many columns of 64 tokens."""
    return tuple([described(rows_of(shape), (_ROWS, each)) for each in columns])


def _of_values(layout: Layout) -> tuple[int, int]:
    """Columns of V's and dO's two pieces; if they are in one, it is named twice, and no kernel reads the second."""
    return layout.head_dim_v, layout.rest_v or layout.head_dim_v


def _halves(shape: Shape, tokens: int) -> Described:
    """The same by the part of a warpgroup: half the columns of 64 tokens, or 64 of 128 tokens."""
    return described(rows_of(shape), (_ROWS, shape[3] * tokens // (2 * _ROWS)))


def _further(shape: Shape, tokens: int, narrow: bool) -> Described:
    """Of the copy of (B, H, S, D) that a sum over tokens reads: (B·H·D, S) for FP8, or widened (B·H·S, D)."""
    return described(rows_of(flipped(shape)), (shape[3], tokens)) if narrow else _tiles(shape, tokens)


def _turn(given: Prepared) -> Tensor | Piece:
    """The rotation's matrix, or anything where nothing was rotated."""
    return given.q.data if given.turn is None else given.turn


def _turning(layout: Layout, narrow: bool) -> Described:
    """Of ``_turn``, by parts where the sums are in parts."""
    size = layout.head_dim
    return _tiles((1, 1, size, size) if layout.rotated else layout.q, _PART if narrow else size)


def _pieces(layout: Layout, tokens: int) -> Described:
    """Of all vectors over the queries as one, by so many tokens."""
    return described((VECTORS * layout.plane,), (tokens,))
