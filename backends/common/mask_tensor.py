"""A mask as a tensor that is added to the scores, for kernels that take no description of it."""

from __future__ import annotations

import math
from functools import lru_cache, partial

import torch
from torch import Tensor

from attnbench.graph_pools import current_stream, outside_pools, recording
from attnbench.problem.mask import Mask

__all__ = ["MAX_SCORES", "dense_mask"]

MAX_SCORES = 2**31  # elements of a matrix with one entry a (query, key) pair: 4 GiB of bf16, 8 GiB of fp32
_LARGEST_KEPT = 2**24  # elements of a mask that stays for the next call; a larger one is memory that others want


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
