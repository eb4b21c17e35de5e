"""From e4m3 operands to a launch of the Hopper kernel: what it serves, descriptors, how many programs run at once.

Importing this imports no Gluon: ``serves`` is asked first.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from attnbench.spec import AttentionSpec

from .tiles import Tile, padded_size

if TYPE_CHECKING:
    from .forward import Native

__all__ = ["BLOCK_M", "descriptors", "launch", "programs_of", "registers", "serves"]

_ROWS = 64  # queries of a warpgroup
_CONSUMERS = 2  # warpgroups that compute
BLOCK_M = _CONSUMERS * _ROWS
_LEAST = (3, 6)  # of Triton: Gluon's interface changes from release to release
_SWIZZLE = 128  # bytes: the widest pattern in which shared memory is read without conflicts
_LOADER = 24  # registers of a thread that loads, as few as there can be
_REGISTERS = 64 * 1024  # of a multiprocessor


def serves(spec: AttentionSpec, device: torch.device, *, per_token: bool) -> bool:
    """Whether the Hopper kernel computes this; what else there is stays with the kernel in ``forward_kernel``.

    ``per_token`` says that tokens of Q, K or V have scales of their own: a product more a score, and registers that
    the Hopper kernel does not have.  A soft cap asks for a second exponential, and a negative scale for least scores.
    """
    return spec.softcap == 0 and spec.scale >= 0 and not per_token and _hopper(device)


def descriptors(tile: Tile, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, Any, Any]:
    """Of Q, by a warpgroup's rows, and of K and V, by blocks of keys."""
    size, size_v = padded_size(spec.head_dim), padded_size(spec.head_dim_v)
    return (
        _descriptor(q, [_ROWS, size]),
        _descriptor(k, [tile.block_n, size]),
        _descriptor(v, [size_v, tile.block_n]),
    )


def launch(native: Native, out: Tensor, lse: Tensor, section: int) -> None:
    """Starts the kernel on the current stream of the current device, which is that of ``out``."""
    from .forward_hopper import triton_fp8_attention_forward_hopper

    spec, tile, q, k = native.spec, native.tile, native.q, native.k
    by_query, by_key, by_value = native.factors
    mask, offset = spec.mask, spec.mask.offset(spec.seqlen_q, spec.seqlen_kv)
    even, most = registers()
    triton_fp8_attention_forward_hopper[(programs_of(tile, spec, _multiprocessors(out.device)),)](
        *native.pointers, out, lse, by_query.data, by_key.data, by_value.data, spec.scale,
        q.by_batch, q.by_head, q.aside, k.by_batch, k.by_head, k.aside,
        by_query.by_batch, by_query.by_head, by_key.by_batch, by_key.by_head, by_value.by_batch, by_value.by_head,
        spec.seqlen_q, spec.seqlen_kv, spec.head_dim_v, spec.heads, spec.group, spec.batch * spec.heads, section,
        0 if mask.left is None else offset - mask.left, 0 if mask.right is None else offset + mask.right,
        stages=tile.stages, parts=tile.parts, turns=tile.turns,
        left=mask.left is not None, right=mask.right is not None,
        full_width=spec.head_dim_v == padded_size(spec.head_dim_v), registers=tile.registers or most,
        num_warps=4, maxnreg=even,
    )  # fmt: skip


def programs_of(tile: Tile, spec: AttentionSpec, multiprocessors: int) -> int:
    """One for each tile of queries where those are to be alone, else as many as run at once."""
    tiles = spec.batch * spec.heads * -(-spec.seqlen_q // BLOCK_M)
    alone = tile.alone_from is not None and spec.seqlen_kv >= tile.alone_from
    return tiles if alone else min(tiles, multiprocessors)


def registers() -> tuple[int, int]:
    """A thread's registers when the kernel starts, and a computing one's afterwards, in eights.

    The loading warp counts as four: registers are dealt to warpgroups.
    """
    warpgroups = _CONSUMERS + 1
    even = _REGISTERS // (128 * warpgroups) // 8 * 8
    return even, min(240, (even * warpgroups - _LOADER) // _CONSUMERS // 8 * 8)


def _descriptor(x: Tensor, block: list[int]) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=min(block[1], _SWIZZLE), element_bitwidth=8, rank=2)
    return TensorDescriptor.from_tensor(x, block, layout)


def _hopper(device: torch.device) -> bool:
    """Whether Gluon's kernels for Hopper run there."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    release = triton.__version__.split(".")[:2]
    return all(part.isdigit() for part in release) and tuple(map(int, release)) >= _LEAST


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
