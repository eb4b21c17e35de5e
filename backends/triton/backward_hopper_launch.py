"""From prepared operands to launches of the backward's Hopper kernels: what they serve, descriptors, the grid.

Importing this imports no Gluon: ``serves`` is asked first.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from . import forward_hopper_launch as forward
from .backward_tiles import Ring
from .forward_hopper_launch import descriptor, registers
from .launching import Launches, addresses

if TYPE_CHECKING:
    from .backward_launch import Prepared

__all__ = ["KEPT", "run_keys", "run_queries", "serves"]

KEPT = 128  # keys (or queries) that a program keeps: 64 for each of two warpgroups
_ROWS = 64
_SIZES = (64, 128)  # padded head dimensions


def serves(given: Prepared, narrow: bool) -> bool:
    """Whether the Hopper kernels compute this; what else there is stays with the kernels in plain Triton.

    Scales of single tokens, a soft cap and e4m3 in the sums over tokens want registers that these do not have.
    """
    per_token = given.q_varies or given.k_scale.shape[2] > 1 or given.v_scale.shape[2] > 1
    fits = given.head_dim in _SIZES and given.head_dim_v in _SIZES
    return not narrow and fits and forward.serves(given.spec, given.k.data.device, per_token=per_token)


def run_keys(given: Prepared, ring: Ring, dk_out: Tensor, dv_out: Tensor) -> None:
    """Writes dK (B, Hkv, Skv, D) and dV (B, Hkv, Skv, Dv), contiguous, on the current stream."""
    spec, do, rows = given.spec, given.gradient.laid, given.gradient.rows
    assert given.q.wide is not None
    assert do.wide is not None
    wide = _tiles(given.q.wide, ring.block)
    tiled = (
        _tiles(given.q.data, ring.block), _tiles(do.data, ring.block), _tiles(given.k.data, _ROWS),
        _tiles(given.v.data, _ROWS), wide, _tiles(do.wide, ring.block), _pieces(rows, ring.block),
        wide if given.turn is None else _tiles(given.turn[None], given.head_dim),
    )  # fmt: skip
    memory = rows, given.k_scale, given.v_scale, dk_out, dv_out
    constants = (
        *given.k_scale.stride()[:2], *given.v_scale.stride()[:2],
        spec.kv_heads, spec.seqlen_q, spec.seqlen_kv, rows.shape[2], given.k.data.shape[1], rows.stride(0),
        spec.head_dim, spec.head_dim_v, given.scale, given.exponent, given.before, given.after,
        spec.group, *_constants(given, ring),
    )  # fmt: skip
    # The descriptors' tiles are no constants of the call.
    alike = dk_out.dtype, ring.block, given.head_dim, given.head_dim_v
    grid = -(-spec.seqlen_kv // KEPT), spec.batch * spec.kv_heads, 1
    _launches("keys")(grid, constants, alike, **_options())((*tiled, *memory), addresses(memory))


def run_queries(given: Prepared, ring: Ring, dq_out: Tensor) -> None:
    """Writes dQ (B, H, Sq, D), contiguous, on the current stream."""
    spec, rows = given.spec, given.gradient.rows
    assert given.k.wide is not None
    wide = _tiles(given.k.wide, ring.block)
    tiled = (
        _tiles(given.q.data, _ROWS), _tiles(given.gradient.laid.data, _ROWS), _tiles(given.k.data, ring.block),
        _tiles(given.v.data, ring.block), wide,
        wide if given.turn is None else _tiles(given.turn[None], given.head_dim),
    )  # fmt: skip
    memory = rows, given.k_scale, given.v_scale, dq_out
    stages, *others = _constants(given, ring)
    constants = (
        *given.k_scale.stride()[:2], *given.v_scale.stride()[:2],
        spec.heads, spec.group, spec.seqlen_q, spec.seqlen_kv, rows.shape[2], given.k.data.shape[1], rows.stride(0),
        spec.head_dim, given.scale, given.exponent, given.before, given.after,
        stages, *others[:2], spec.seqlen_kv % ring.block != 0, *others[2:],
    )  # fmt: skip
    alike = dq_out.dtype, ring.block, given.head_dim, given.head_dim_v
    grid = -(-spec.seqlen_q // KEPT), spec.batch * spec.heads, 1
    _launches("queries")(grid, constants, alike, **_options())((*tiled, *memory), addresses(memory))


@cache
def _launches(kind: Literal["keys", "queries"]) -> Launches:
    from .backward_hopper_keys import key_gradients_hopper
    from .backward_hopper_queries import query_gradients_hopper

    return Launches(key_gradients_hopper if kind == "keys" else query_gradients_hopper)


def _constants(given: Prepared, ring: Ring) -> tuple[int | bool, ...]:
    """Stages, left and right edges, rotation, registers of a computing thread."""
    mask = given.spec.mask
    return ring.stages, mask.left is not None, mask.right is not None, given.turn is not None, registers()[1]


def _options() -> dict[str, int]:
    return {"num_warps": 4, "maxnreg": registers()[0]}


def _tiles(x: Tensor, tokens: int) -> Any:
    """Of x (H, S, D) as a matrix (H·S, D), by so many tokens."""
    return descriptor(x.view(-1, x.shape[2]), [tokens, x.shape[2]])


def _pieces(rows: Tensor, tokens: int) -> Any:
    """Of all vectors over the queries as one, by so many tokens."""
    return descriptor(rows.view(-1), [tokens])
