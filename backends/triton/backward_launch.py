"""The FP8 backward's passes in order: copies, dO with delta, dK and dV, dQ.  Imports Triton."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnbench.fp8 import Quantised, hadamard
from attnbench.kernel import gradient_dtype
from attnbench.spec import AttentionSpec

from . import backward_hopper_launch as hopper
from .backward_keys import key_gradients
from .backward_layout import BLOCK, LOG2E, PEAK, Gradient, Laid, lay_out, lay_out_gradient, padded
from .backward_queries import query_gradients
from .backward_sums import ROWS, finish_query_gradients
from .backward_tiles import Tile, Tiles
from .launching import Launches, addresses

__all__ = ["Prepared", "launch", "prepared", "run_all", "run_keys", "run_queries"]


class Prepared:
    """Everything that the two kernels read, and what they share."""

    def __init__(
        self, spec: AttentionSpec, q: Laid, k: Laid, v: Laid, gradient: Gradient, scales: list[Tensor], rotated: bool,
        served: bool,
    ) -> None:  # fmt: skip
        """``scales``: Q's, K's and V's descales, (B, heads, 1 or S).  ``rotated``: Q and K were.

        ``served``: by the Hopper kernels, where a tile asks for them.
        """
        self.spec, self.q, self.k, self.v, self.gradient, self.served = spec, q, k, v, gradient, served
        self.q_varies, self.k_scale, self.v_scale = scales[0].shape[2] > 1, *scales[1:]
        mask, offset = spec.mask, spec.mask.offset(spec.seqlen_q, spec.seqlen_kv)
        self.before = 0 if mask.left is None else mask.left - offset
        self.after = 0 if mask.right is None else mask.right + offset
        self.turn: Tensor | None = None
        self.scale = spec.scale
        if rotated:
            self.turn, factor = _turn(spec.head_dim, self.head_dim, q.data.device)
            self.scale *= factor

    @property
    def exponent(self) -> float:
        """What turns an unscaled score into the exponent of 2: of exp(s), or of exp(2x) in the softcap's tanh(x)."""
        return LOG2E * (2.0 * self.spec.scale / self.spec.softcap if self.spec.softcap else self.spec.scale)

    @property
    def head_dim(self) -> int:
        """Q's and K's, padded."""
        return self.q.data.shape[2]

    @property
    def head_dim_v(self) -> int:
        """V's and dO's, padded."""
        return self.v.data.shape[2]

    @property
    def kinds(self) -> tuple[bool, ...]:
        """What kind of program it takes: left and right edges, whose scales vary, a soft cap, a rotation."""
        spec = self.spec
        varies = self.q_varies, self.k_scale.shape[2] > 1, self.v_scale.shape[2] > 1
        return spec.mask.left is not None, spec.mask.right is not None, *varies, spec.softcap > 0, self.turn is not None


_KEYS, _QUERIES, _FINISH = Launches(key_gradients), Launches(query_gradients), Launches(finish_query_gradients)


def prepared(
    spec: AttentionSpec,
    q: Quantised,
    k: Quantised,
    v: Quantised,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    narrow: bool,
    tiles: Tiles,
) -> Prepared:
    """The passes over memory that stand before the products; arguments as in ``Saved``.

    ``narrow`` kernels for Hopper read their transposed copies in another order: ``tiles`` say which kernels will run.
    """
    scales = [x.descale.to(torch.float32).expand(*x.data.shape[:2], -1, 1)[..., 0] for x in (q, k, v)]
    served = hopper.serves(spec, scales)
    by_key, by_query = (narrow and served and tile.hopper is not None for tile in tiles[:2])
    gradient = lay_out_gradient(spec, grad_out, out, lse, q, v, narrow=narrow, interleaved=by_key)
    laid_q, laid_k = (
        lay_out(x.data, wide=not narrow, transposed=narrow, interleaved=order)
        for x, order in ((q, by_key), (k, by_query))
    )
    return Prepared(spec, laid_q, laid_k, lay_out(v.data), gradient, scales, q.rotated, served)


def run_keys(given: Prepared, tile: Tile, narrow: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dK (B, Hkv, Skv, D) and dV (B, Hkv, Skv, Dv)."""
    spec, do, rows = given.spec, given.gradient.laid, given.gradient.rows
    m, n, d, dv = tile.block_m, tile.block_n, given.head_dim, given.head_dim_v
    dk_out, dv_out = _for_keys(given, dtype)
    if tile.hopper is not None and given.served:
        hopper.run_keys(given, tile.hopper, narrow, dk_out, dv_out)
        return dk_out, dv_out
    memory = rows, given.gradient.descale, given.k_scale, given.v_scale, given.turn, dk_out, dv_out
    tiled = (
        _tiled(given.q.data, m, d), _tiled(do.data, m, dv), _tiled(given.k.data, n, d), _tiled(given.v.data, n, dv),
        _further(given.q, m, d, narrow), _further(do, m, dv, narrow),
    )  # fmt: skip
    constants = (
        rows.stride(0), *given.k_scale.stride(), *given.v_scale.stride(),
        spec.kv_heads, spec.seqlen_q, spec.seqlen_kv, rows.shape[2], given.k.data.shape[1],
        spec.head_dim, spec.head_dim_v, given.scale, given.exponent, given.before, given.after, spec.softcap * LOG2E,
        spec.group, m, n, d, dv, *given.kinds, narrow, PEAK, BLOCK, tile.stages,
    )  # fmt: skip
    grid = triton.cdiv(spec.seqlen_kv, n), spec.batch * spec.kv_heads, 1
    _KEYS(grid, constants, (dtype,), num_warps=tile.warps)((*tiled, *memory), addresses(memory))
    return dk_out, dv_out


def run_all(given: Prepared, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """dQ (B, H, Sq, D), dK (B, Hkv, Skv, D) and dV (B, Hkv, Skv, Dv) by the fused kernel, which must serve.

    dQ differs from run to run: programs add to it in no order, and every sum is rounded to bf16.
    """
    spec, rows, padded_q = given.spec, given.gradient.rows, given.q.data.shape[1]
    dk_out, dv_out = _for_keys(given, dtype)
    dq_out = torch.empty(spec.batch, spec.heads, spec.seqlen_q, spec.head_dim, dtype=dtype, device=rows.device)
    sums = torch.zeros(given.q.data.shape, dtype=torch.bfloat16, device=rows.device)
    hopper.run_all(given, sums, dk_out, dv_out)
    memory = sums, given.k_scale, given.v_scale, given.turn, dq_out
    constants = (
        *given.k_scale.stride()[:2], *given.v_scale.stride()[:2], spec.heads, spec.group, spec.seqlen_q, padded_q,
        spec.head_dim, given.scale, ROWS, given.head_dim, given.turn is not None,
    )  # fmt: skip
    grid = triton.cdiv(spec.seqlen_q, ROWS), spec.batch * spec.heads, 1
    _FINISH(grid, constants, (dtype,), num_warps=4)(memory, addresses(memory))
    return dq_out, dk_out, dv_out


def _for_keys(given: Prepared, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory for dK and dV."""
    spec, device = given.spec, given.gradient.rows.device
    shape = spec.batch, spec.kv_heads, spec.seqlen_kv
    return (
        torch.empty(*shape, spec.head_dim, dtype=dtype, device=device),
        torch.empty(*shape, spec.head_dim_v, dtype=dtype, device=device),
    )


def run_queries(given: Prepared, tile: Tile, narrow: bool, dtype: torch.dtype) -> Tensor:
    """dQ (B, H, Sq, D)."""
    spec, do, rows = given.spec, given.gradient.laid, given.gradient.rows
    m, n, d, dv = tile.block_m, tile.block_n, given.head_dim, given.head_dim_v
    dq_out = torch.empty(spec.batch, spec.heads, spec.seqlen_q, spec.head_dim, dtype=dtype, device=rows.device)
    if tile.hopper is not None and given.served:
        hopper.run_queries(given, tile.hopper, narrow, dq_out)
        return dq_out
    memory = rows, given.gradient.descale, given.k_scale, given.v_scale, given.turn, dq_out
    tiled = (
        _tiled(given.q.data, m, d), _tiled(do.data, m, dv), _tiled(given.k.data, n, d), _tiled(given.v.data, n, dv),
        _further(given.k, n, d, narrow),
    )  # fmt: skip
    constants = (
        rows.stride(0), *given.k_scale.stride(), *given.v_scale.stride(),
        spec.heads, spec.group, spec.seqlen_q, spec.seqlen_kv, rows.shape[2], given.k.data.shape[1],
        spec.head_dim, given.scale, given.exponent, given.before, given.after, spec.softcap * LOG2E,
        m, n, d, spec.seqlen_kv % n != 0, *given.kinds, narrow, PEAK, BLOCK, tile.stages,
    )  # fmt: skip
    grid = triton.cdiv(spec.seqlen_q, m), spec.batch * spec.heads, 1
    _QUERIES(grid, constants, (dtype,), num_warps=tile.warps)((*tiled, *memory), addresses(memory))
    return dq_out


@lru_cache(maxsize=16)
def _turn(size: int, padded_size: int, device: torch.device) -> tuple[Tensor, float]:
    """The transpose of the rotation as signs and zeros in bf16, (padded_size, padded_size), and the factor left out."""
    back = hadamard(size).mT
    factor = float(back.abs().max())
    signs = F.pad(back / factor, (0, padded_size - size) * 2).round().to(torch.bfloat16).contiguous()
    return signs.to(device), factor  # the copy is over when it returns; a kernel after it would be one stream's alone


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
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the gradients' dtype; ``choose`` has the tiles for a spec, padded head dimension and device."""
    tiles = choose(spec, padded(max(spec.head_dim, spec.head_dim_v)), grad_out.device)
    given = prepared(spec, q, k, v, out, lse, grad_out, narrow, tiles)
    dtype = gradient_dtype(spec)
    anyhow = spec.seqlen_kv <= hopper.MOST_SUMMED and not torch.are_deterministic_algorithms_enabled()
    if tiles.fused and given.served and not narrow and anyhow and hopper.adds():
        return run_all(given, dtype)
    dk, dv = run_keys(given, tiles.keys, narrow, dtype)
    return run_queries(given, tiles.queries, narrow, dtype), dk, dv


def _tiled(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """x (H, R, C) as a TMA descriptor of (H·R, C) that loads ``rows`` × ``columns``."""
    flat = x.view(-1, x.shape[2])
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, columns])


def _further(x: Laid, tokens: int, size: int, narrow: bool) -> TensorDescriptor:
    """The copy that a sum over tokens reads: transposed for FP8, widened for bf16."""
    copy = x.transposed if narrow else x.wide
    assert copy is not None
    assert not x.interleaved
    return _tiled(copy, size, tokens) if narrow else _tiled(copy, tokens, size)
