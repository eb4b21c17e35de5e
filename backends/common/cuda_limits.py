"""What torch's CUDA kernels cannot do, nor those of the libraries that torch took them from."""

from __future__ import annotations

import torch

from attnbench.kernels.capabilities import Device
from attnbench.problem.spec import AttentionSpec

__all__ = ["cuda_refusals", "entry_refusals"]

_MAX_GRID = 65535  # CUDA's limit for the grid dimensions that batch and heads are spread over
_INT32 = 2**31 - 1


def cuda_refusals(spec: AttentionSpec, device: Device) -> list[str]:
    """A torch without CUDA, and more batches or heads than a grid holds; empty on other devices."""
    if device.type != "cuda":
        return []
    if torch.version.cuda is None:
        return [f"is known on NVIDIA GPUs only, and torch {torch.__version__} was built without CUDA"]
    if max(spec.batch, spec.heads) > _MAX_GRID:
        return [f"takes at most {_MAX_GRID} batches and heads"]
    return []


def entry_refusals(spec: AttentionSpec, device: Device, kv_heads: int) -> list[str]:
    """For a kernel that counts the elements of a batch entry in 32 bits: that there are more.

    ``kv_heads``: heads of K and V as the kernel reads them.  Seen on an H200 with torch 2.11: of 2.2·10⁹ elements
    (270,336 keys, 64 heads of 128, the heads of a token side by side) ``sdpa-efficient`` and ``flex`` read memory
    outside the tensors; ``sdpa-efficient`` returned wrong results without an error for every head that begins 2³²
    elements behind the first (131,072 keys, 128 heads of 576).
    """
    packed = spec.lengths is not None and spec.lengths.batch == "packed"
    queries, keys = spec.tokens if packed else (spec.seqlen_q, spec.seqlen_kv)
    largest = max(queries * spec.heads, keys * kv_heads) * max(spec.head_dim, spec.head_dim_v)
    if device.type != "cuda" or largest <= _INT32:
        return []
    return [f"counts at most {_INT32} elements of a batch entry, the largest has {largest}"]
