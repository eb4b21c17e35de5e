"""Refuse impossible configurations before anything is trained, not after the baseline has run."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnbench.errors import InputError

from ..config import SDPA, TrainConfig
from ..models.attention import Attend
from ..models.gpt import gpt_size
from ..models.linears import refusal
from ..models.vit_sizes import VIT_SIZES
from ..models.vit_te import te_block

__all__ = ["check_beforehand"]


class _Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    is_causal: bool


def check_beforehand(config: TrainConfig, device: torch.device) -> list[str]:
    """The plans of its attention; raises what building the model or its first attention would, without memory or time.

    The attention of a transformers config is only known once it is built, and is not checked here.  Raises InputError
    on shared samples, linears or a block that the device or a missing package cannot serve, and what
    ``attnbench.explain`` raises on an attention that cannot be had.
    """
    if reason := refusal(config.linears, device):
        raise InputError(reason)
    if config.context_parallel > 1 and config.attention == SDPA and device.type != "cuda":
        raise InputError("torch's context parallelism runs on GPUs alone; compare with bf16")
    if config.block == "te":
        te_block(device)
        return []
    shape = _shape(config)
    if shape is None:
        return []
    dtype = torch.float32 if config.policy == "fp32" else torch.bfloat16
    one = torch.empty(1, 1, 1, 1, dtype=dtype, device=device, requires_grad=True)
    heads = shape.heads, shape.kv_heads, shape.kv_heads
    if config.packing == "packed":
        q, k, v = (one.expand(1, each, config.batch * config.seqlen, shape.head_dim) for each in heads)
        starts = torch.arange(0, q.shape[2] + 1, config.seqlen, dtype=torch.int32, device=device)
        return Attend(config).plans(q, k, v, shape.is_causal, starts)
    q, k, v = (one.expand(config.batch, each, config.places, shape.head_dim) for each in heads)
    return Attend(config).plans(q, k, v, shape.is_causal)


def _shape(config: TrainConfig) -> _Shape | None:
    if config.model == "gpt":
        gpt = gpt_size(config)
        return _Shape(gpt.heads, gpt.kv_heads, gpt.head_dim, True)
    if config.model == "vit-huge":
        vit = VIT_SIZES[config.size]
        return _Shape(vit.heads, vit.heads, vit.head_dim, False)
    return None
