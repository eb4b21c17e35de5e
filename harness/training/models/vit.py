"""``vit-huge``: timm's VisionTransformer with the article's sizes, its attention replaced layer by layer.

The article is C. Rand, "Accelerating PyTorch Training Workloads with FP8" (Towards Data Science, 2023): random images,
cross-entropy over 1000 classes, width 1280, 32 blocks of 16 heads.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.errors import InputError

from .attention import AttentionCore
from .vit_sizes import VitSize

__all__ = ["Vit", "make_vit"]

_INSTALL = "pip install 'timm>=1'"


class Vit(nn.Module):
    """Images (B, 3, P, P) and labels (B,) to their loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy, an fp32 scalar."""
        logits = self.model(images.to(self.model.patch_embed.proj.weight.dtype))
        return F.cross_entropy(logits.float(), labels)

    @property
    def blocks(self) -> list[nn.Module]:
        """The transformer's blocks, in order."""
        return list(self.model.blocks)


class _Attention(nn.Module):
    """timm's attention with the same projections, under the same names, around another core."""

    def __init__(self, old: Any, core: AttentionCore) -> None:
        super().__init__()
        self._heads = old.num_heads
        self.qkv, self.proj, self.core = old.qkv, old.proj, core

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None:
            raise InputError("vit-huge's attention takes no mask tensor")
        q, k, v = self.qkv(x).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(self.core(q, k, v, is_causal).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def make_vit(
    size: VitSize, device: torch.device, seed: int, core: Callable[[], AttentionCore] | None, **options: Any
) -> Vit:
    """The model with fp32 weights that timm draws on the device from the seed.

    With ``core`` None each block keeps its own attention; ``options`` go to timm's constructor (``block_fn``).  Raises
    InputError if timm is missing.
    """
    try:
        timm = import_module("timm.models.vision_transformer")
    except ImportError as error:
        raise InputError(f"vit-huge is timm's model, which cannot be imported ({error}): {_INSTALL}") from None
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model: Any = timm.VisionTransformer(
            img_size=size.pixels,
            patch_size=size.patch,
            num_classes=size.classes,
            embed_dim=size.width,
            depth=size.depth,
            num_heads=size.heads,
            **options,
        )
    if core is not None:
        for block in model.blocks:
            block.attn = _Attention(block.attn, core())
    return Vit(model)
