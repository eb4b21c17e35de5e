"""SageAttention's operands (INT8 rows, e4m3 channels of V), dequantised only for a backward or a floor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.problem.fp8 import Quantised

__all__ = ["BY_THREAD_K", "BY_THREAD_Q", "Channels", "Rows", "row_scales"]

# Which scale of its block a row has, where the rows that one thread holds share one (quant_per_thread.py of 2.2,
# qk_int_sv_f8_cuda_sm90.cu): 64 queries are 4 warps of 8 threads with rows 8 apart, 128 keys are 4 threads with pairs.
BY_THREAD_Q = tuple(row // 16 * 8 + row % 8 for row in range(64))
BY_THREAD_K = tuple(row % 8 // 2 for row in range(128))
# Which token stands where in each 16 of V's rows (per_channel_fp8 in sageattention/quant.py).
_PLACES = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


def row_scales(scale: Tensor, order: tuple[int, ...], length: int) -> Tensor:
    """The scale of each row (B, H, S, 1), from (B, H, blocks × scales a block); ``order`` has an entry for each row."""
    rows = torch.arange(length, device=scale.device)
    each = torch.tensor(order, device=scale.device)
    which = rows // len(order) * (max(order) + 1) + each[rows % len(order)]
    return scale[:, :, which].unsqueeze(-1)


@dataclass(frozen=True)
class Rows(Quantised):
    """INT8 ``data`` (B, H, S, D) with ``descale`` (B, H, blocks × scales a block) in fp32, assigned to rows by
    ``order``.

    ``folded`` is the factor applied before quantising.
    """

    order: tuple[int, ...] = (0,)
    folded: float = 1.0

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """What the tensor stands for, (B, H, S, D) in ``dtype``, computed in fp32 (fp64 for fp64)."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scale = row_scales(self.descale.to(wide), self.order, self.data.shape[2])
        value = self.data.to(wide) * (scale / self.folded)
        return (value if self.mean is None else value + self.mean.to(wide)).to(dtype)


@dataclass(frozen=True)
class Channels(Quantised):
    """e4m3 ``data`` (B, Hkv, D, padded S), each 16 tokens in the kernel's order; ``descale`` (B, Hkv, D) in fp32."""

    shape: tuple[int, int] = (1, 1)  # tokens and channels without the padding

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """What the tensor stands for, (B, Hkv, S, D) in ``dtype``, computed in fp32 (fp64 for fp64)."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        length, channels = self.shape
        stored = self.data[:, :, :channels].to(wide) * self.descale[:, :, :channels, None].to(wide)
        stored = stored.reshape(*stored.shape[:3], -1, 16)
        tokens = torch.empty_like(stored)
        tokens[..., list(_PLACES)] = stored
        value: Tensor = tokens.flatten(-2)[..., :length].mT
        return value.to(dtype)
