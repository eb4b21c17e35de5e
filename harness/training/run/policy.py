"""What is kept and computed in which type, by the names that the question of mixed precision is asked in.

==================  ==========  =========================  ==========================================
policy              weights     forward and backward       optimiser
==================  ==========  =========================  ==========================================
``bf16``            bf16        bf16                       updates the bf16 weights, state in bf16
``autocast``        fp32        bf16 by torch.autocast     updates the fp32 weights
``fp32-and-bf16``   bf16        bf16                       updates fp32 copies, copied to the weights
``fsdp-mixed``      fp32 shard  bf16, gathered so          updates the fp32 shards; gradients are summed in fp32
``fp32``            fp32        fp32 (TF32 is left alone)  updates the fp32 weights
==================  ==========  =========================  ==========================================

The loss is in fp32 under all of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..config import TrainConfig

__all__ = ["cast_weights", "policy_context", "sharding_policy"]


@torch.no_grad()
def cast_weights(module: nn.Module, config: TrainConfig) -> None:
    """Cast fp32 parameters to the policy's dtype; buffers (such as rotary frequencies) stay as they are."""
    if config.policy in ("bf16", "fp32-and-bf16"):
        for parameter in module.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)


def policy_context(config: TrainConfig, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a forward pass."""
    if config.policy != "autocast":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def sharding_policy(config: TrainConfig) -> Any:
    """FSDP2's MixedPrecisionPolicy: bf16 gathered and fp32 reduced for ``fsdp-mixed``, no casts for the others.

    bf16 gradients with an fp32 optimiser are summed over ranks in fp32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if config.policy == "fsdp-mixed":
        # Blocks get bf16 from the bf16 embedding.  Casting what else they are given would round the angles of rotary
        # embeddings, which no other policy does.
        return MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if config.policy == "fp32-and-bf16":
        return MixedPrecisionPolicy(reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()
