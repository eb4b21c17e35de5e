"""From e4m3 operands to a launch of the forward kernel: matrices, factors, bounds, the order of programs.

Importing this imports Triton; ``triton`` (the module of the backend) does so only where a kernel runs.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnbench.kernel import Result, gradient_dtype
from attnbench.spec import AttentionSpec

from ..padding import padded, rounded_up
from . import forward_hopper_launch as hopper
from .forward_kernel import triton_fp8_attention_forward
from .launching import Launch, addresses
from .tiles import DEFAULTS, Tile, padded_size

__all__ = ["Native", "Operand", "attend", "interleaved", "laid_out", "retiled", "transposed"]

PADDING = 128  # keys of a transposed copy come in multiples of this
_VECTOR = 16  # bytes: TMA wants rows and matrices to start at multiples of it
_LEAST = 2.0**-85  # of V's descales: 2^8 over it, summed over 2^30 keys, stays within FP32
_L2 = 32 * 2**20  # bytes of K and V that programs which run together may share; an H200 has 50 MiB, not all for them


class Operand(NamedTuple):
    """A tensor (B, H, S, D) of e4m3, Q and K perhaps of 16 bits, or V's transposed copy (B, Hkv, Dv, keys), and its
    fp32 descale.

    The descale broadcasts to (B, H, S, 1), S being 1 where tokens share it.
    """

    data: Tensor
    descale: Tensor


class Matrix(NamedTuple):
    """An operand as the kernel reads it: head h of batch b starts at (b·by_batch + h·by_head, h·aside)."""

    data: Tensor
    by_batch: int
    by_head: int
    aside: int


class Factors(NamedTuple):
    """Descales (B, H, S or 1, 1), contiguous along S, with the strides of batch and head."""

    data: Tensor
    by_batch: int
    by_head: int
    per_token: bool


@dataclass(frozen=True)
class Native:
    """All that the kernel is called with, but its outputs.

    ``factors`` are Q's, K's and V's; where tokens have their own, V's are log2 of the descales, and ``inverses`` one
    over them.  ``launch`` knows the rest.
    """

    spec: AttentionSpec
    tile: Tile
    q: Matrix
    k: Matrix
    v: Tensor
    factors: tuple[Factors, Factors, Factors]
    inverses: Tensor
    pointers: tuple[Any, Any, Any]
    launch: Launch


def laid_out(spec: AttentionSpec, tile: Tile, q: Operand, k: Operand, v: Operand) -> Native:
    """What ``attend`` reads.  Q and K are copied only where their rows are no matrix that TMA could load.

    ``v.data`` is contiguous, its keys a multiple of 128 with zeros behind the last one, in the order that the tile
    wants.
    """
    size = padded_size(spec.head_dim)
    matrices = _matrix(q.data, size), _matrix(k.data, size)
    values = v.data.view(-1, v.data.shape[-1])
    by_query, by_key = _factors(q.descale, spec.batch, spec.heads), _factors(k.descale, spec.batch, spec.kv_heads)
    by_value = _factors(v.descale, spec.batch, spec.kv_heads)
    inverses = by_value.data
    if by_value.per_token:
        descales = inverses.contiguous().clamp_min(_LEAST)
        inverses = descales.reciprocal()
        by_value = _factors(descales.log2(), spec.batch, spec.kv_heads)
    factors = by_query, by_key, by_value
    return _native(spec, _served(spec, tile, factors), matrices, values, factors, inverses)


def retiled(native: Native, tile: Tile) -> Native:
    """The same with another tile; V's keys change their order where that tile wants another."""
    values, tile = native.v, _served(native.spec, tile, native.factors)
    if tile.interleaved != native.tile.interleaved:
        values = interleaved(values, back=native.tile.interleaved)
    return _native(native.spec, tile, (native.q, native.k), values, native.factors, native.inverses)


def transposed(x: Tensor) -> Tensor:
    """V (B, H, S, D) in e4m3 as (B, H, D, S rounded up to 128) with zeros behind; the same bits."""
    missing = rounded_up(x.shape[2], PADDING) - x.shape[2]
    return F.pad(x.view(torch.uint8).mT, (0, missing)).contiguous().view(x.dtype)


def interleaved(x: Tensor, *, back: bool = False) -> Tensor:
    """x (..., keys) with each 16 keys in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, or back from it.

    A thread that holds four keys of a row of scores holds 2t, 2t + 1, 2t + 8 and 2t + 9 (PTX ISA, the fragment of D
    of wgmma.m64nNk32), and as an operand 4t to 4t + 3 (that of A).  With V's keys in this order P need not be
    exchanged between threads.
    """
    axes = (4, 2, 2) if back else (2, 4, 2)
    return x.reshape(*x.shape[:-1], -1, *axes).transpose(-3, -2).reshape(x.shape)


def attend(native: Native) -> Result:
    """(out, lse): out (B, H, Sq, Dv) in the gradients' dtype, lse (B, H, Sq) fp32, on the current stream."""
    spec, tile = native.spec, native.tile
    device = native.v.device
    out = torch.empty(spec.batch, spec.heads, spec.seqlen_q, spec.head_dim_v, dtype=gradient_dtype(spec), device=device)
    lse = torch.empty(spec.batch, spec.heads, spec.seqlen_q, dtype=torch.float32, device=device)
    q, k, (by_query, by_key, by_value) = native.q, native.k, native.factors
    further = () if tile.hopper else (native.inverses,)
    given = out, lse, by_query.data, by_key.data, by_value.data, *further
    begins = addresses((q.data, k.data, native.v, *given))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        native.launch((*native.pointers, *given), begins)
    return Result(out, lse)


def _native(
    spec: AttentionSpec,
    tile: Tile,
    matrices: tuple[Matrix, Matrix],
    values: Tensor,
    factors: tuple[Factors, Factors, Factors],
    inverses: Tensor,
) -> Native:
    steps = tuple((each.by_batch, each.by_head, each.per_token) for each in factors)
    if tile.hopper:
        pointers = hopper.descriptors(tile, spec, matrices[0].data, matrices[1].data, values)
        places = tuple((each.by_batch, each.by_head, each.aside) for each in matrices)
        launch = hopper.launch(spec, tile, places, steps, _section(spec), values.device)
    else:
        pointers = _pointers(spec, tile, *matrices, values)
        shapes = tuple((*each[1:], each.data.stride(0), *each.data.shape) for each in matrices)
        launch = _launch(spec, tile, (*shapes, values.shape), steps, matrices[0].data.dtype)
    return Native(spec, tile, *matrices, values, factors, inverses, pointers, launch)


@lru_cache(maxsize=1024)
def _launch(
    spec: AttentionSpec, tile: Tile, shapes: tuple[Any, ...], steps: tuple[Any, ...], dtype: torch.dtype
) -> Launch:
    """The kernel on matrices of these places and shapes, Q and K of this type, and factors of these steps."""
    mask, offset = spec.mask, spec.mask.offset(spec.seqlen_q, spec.seqlen_kv)
    programs = spec.batch * spec.heads
    size, size_v = padded_size(spec.head_dim), padded_size(spec.head_dim_v)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.registers is not None:
        options["maxnreg"] = tile.registers
    constants = (
        spec.scale, spec.softcap or 1.0, *shapes[0], *shapes[1], *shapes[2],
        *(step for each in steps for step in each[:2]),
        spec.seqlen_q, spec.seqlen_kv, spec.head_dim_v, spec.heads, spec.group, programs, _section(spec),
        0 if mask.left is None else offset - mask.left, 0 if mask.right is None else offset + mask.right,
        tile.block_m, tile.block_n, size, size_v, tile.stages, tile.tma,
        mask.left is not None, mask.right is not None, spec.seqlen_kv % tile.block_n != 0,
        spec.head_dim_v == size_v, spec.softcap > 0, spec.scale < 0, *(each[2] for each in steps),
        tile.promotion, tile.parts, tile.interleaved,
    )  # fmt: skip
    grid = programs * -(-spec.seqlen_q // tile.block_m), 1, 1
    return Launch(triton_fp8_attention_forward, grid, constants, options)


def _served(spec: AttentionSpec, tile: Tile, factors: tuple[Factors, ...]) -> Tile:
    """The tile, or another for keys in the same order where it is the Hopper kernel's and that does not serve."""
    per_token = any(each.per_token for each in factors)
    if not tile.hopper or hopper.serves(spec, factors[0].data.device, per_token=per_token):
        return tile
    size = padded_size(max(spec.head_dim, spec.head_dim_v))
    return DEFAULTS[size]._replace(interleaved=tile.interleaved)


def _section(spec: AttentionSpec) -> int:
    """How many heads take turns.

    Without a right side every block of queries costs the same, and a head's blocks run together.  With one the
    longest blocks of many heads start first, as many heads as find their K and V in L2.
    """
    if spec.mask.right is None:
        return 1
    fitting = _L2 // (spec.seqlen_kv * (spec.head_dim + spec.head_dim_v))
    return min(spec.batch * spec.heads, max(1, fitting) * spec.group)


def _factors(descale: Tensor, batch: int, heads: int) -> Factors:
    data = descale.to(torch.float32)
    if data.shape[:2] != (batch, heads):
        data = data.expand(batch, heads, -1, 1)
    if data.shape[2] > 1 and data.stride(2) != 1:
        data = data.contiguous()
    return Factors(data, data.stride(0), data.stride(1), data.shape[2] > 1)


def _matrix(x: Tensor, size: int) -> Matrix:
    """x (B, H, S, D) as a matrix of rows: (B · H · S, D), or (B · S, H · D) where heads lie side by side."""
    batch, heads, length, width = x.shape
    if x.stride(3) == 1 and x.data_ptr() % _VECTOR == 0:
        stride = x.stride(2) if length > 1 else rounded_up(width, _VECTOR)
        if _steps(x, heads * length * stride, length * stride, stride) and stride >= width and not stride % _VECTOR:
            rows = x.as_strided((batch * heads * length, width), (stride, 1))
            return Matrix(rows, heads * length, length, 0)
        aside = x.stride(1) if heads > 1 else width
        # A tile is as wide as the padded size, so what is beside a narrower head would be read as its own.
        beside = width == size and aside >= width and not aside % _VECTOR and (heads - 1) * aside + width <= stride
        if beside and _steps(x, length * stride, aside, stride) and not stride % _VECTOR:
            rows = x.as_strided((batch * length, (heads - 1) * aside + width), (stride, 1))
            return Matrix(rows, length, 0, aside)
    whole = padded(x, rounded_up(width, _VECTOR))
    return _matrix(whole.clone(memory_format=torch.contiguous_format), size)


def _steps(x: Tensor, *expected: int) -> bool:
    """Whether the strides of batch, head and token are these, wherever there is more than one."""
    sizes = zip(x.shape, x.stride(), expected, strict=False)
    return all(size == 1 or stride == step for size, stride, step in sizes)


def _pointers(spec: AttentionSpec, tile: Tile, q: Matrix, k: Matrix, v: Tensor) -> tuple[Any, Any, Any]:
    if not tile.tma:
        return q.data, k.data, v
    size, size_v = padded_size(spec.head_dim), padded_size(spec.head_dim_v)
    return (
        TensorDescriptor.from_tensor(q.data, [tile.block_m, size]),
        TensorDescriptor.from_tensor(k.data, [tile.block_n, size]),
        TensorDescriptor.from_tensor(v, [size_v // tile.parts, tile.block_n]),
    )
