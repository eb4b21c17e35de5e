"""From prepared operands to launches of the backward's Hopper kernels.  Imports no Gluon before ``serves`` is asked."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Literal

import torch
from torch import Tensor

from attnbench.problem.spec import AttentionSpec

from ...descriptors import Described, Shape, all_of, flipped, rows_of
from ...forward.hopper import launch as forward
from ...forward.hopper.launch import described, registers
from ...launching import KEPT as MOST
from ...launching import Launch, Launches, addresses
from ..copies import CHUNK, padded
from ..layout import BLOCK, PEAK, VECTORS
from ..operands import Layout, Prepared
from ..tiles import Ring

__all__ = ["KEPT", "MOST_SUMMED", "adds", "run_all", "run_keys", "run_queries", "serves", "wide"]

KEPT = 128  # keys (or queries) that a program keeps: 64 for each of two warpgroups
# Keys of the fused kernel, which rounds dQ's sums to bf16 at the addition of every 128.  Its error is as random steps
# are, the root of how many there were: on an H200 dQ was off by 0.0138 (relative L2, no mask) after the 128 additions
# of 16,384 keys, so that 32,768 leave 0.02, where FP8 itself costs 0.058.
MOST_SUMMED = 32768
_ROWS = 64
_PART = 64  # columns of an e4m3 sum at a time, and so rows of a rotation's matrix
_SIZES = (64, 128)  # padded head dimensions
_RING = 200 * 1024  # bytes of shared memory for which the kernel that makes dV has a fourth stage


def wide(spec: AttentionSpec) -> bool:
    """Whether all gradients at once take the two kernels for wide heads, and the others for Hopper do not serve."""
    return spec.head_dim > _SIZES[-1]


def serves(spec: AttentionSpec, *, per_token: bool) -> bool:
    """Whether the Hopper kernels support this; scales of tokens (``per_token``) and a soft cap take registers."""
    sizes = (*_SIZES, 2 * _SIZES[-1]) if wide(spec) else _SIZES
    fits = padded(spec.head_dim) in sizes and padded(spec.head_dim_v) in sizes
    return fits and forward.serves(spec, per_token=per_token)


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
    start((*all_of(tiles, tiled), *memory), addresses(memory))


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


def run_all(given: Prepared, dq_sums: Tensor, dk_out: Tensor, dv_out: Tensor) -> None:
    """Adds to dQ's sums (B, H, padded Sq, padded D) bf16, and writes dK and dV, on the current stream.

    A rotated dK of wide heads (B, Hkv, padded Skv, padded D) in bf16 is yet to be taken back.
    """
    if wide(given.layout.spec):
        _run_wide(given, dq_sums, dk_out, dv_out)
        return
    do, rows = given.gradient.laid, given.gradient.rows
    tiles, start = _all(given.layout, dk_out.dtype)
    tiled = (
        given.q.data, do.data, given.k.data, given.v.data,
        given.q.further(False, interleaved=False), do.further(False, interleaved=False), rows, _turn(given), dq_sums,
    )  # fmt: skip
    memory = rows, given.gradient.descale, given.k_scale, dk_out, dv_out, given.tiles("kv", KEPT)
    start((*all_of(tiles, tiled), *memory), addresses(memory))


@lru_cache(maxsize=MOST)
def _all(layout: Layout, dtype: torch.dtype) -> tuple[tuple[Described, ...], Launch]:
    """What of the launch does not depend on memory."""
    spec = layout.spec
    tiles = (
        _tiles(layout.q, _ROWS), _tiles(layout.do, _ROWS), _tiles(layout.k, _ROWS), _tiles(layout.v, _ROWS),
        _tiles(layout.q, _ROWS), _tiles(layout.do, _ROWS),
        _pieces(layout, _ROWS), _turning(layout, narrow=False), _halves(layout.q, _ROWS),
    )  # fmt: skip
    extent = layout.extent
    unequal = extent.sequences is not None
    constants = (
        *layout.k_steps[:2],
        spec.kv_heads, extent.seqlen_q, extent.seqlen_kv, layout.padded_q, layout.padded_kv, layout.plane,
        spec.head_dim, spec.head_dim_v, layout.exponent, layout.before, layout.after, spec.group,
        *layout.edges, unequal or spec.seqlen_kv % KEPT != 0, *_ends(layout, narrow=False), layout.aligned,
    )  # fmt: skip
    alike = dtype, layout.head_dim, layout.head_dim_v, unequal
    grid = extent.tiles("kv", KEPT), extent.entries * spec.kv_heads, 1
    return tiles, _launches("all", narrow=False)(grid, constants, alike, **_options())


def _run_wide(given: Prepared, dq_sums: Tensor, dk_out: Tensor, dv_out: Tensor) -> None:
    do, rows, tiles = given.gradient.laid, given.gradient.rows, given.tiles("kv", KEPT)
    wide_q, wide_do = given.q.further(False, interleaved=False), do.further(False, interleaved=False)
    described, start = _scores(given.layout, dk_out.dtype)
    tiled = given.q.data, do.data, given.k.data, given.v.data, wide_q, rows, dq_sums
    memory = rows, given.gradient.descale, given.k_scale, dk_out, tiles
    start((*all_of(described, tiled), *memory), addresses(memory))
    described, start = _values(given.layout, dv_out.dtype)
    memory = rows, given.k_scale, dv_out, tiles
    start((*all_of(described, (given.q.data, given.k.data, wide_do, rows)), *memory), addresses(memory))


@lru_cache(maxsize=MOST)
def _scores(layout: Layout, dtype: torch.dtype) -> tuple[tuple[Described, ...], Launch]:
    """What of the launch for dQ and dK of wide heads does not depend on memory."""
    spec = layout.spec
    tiles = (
        *(_chunked(shape, _width(size)) for shape, size in _operands(layout)),
        _chunked(layout.q, CHUNK), _pieces(layout, _ROWS), _chunked(layout.q, CHUNK),
    )  # fmt: skip
    size = layout.k[3] if layout.rotated else spec.head_dim
    constants = (
        *_common(layout), size, layout.exponent, layout.before, layout.after, spec.group,
        _chunks(spec.head_dim), _chunks(spec.head_dim_v), *_masks(layout), layout.rotated, registers()[1],
        layout.aligned,
    )  # fmt: skip
    return tiles, _launches("scores", narrow=False)(*_wide_grid(layout), constants, _alike(layout, dtype), **_options())


@lru_cache(maxsize=MOST)
def _values(layout: Layout, dtype: torch.dtype) -> tuple[tuple[Described, ...], Launch]:
    """The same for dV of wide heads."""
    spec = layout.spec
    chunks, chunks_v = _chunks(spec.head_dim), _chunks(spec.head_dim_v)
    width = _width(spec.head_dim)
    tiles = (
        _chunked(layout.q, width), _chunked(layout.k, width), _chunked(layout.do, CHUNK), _pieces(layout, _ROWS)
    )  # fmt: skip
    of_keys, of_stage = KEPT * CHUNK * chunks, _ROWS * CHUNK * (chunks + 2 * chunks_v)
    stages = 4 if of_keys + 4 * of_stage <= _RING else 3
    constants = (
        *_common(layout), spec.head_dim_v, layout.exponent, layout.before, layout.after, spec.group, stages,
        chunks, chunks_v, *_masks(layout), registers()[1], layout.aligned,
    )  # fmt: skip
    return tiles, _launches("values", narrow=False)(*_wide_grid(layout), constants, _alike(layout, dtype), **_options())


def run_queries(given: Prepared, ring: Ring, narrow: bool, dq_out: Tensor) -> None:
    """Writes dQ (B, H, Sq, D), contiguous, on the current stream."""
    rows = given.gradient.rows
    tiles, start = _queries(given.layout, ring, narrow, dq_out.dtype)
    tiled = (
        given.q.data, given.gradient.laid.data, given.k.data, given.v.data,
        given.k.further(narrow, interleaved=True), _turn(given),
    )  # fmt: skip
    memory = rows, *_descales(given, narrow), given.k_scale, given.v_scale, dq_out
    start((*all_of(tiles, tiled), *memory), addresses(memory))


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
def _launches(kind: Literal["all", "keys", "queries", "scores", "values"], narrow: bool) -> Launches:
    if kind == "all":
        from .fused import all_gradients_hopper

        return Launches(all_gradients_hopper)
    if kind == "scores":
        from .wide import score_gradients_hopper

        return Launches(score_gradients_hopper)
    if kind == "values":
        from .wide_values import value_gradients_hopper

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


def _descales(given: Prepared, narrow: bool) -> tuple[Tensor, ...]:
    """dO's: P in bf16 is as much larger as the wide copy is smaller, and no sum needs them."""
    return (given.gradient.descale,) if narrow else ()


def _tiles(shape: Shape, tokens: int) -> Described:
    """Of (B, H, S, D) as a matrix (B·H·S, D), by so many tokens."""
    return described(rows_of(shape), (tokens, shape[3]))


def _operands(layout: Layout) -> tuple[tuple[Shape, int], ...]:
    """Q, dO, K and V as they are laid out, and the head dimension of each."""
    spec = layout.spec
    sizes = spec.head_dim, spec.head_dim_v
    return tuple(zip((layout.q, layout.do, layout.k, layout.v), sizes * 2, strict=True))


def _chunks(size: int) -> int:
    """Of a head dimension, each a sum's columns."""
    return -(-size // CHUNK)


def _width(size: int) -> int:
    """Columns that are loaded at a time in e4m3: the widest power of two of which a head has a whole number."""
    return 2 * CHUNK if _chunks(size) % 2 == 0 else CHUNK


def _chunked(shape: Shape, width: int) -> Described:
    """Of (B, H, S, D) as a matrix, by 64 tokens and so many columns."""
    return described(rows_of(shape), (_ROWS, width))


def _common(layout: Layout) -> tuple[int, ...]:
    """The first numbers of the kernels for wide heads."""
    spec, extent = layout.spec, layout.extent
    return (
        *layout.k_steps[:2], spec.kv_heads, extent.seqlen_q, extent.seqlen_kv, layout.padded_q, layout.padded_kv,
        layout.plane,
    )  # fmt: skip


def _masks(layout: Layout) -> tuple[bool, ...]:
    """Left and right edges, and whether the last program's keys are fewer."""
    return *layout.edges, layout.extent.sequences is not None or layout.spec.seqlen_kv % KEPT != 0


def _wide_grid(layout: Layout) -> tuple[tuple[int, int, int]]:
    return ((layout.extent.tiles("kv", KEPT), layout.extent.entries * layout.spec.kv_heads, 1),)


def _alike(layout: Layout, dtype: torch.dtype) -> tuple[object, ...]:
    """What launches for wide heads with the same constants may differ in."""
    return dtype, layout.head_dim, layout.head_dim_v, layout.extent.sequences is not None


def _halves(shape: Shape, tokens: int) -> Described:
    """The same by half the columns."""
    return described(rows_of(shape), (tokens, shape[3] // 2))


def _further(shape: Shape, tokens: int, narrow: bool) -> Described:
    """Of the copy of (B, H, S, D) that a sum over tokens reads: (B·H·D, S) for FP8, or widened (B·H·S, D)."""
    return described(rows_of(flipped(shape)), (shape[3], tokens)) if narrow else _tiles(shape, tokens)


def _turn(given: Prepared) -> Tensor:
    """The rotation's matrix, or anything where nothing was rotated."""
    return given.q.data if given.turn is None else given.turn


def _turning(layout: Layout, narrow: bool) -> Described:
    """Of ``_turn``, by parts where the sums are in parts."""
    size = layout.head_dim
    return _tiles((1, 1, size, size) if layout.rotated else layout.q, _PART if narrow else size)


def _pieces(layout: Layout, tokens: int) -> Described:
    """Of all vectors over the queries as one, by so many tokens."""
    return described((VECTORS * layout.plane,), (tokens,))
