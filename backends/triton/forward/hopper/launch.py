"""From e4m3 operands to a launch of the Hopper kernel.  Imports no Gluon before ``serves`` is asked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from attnbench.kernels.devices import describe
from attnbench.problem.spec import AttentionSpec

from ...descriptors import Described
from ...launching import Launch
from ..extent import Extent
from ..tiles import Tile, chunks_of, padded_size

__all__ = [
    "BLOCK_M",
    "ROWS",
    "described",
    "launch",
    "part_of",
    "programs_of",
    "recent",
    "registers",
    "runs_on",
    "serves",
]

ROWS = 64  # queries of a warpgroup
_CONSUMERS = 2  # warpgroups that compute
BLOCK_M = _CONSUMERS * ROWS
_LEAST = (3, 6)  # of Triton: Gluon's interface changes from release to release
_SWIZZLE = 128  # bytes: the widest pattern in which shared memory is read without conflicts
_LOADER = 24  # registers of a thread that loads, as few as there can be
_REGISTERS = 64 * 1024  # of a multiprocessor


def serves(spec: AttentionSpec, *, per_token: bool) -> bool:
    """Whether the Hopper kernel supports this; ``forward.kernel`` computes the rest.

    Scales of tokens (``per_token``) need a product more a score and registers that it does not have, a negative scale
    the least scores.
    """
    return spec.scale >= 0 and not per_token


def runs_on(device: torch.device) -> bool:
    """Whether Gluon's kernels for Hopper run there."""
    return device.type == "cuda" and describe(device).capability == (9, 0) and recent()


def launch(
    spec: AttentionSpec, tile: Tile, places: tuple[Any, ...], steps: tuple[Any, ...], section: int, extent: Extent,
    device: torch.device,
) -> Launch:  # fmt: skip
    """The kernel on matrices at these ``places`` (by batch entry, by head, aside) and factors at these ``steps``."""
    from .kernel import triton_fp8_attention_forward_hopper

    mask, unequal = spec.mask, extent.sequences is not None
    offset = 0 if unequal else mask.offset(spec.seqlen_q, spec.seqlen_kv)
    programs = spec.heads if unequal else spec.batch * spec.heads
    even, most = registers()
    chunks, chunks_v = chunks_of(spec.head_dim), chunks_of(spec.head_dim_v)
    constants = (
        spec.scale, spec.softcap or 1.0, *places[0], *places[1], *(step for each in steps for step in each[:2]),
        extent.seqlen_q, extent.seqlen_kv, spec.head_dim_v, spec.heads, spec.group, programs, section,
        0 if mask.left is None else offset - mask.left, 0 if mask.right is None else offset + mask.right,
        tile.stages, spec.head_dim, chunks.number, chunks_v.number, part_of(tile, spec.head_dim_v), tile.turns,
        mask.left is not None, mask.right is not None, spec.head_dim_v == chunks_v.size, spec.head_dim_v % 16 == 8,
        tile.registers or most,
        unequal and mask.alignment == "bottom-right", spec.softcap > 0,
    )  # fmt: skip
    tiles = spec.heads * extent.tiles(BLOCK_M)
    grid = programs_of(tile, tiles, None if unequal else spec.seqlen_kv, _multiprocessors(device)), 1, 1
    return Launch(triton_fp8_attention_forward_hopper, grid, constants, {"num_warps": 4, "maxnreg": even})


def part_of(tile: Tile, size_v: int) -> int:
    """How many of V's columns P·V is computed for at a time: no more than a chunk has."""
    return min(chunks_of(size_v).width, padded_size(size_v) // tile.parts)


def programs_of(tile: Tile, tiles: int, seqlen_kv: int | None, multiprocessors: int) -> int:
    """One for each of so many ``tiles`` of queries where those are to be alone, else as many as run at once.

    Those of a table (``seqlen_kv`` None) are dealt by a counter, which balances them better.
    """
    alone = tile.alone_from is not None and seqlen_kv is not None and seqlen_kv >= tile.alone_from
    return tiles if alone else min(tiles, multiprocessors)


def registers() -> tuple[int, int]:
    """A thread's registers at the start and of a computing thread later, in eights; the loading warp counts as four."""
    warpgroups = _CONSUMERS + 1
    even = _REGISTERS // (128 * warpgroups) // 8 * 8
    return even, min(240, (even * warpgroups - _LOADER) // _CONSUMERS // 8 * 8)


def described(shape: Sequence[int], block: Sequence[int], strides: Sequence[int] | None = None) -> Described:
    """Descriptors of a vector or a matrix of this shape, by blocks of this one."""
    return Described(_descriptor, shape, block, strides)


def _descriptor(x: Tensor, block: list[int]) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    size = x.element_size()
    return TensorDescriptor.from_tensor(x, block, _layout(block[-1] * size if len(block) > 1 else 0, size, len(block)))


@cache
def _layout(width: int, size: int, rank: int) -> Any:
    """Of a block in shared memory whose rows are ``width`` bytes, elements ``size`` of them."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=min(width, _SWIZZLE), element_bitwidth=8 * size, rank=rank)


@cache
def recent() -> bool:
    """Whether the kernels in Gluon are for the Triton that is installed."""
    release = triton.__version__.split(".")[:2]
    return all(part.isdigit() for part in release) and tuple(map(int, release)) >= _LEAST


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
