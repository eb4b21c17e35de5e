"""The FP8 backward's passes in order: dO with delta, copies, dK and dV, dQ.  Imports Triton."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnbench.kernels.contract import gradient_dtype
from attnbench.problem.fp8 import Quantised
from attnbench.problem.lengths import Lengths
from attnbench.problem.spec import AttentionSpec

from ..blocks import Piece
from ..descriptors import Described, Shape, flipped, rows_of
from ..launching import KEPT, Launch, Launches, on
from .copies import padded
from .hopper import launch as hopper
from .keys import key_gradients
from .layout import BLOCK, LOG2E, PEAK
from .operands import Layout, Prepared
from .plan import prepared
from .queries import query_gradients
from .shares import shares_of, summed
from .sums import ROWS, finish_query_gradients
from .tiles import Tile, Tiles

__all__ = ["launch", "prepared", "run_all", "run_keys", "run_queries"]


_Of = Literal["k", "v", "kv"]
_KEYS, _QUERIES, _FINISH = Launches(key_gradients), Launches(query_gradients), Launches(finish_query_gradients)


def run_keys(
    given: Prepared, tile: Tile, narrow: bool, dtype: torch.dtype, values: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """dK (B, Hkv, Skv, D) and dV (B, Hkv, Skv, Dv); with ``values`` by a kernel each, dV's with that tile."""
    layout, device = given.layout, given.gradient.rows.device
    if tile.hopper is not None and layout.served:
        dk_out, dv_out = _for_keys(layout, dtype, device)
        hopper.run_keys(given, tile.hopper, narrow, dk_out, dv_out)
        return dk_out, dv_out
    dk_out, dv_out = _for_keys(layout, dtype, device, shares_of(layout, tile.block_n))
    if values is not None:
        _run_keys_plain(given, values, narrow, dk_out, dv_out, "v")
    _run_keys_plain(given, tile, narrow, dk_out, dv_out, "kv" if values is None else "k")
    return summed(dk_out, layout.spec.kv_heads), summed(dv_out, layout.spec.kv_heads)


def _run_keys_plain(given: Prepared, tile: Tile, narrow: bool, dk_out: Tensor, dv_out: Tensor, of: _Of) -> None:
    do, rows = given.gradient.laid, given.gradient.rows
    shares = dk_out.shape[1] // given.layout.spec.kv_heads
    described, start = _for_keys_plain(given.layout, tile, narrow, dk_out.dtype, of, shares)
    q_more, do_more = given.q.further(narrow, interleaved=False), do.further(narrow, interleaved=False)
    q, k = given.q.data, given.k.data
    tiled = q, q, do.data, k, k, given.v.data, q_more, q_more, do_more
    memory = (
        rows,
        given.gradient.descale,
        given.k_scale,
        given.v_scale,
        given.turn,
        dk_out,
        dv_out,
        given.tiles("kv", tile.block_n),
    )
    start.on(rows.device, (*tiled, *memory), described)


@lru_cache(maxsize=KEPT)
def _for_keys_plain(
    layout: Layout, tile: Tile, narrow: bool, dtype: torch.dtype, of: _Of, shares: int
) -> tuple[tuple[Described, ...], Launch]:
    """The part of the plain kernel's launch that does not depend on memory; ``of``: which gradients it makes."""
    spec, extent = layout.spec, layout.extent
    m, n, dv = tile.block_m, tile.block_n, layout.head_dim_v
    described = (
        *_both(layout, layout.q, m), _tiled(layout.do, m), *_both(layout, layout.k, n), _tiled(layout.v, n),
        *_both(layout, layout.q, m, narrow), _across(layout.do, m) if narrow else _tiled(layout.do, m),
    )  # fmt: skip
    constants = (
        layout.plane, *layout.k_steps, *layout.v_steps,
        spec.kv_heads, extent.seqlen_q, extent.seqlen_kv, layout.padded_q, layout.padded_kv,
        spec.head_dim, spec.head_dim_v, layout.scale, layout.exponent, layout.before, layout.after,
        spec.softcap * LOG2E,
        spec.group, shares, m, n, layout.head_dim, layout.rest, dv, "k" in of, "v" in of, *layout.kinds,
        narrow, PEAK, BLOCK, tile.stages, layout.aligned,
    )  # fmt: skip
    grid = extent.tiles("kv", n), extent.entries * spec.kv_heads * shares, 1
    return described, _KEYS(grid, constants, (dtype, extent.sequences is None), num_warps=tile.warps)


def run_all(given: Prepared, sums: Tensor | Piece, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """dQ (B, H, Sq, D), dK (B, Hkv, Skv, D) and dV (B, Hkv, Skv, Dv) by the fused kernel.

    ``sums`` are zeros in bf16; they become dQ if that is bf16 and of no padded head dimension.
    dQ differs from run to run: programs add to it in no order, and every sum is rounded to bf16.
    """
    layout, device = given.layout, sums.device
    dk_out, dv_out = _for_keys(layout, dtype, device, shares_of(layout, hopper.KEPT))
    hopper.run_all(given, sums, dk_out, dv_out)
    if layout.values_apart:
        hopper.run_values(given, dv_out)
    dk, dv = summed(dk_out, layout.spec.kv_heads), summed(dv_out, layout.spec.kv_heads)
    if layout.summed_in_place:
        assert isinstance(sums, Tensor), "what is returned has memory of its own"
        return sums, dk, dv
    dq_out = _for_queries(layout, dtype, device)
    memory = sums, dq_out, given.tiles("q", ROWS)
    _finishing(layout, dtype).on(device, memory)
    return dq_out, dk, dv


@lru_cache(maxsize=KEPT)
def _finishing(layout: Layout, dtype: torch.dtype) -> Launch:
    spec, extent = layout.spec, layout.extent
    constants = (
        spec.heads, extent.seqlen_q, layout.padded_q, spec.head_dim, ROWS, layout.head_dim, layout.rest,
    )  # fmt: skip
    grid = extent.tiles("q", ROWS), extent.entries * spec.heads, 1
    return _FINISH(grid, constants, (dtype, extent.sequences is None), num_warps=4)


def _for_keys(layout: Layout, dtype: torch.dtype, device: torch.device, shares: int = 1) -> tuple[Tensor, Tensor]:
    """Memory for dK and dV of each share."""
    make = torch.zeros if layout.gaps else torch.empty
    (batch, heads, tokens, size), (*_, size_v) = layout.gradients[1:]
    dk, dv = ((batch, heads * shares, tokens, each) for each in (size, size_v))
    return make(dk, dtype=dtype, device=device), make(dv, dtype=dtype, device=device)


def _for_queries(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for dQ."""
    make = torch.zeros if layout.gaps else torch.empty
    return make(layout.gradients[0], dtype=dtype, device=device)


def run_queries(given: Prepared, tile: Tile, narrow: bool, dtype: torch.dtype) -> Tensor:
    """dQ (B, H, Sq, D)."""
    layout, do, rows = given.layout, given.gradient.laid, given.gradient.rows
    dq_out = _for_queries(layout, dtype, rows.device)
    if tile.hopper is not None and layout.served:
        hopper.run_queries(given, tile.hopper, narrow, dq_out)
        return dq_out
    described, start = _for_queries_plain(layout, tile, narrow, dtype)
    q, k, k_more = given.q.data, given.k.data, given.k.further(narrow, interleaved=False)
    tiled = q, q, do.data, k, k, given.v.data, k_more, k_more
    memory = (
        rows,
        given.gradient.descale,
        given.k_scale,
        given.v_scale,
        given.turn,
        dq_out,
        given.tiles("q", tile.block_m),
    )
    start.on(rows.device, (*tiled, *memory), described)
    return dq_out


@lru_cache(maxsize=KEPT)
def _for_queries_plain(
    layout: Layout, tile: Tile, narrow: bool, dtype: torch.dtype
) -> tuple[tuple[Described, ...], Launch]:
    """The part of the plain kernel's launch that does not depend on memory."""
    spec, extent = layout.spec, layout.extent
    m, n = tile.block_m, tile.block_n
    described = (
        *_both(layout, layout.q, m), _tiled(layout.do, m), *_both(layout, layout.k, n), _tiled(layout.v, n),
        *_both(layout, layout.k, n, narrow),
    )  # fmt: skip
    constants = (
        layout.plane, *layout.k_steps, *layout.v_steps,
        spec.heads, spec.group, extent.seqlen_q, extent.seqlen_kv, layout.padded_q, layout.padded_kv,
        spec.head_dim, layout.scale, layout.exponent, layout.before, layout.after, spec.softcap * LOG2E,
        m, n, layout.head_dim, layout.rest, extent.sequences is not None or spec.seqlen_kv % n != 0, *layout.kinds,
        narrow, PEAK, BLOCK, tile.stages, layout.aligned,
    )  # fmt: skip
    grid = extent.tiles("q", m), extent.entries * spec.heads, 1
    return described, _QUERIES(grid, constants, (dtype, extent.sequences is None), num_warps=tile.warps)


def launch(
    spec: AttentionSpec,
    q: Quantised,
    k: Quantised,
    v: Quantised,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    choose: Callable[[AttentionSpec, int, torch.device], Tiles],
    narrow: bool,
    lengths: Lengths | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the gradients' dtype; ``choose`` gives the tiles for a spec, padded head dimension and device."""
    device, dtype = grad_out.device, gradient_dtype(spec)
    tiles = choose(spec, padded(max(spec.head_dim, spec.head_dim_v)), device)
    anyhow = spec.seqlen_kv <= hopper.MOST_SUMMED and not torch.are_deterministic_algorithms_enabled()
    fused = tiles.fused and not narrow and anyhow and hopper.adds()
    with on(device):
        given = prepared(spec, q, k, v, out, lse, grad_out, narrow, tiles, fused=fused, lengths=lengths)
        if given.sums is not None:
            return run_all(given, given.sums, dtype)
        dk, dv = run_keys(given, tiles.keys, narrow, dtype, tiles.values)
        return run_queries(given, tiles.queries, narrow, dtype), dk, dv


def _both(layout: Layout, shape: Shape, tokens: int, across: bool = False) -> tuple[Described, Described]:
    """Q's or K's first columns and the rest of them (the first again where there is none) by so many tokens."""
    kind = _across if across else _tiled
    return kind(shape, tokens, layout.head_dim), kind(shape, tokens, layout.rest or layout.head_dim)


def _tiled(shape: Shape, tokens: int, columns: int | None = None) -> Described:
    """x (B, H, S, D) by so many tokens and columns."""
    return Described(TensorDescriptor.from_tensor, rows_of(shape), (tokens, columns or shape[3]))


def _across(shape: Shape, tokens: int, columns: int | None = None) -> Described:
    """The transposed copy (B, H, D, S) of x (B, H, S, D) by so many tokens and columns of x."""
    return Described(TensorDescriptor.from_tensor, rows_of(flipped(shape)), (columns or shape[3], tokens))
