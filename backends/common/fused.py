"""What torch's SDPA kernels share: declared errors, the layout they read, masks as tensors, CUDA's common limits."""

from __future__ import annotations

import math
from functools import lru_cache, partial

import torch
from torch import Tensor

from attnbench.graph_pools import current_stream, outside_pools, recording
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import Availability
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

__all__ = [
    "DECLARED_ERROR",
    "DECLARED_GRADIENT_ERROR",
    "MAX_SCORES",
    "aligned",
    "availability",
    "cuda_availability",
    "cuda_refusals",
    "dense_mask",
]

# Relative L2 of out, and of the worst of dq, dk and dv, of kernels that compute in the type of the tensors and add up
# in FP32 or wider.  Seen on normal inputs, on an H200 in bf16 and on a CPU in the others: up to 0.0024 and 0.0035 in
# bf16, 0.00028 and 0.0004 in fp16, 5e-7 and 7e-7 in fp32 and 4e-15 and 2e-15 in fp64, these two with 8192 keys.
DECLARED_ERROR = {"fp64": 1e-14, "fp32": 1e-6, "bf16": 0.003, "fp16": 0.0004}
DECLARED_GRADIENT_ERROR = {"fp64": 1e-14, "fp32": 1.2e-6, "bf16": 0.004, "fp16": 0.0005}
MAX_SCORES = 2**31  # elements of a matrix with one entry a (query, key) pair: 4 GiB of bf16, 8 GiB of fp32
_LARGEST_KEPT = 2**24  # elements of a mask that stays for the next call; a larger one is memory that others want
_MAX_GRID = 65535  # CUDA's limit for the grid dimensions that batch and heads are spread over


def availability() -> Availability:
    """torch itself, which is always there."""
    return Availability(version=torch.__version__, origin="torch")


def cuda_availability() -> Availability:
    """torch, where it was built with CUDA."""
    if torch.version.cuda is None:
        return Availability(reason=f"torch {torch.__version__} was built without CUDA", origin="torch")
    return availability()


def cuda_refusals(spec: AttentionSpec, device: Device) -> list[str]:
    """What no CUDA kernel of torch's SDPA can do; empty on other devices."""
    if device.type != "cuda":
        return []
    if torch.version.cuda is None:
        return [f"is known on NVIDIA GPUs only, and torch {torch.__version__} was built without CUDA"]
    if max(spec.batch, spec.heads) > _MAX_GRID:
        return [f"takes at most {_MAX_GRID} batches and heads"]
    return []


def aligned(x: Tensor, vector: int = 16) -> Tensor:
    """x (B, H, S, D) as it is where rows can be read ``vector`` bytes at a time, else a copy laid out (B, S, H, D).

    Kernels load vectors without checking: rows must be contiguous, and rows and storage start at a multiple of them.
    """
    step = max(1, vector // x.element_size())
    batch, head, token, last = x.stride()
    if last == 1 and not (batch % step or head % step or token % step or x.data_ptr() % vector):
        return x  # as most are: what follows takes three times as long
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    contiguous = x.stride(-1) == 1 or x.shape[-1] == 1
    if contiguous and not any(stride % step for stride in strides) and x.data_ptr() % vector == 0:
        return x
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def dense_mask(mask: Mask, seqlen_q: int, seqlen_kv: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """What is added to the scores: (Sq, Skv), 0 where a key is seen and minus infinity where not; None for no mask."""
    if mask.kind == "none":
        return None
    # A graph makes its own: one that it only reads would have to be kept as long as the graph is.
    if seqlen_q * seqlen_kv > _LARGEST_KEPT or recording():
        return _mask(mask, seqlen_q, seqlen_kv, dtype, device)
    return _kept_mask(mask, seqlen_q, seqlen_kv, dtype, device, current_stream(device))


@lru_cache(maxsize=8)
def _kept_mask(
    mask: Mask, seqlen_q: int, seqlen_kv: int, dtype: torch.dtype, device: torch.device, stream: int
) -> Tensor:
    """For this stream, which has made it before it reads it, and reads it before its memory is used again."""
    return outside_pools(partial(_mask, mask, seqlen_q, seqlen_kv, dtype, device), device)


def _mask(mask: Mask, seqlen_q: int, seqlen_kv: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    hidden = mask.hidden(
        torch.arange(seqlen_q, device=device), torch.arange(seqlen_kv, device=device), seqlen_q, seqlen_kv
    )
    assert hidden is not None, "made for masks that hide something"
    return torch.zeros(seqlen_q, seqlen_kv, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)
