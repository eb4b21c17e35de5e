"""The short names of the design beside torch's own dtypes."""

from __future__ import annotations

import torch

__all__ = ["FROM_TORCH", "TO_TORCH"]

TO_TORCH: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
FROM_TORCH = {dtype: name for name, dtype in TO_TORCH.items()}
