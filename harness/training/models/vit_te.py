"""The article's other block: TransformerEngine's TransformerLayer in place of timm's.

The article leaves the layer's mask and axis order at their defaults, causal and (S, B, E), and so attends causally over
the batch.  Here it computes what timm's block computes: no mask, over (B, S, E).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnbench.errors import InputError

from .linears import transformer_engine

__all__ = ["te_block"]


def te_block(device: torch.device) -> type[nn.Module]:
    """A class with the constructor of timm's blocks.  Raises InputError without a GPU or TransformerEngine."""
    if device.type != "cuda":
        raise InputError(f"block=te is TransformerEngine's, which needs a GPU, and this is {device}")
    te = transformer_engine()

    class TeBlock(te.TransformerLayer):  # type: ignore[misc, name-defined]
        """TransformerEngine's layer, called as timm calls a block."""

        def __init__(self, dim: int, num_heads: int, mlp_ratio: float = 4.0, **_: Any) -> None:
            super().__init__(
                hidden_size=dim,
                ffn_hidden_size=int(dim * mlp_ratio),
                num_attention_heads=num_heads,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                self_attn_mask_type="no_mask",
                attn_input_format="bshd",
            )

        def forward(self, x: Tensor, **_: Any) -> Tensor:
            """(B, S, E) to the same."""
            out: Tensor = super().forward(x)
            return out

    return TeBlock
