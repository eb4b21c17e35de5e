"""From prepared operands to launches of the backward's Hopper kernels: what they serve, descriptors, the grid.

Importing this imports no Gluon: ``serves`` is asked first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from attnbench.spec import AttentionSpec

from . import forward_hopper_launch as forward
from .backward_layout import BLOCK, PEAK, Laid, padded
from .backward_tiles import Ring
from .forward_hopper_launch import descriptor, registers
from .launching import Launches, addresses

if TYPE_CHECKING:
    from .backward_launch import Prepared

__all__ = ["KEPT", "MOST_SUMMED", "adds", "run_all", "run_keys", "run_queries", "serves"]

KEPT = 128  # keys (or queries) that a program keeps: 64 for each of two warpgroups
# Keys of the fused kernel, which rounds dQ's sums to bf16 at the addition of every 128.  Its error is as random steps
# are, the root of how many there were: on an H200 dQ was off by 0.0138 (relative L2, no mask) after the 128 additions
# of 16,384 keys, so that 32,768 leave 0.02, where FP8 itself costs 0.058.
MOST_SUMMED = 32768
_ROWS = 64
_PART = 64  # columns of an e4m3 sum at a time, and so rows of a rotation's matrix
_SIZES = (64, 128)  # padded head dimensions


def serves(spec: AttentionSpec, scales: Sequence[Tensor]) -> bool:
    """Whether the Hopper kernels compute this; what else there is stays with the kernels in plain Triton.

    ``scales`` are Q's, K's and V's descales, (B, heads, 1 or S).  Those of single tokens and a soft cap want registers
    that the Hopper kernels do not have.
    """
    fits = padded(spec.head_dim) in _SIZES and padded(spec.head_dim_v) in _SIZES
    return fits and forward.serves(spec, scales[0].device, per_token=any(x.shape[2] > 1 for x in scales))


@cache
def adds() -> bool:
    """Whether this Triton lets Gluon's functions add to memory by TMA, of which its language has no word yet."""
    try:
        from triton._C.libtriton import gluon_ir, ir
        from triton.experimental.gluon.language import _core
    except ImportError:
        return False
    needed = (gluon_ir.GluonOpBuilder, "create_async_tma_reduce"), (ir, "DESCRIPTOR_REDUCE_KIND"), (_core, "builtin")
    return all(hasattr(place, name) for place, name in needed)


def run_keys(given: Prepared, ring: Ring, narrow: bool, dk_out: Tensor, dv_out: Tensor) -> None:
    """Writes dK (B, Hkv, Skv, D) and dV (B, Hkv, Skv, Dv), contiguous, on the current stream."""
    spec, do, rows = given.spec, given.gradient.laid, given.gradient.rows
    tiled = (
        _tiles(given.q.data, ring.block), _tiles(do.data, ring.block), _tiles(given.k.data, _ROWS),
        _tiles(given.v.data, _ROWS), _further(given.q, ring.block, narrow), _further(do, ring.block, narrow),
        _pieces(rows, ring.block), _turn(given, narrow),
    )  # fmt: skip
    memory = rows, *_descales(given, narrow), given.k_scale, given.v_scale, dk_out, dv_out
    constants = (
        *given.k_scale.stride()[:2], *given.v_scale.stride()[:2],
        spec.kv_heads, spec.seqlen_q, spec.seqlen_kv, rows.shape[2], given.k.data.shape[1], rows.stride(0),
        spec.head_dim, spec.head_dim_v, given.scale, given.exponent, given.before, given.after,
        spec.group, ring.stages, *_edges(given), *_ends(given, narrow),
    )  # fmt: skip
    # The descriptors' tiles are no constants of the call.
    alike = dk_out.dtype, ring.block, given.head_dim, given.head_dim_v
    grid = -(-spec.seqlen_kv // KEPT), spec.batch * spec.kv_heads, 1
    _launches("keys", narrow)(grid, constants, alike, **_options())((*tiled, *memory), addresses(memory))


def run_all(given: Prepared, dq_sums: Tensor, dk_out: Tensor, dv_out: Tensor) -> None:
    """Adds to dQ's sums (B·H, padded Sq, padded D) bf16, and writes dK and dV, contiguous, on the current stream."""
    spec, do, rows = given.spec, given.gradient.laid, given.gradient.rows
    assert given.k.wide is not None
    tiled = (
        _tiles(given.q.data, _ROWS), _tiles(do.data, _ROWS), _tiles(given.k.data, _ROWS), _tiles(given.v.data, _ROWS),
        _further(given.q, _ROWS, narrow=False), _further(do, _ROWS, narrow=False), _halves(given.k.wide, KEPT),
        _pieces(rows, _ROWS), _turn(given, narrow=False), _halves(dq_sums, _ROWS),
    )  # fmt: skip
    memory = rows, given.k_scale, given.v_scale, dk_out, dv_out
    constants = (
        *given.k_scale.stride()[:2], *given.v_scale.stride()[:2],
        spec.kv_heads, spec.seqlen_q, spec.seqlen_kv, rows.shape[2], given.k.data.shape[1], rows.stride(0),
        spec.head_dim, spec.head_dim_v, given.scale, given.exponent, given.before, given.after, spec.group,
        *_edges(given), spec.seqlen_kv % KEPT != 0, *_ends(given, narrow=False),
    )  # fmt: skip
    alike = dk_out.dtype, given.head_dim, given.head_dim_v
    grid = -(-spec.seqlen_kv // KEPT), spec.batch * spec.kv_heads, 1
    _launches("all", narrow=False)(grid, constants, alike, **_options())((*tiled, *memory), addresses(memory))


def run_queries(given: Prepared, ring: Ring, narrow: bool, dq_out: Tensor) -> None:
    """Writes dQ (B, H, Sq, D), contiguous, on the current stream."""
    spec, rows = given.spec, given.gradient.rows
    tiled = (
        _tiles(given.q.data, _ROWS), _tiles(given.gradient.laid.data, _ROWS), _tiles(given.k.data, ring.block),
        _tiles(given.v.data, ring.block), _further(given.k, ring.block, narrow), _turn(given, narrow),
    )  # fmt: skip
    memory = rows, *_descales(given, narrow), given.k_scale, given.v_scale, dq_out
    constants = (
        *given.k_scale.stride()[:2], *given.v_scale.stride()[:2],
        spec.heads, spec.group, spec.seqlen_q, spec.seqlen_kv, rows.shape[2], given.k.data.shape[1], rows.stride(0),
        spec.head_dim, given.scale, given.exponent, given.before, given.after,
        ring.stages, *_edges(given), spec.seqlen_kv % ring.block != 0, *_ends(given, narrow),
    )  # fmt: skip
    alike = dq_out.dtype, ring.block, given.head_dim, given.head_dim_v
    grid = -(-spec.seqlen_q // KEPT), spec.batch * spec.heads, 1
    _launches("queries", narrow)(grid, constants, alike, **_options())((*tiled, *memory), addresses(memory))


@cache
def _launches(kind: Literal["all", "keys", "queries"], narrow: bool) -> Launches:
    if kind == "all":
        from .backward_hopper_fused import all_gradients_hopper

        return Launches(all_gradients_hopper)
    if narrow:
        from .backward_hopper_narrow_keys import narrow_key_gradients_hopper as keys
        from .backward_hopper_narrow_queries import narrow_query_gradients_hopper as queries
    else:
        from .backward_hopper_keys import key_gradients_hopper as keys
        from .backward_hopper_queries import query_gradients_hopper as queries
    return Launches(keys if kind == "keys" else queries)


def _edges(given: Prepared) -> tuple[bool, bool]:
    """Left and right."""
    return given.spec.mask.left is not None, given.spec.mask.right is not None


def _ends(given: Prepared, narrow: bool) -> tuple[int | float | bool, ...]:
    """Rotation; queries that share dO's descale and P's peak, for e4m3; registers of a computing thread."""
    return given.turn is not None, *((BLOCK, PEAK) if narrow else ()), registers()[1]


def _options() -> dict[str, int]:
    return {"num_warps": 4, "maxnreg": registers()[0]}


def _descales(given: Prepared, narrow: bool) -> tuple[Tensor, ...]:
    """dO's: P in bf16 is as much larger as the wide copy is smaller, and no sum needs them."""
    return (given.gradient.descale,) if narrow else ()


def _tiles(x: Tensor, tokens: int) -> Any:
    """Of x (H, S, D) as a matrix (H·S, D), by so many tokens."""
    return descriptor(x.view(-1, x.shape[2]), [tokens, x.shape[2]])


def _halves(x: Tensor, tokens: int) -> Any:
    """The same by half the columns."""
    return descriptor(x.view(-1, x.shape[2]), [tokens, x.shape[2] // 2])


def _further(x: Laid, tokens: int, narrow: bool) -> Any:
    """Of the copy that a sum over tokens reads: (H·D, S) for FP8, or widened (H·S, D)."""
    if not narrow:
        assert x.wide is not None
        return _tiles(x.wide, tokens)
    assert x.transposed is not None
    assert x.interleaved
    return descriptor(x.transposed.view(-1, x.transposed.shape[2]), [x.transposed.shape[1], tokens])


def _turn(given: Prepared, narrow: bool) -> Any:
    """Of the rotation's matrix, by parts where the sums are in parts; of anything where nothing was rotated."""
    turn = given.q.data if given.turn is None else given.turn[None]
    return _tiles(turn, _PART if narrow else given.head_dim)


def _pieces(rows: Tensor, tokens: int) -> Any:
    """Of all vectors over the queries as one, by so many tokens."""
    return descriptor(rows.view(-1), [tokens])
