"""What no CUDA kernel of torch's scaled_dot_product_attention, nor of the libraries that it was taken from, can do."""

from __future__ import annotations

import torch

from attnbench.kernels.capabilities import Device
from attnbench.problem.spec import AttentionSpec

__all__ = ["cuda_refusals"]

_MAX_GRID = 65535  # CUDA's limit for the grid dimensions that batch and heads are spread over


def cuda_refusals(spec: AttentionSpec, device: Device) -> list[str]:
    """A torch without CUDA, and more batches or heads than a grid holds; empty on other devices."""
    if device.type != "cuda":
        return []
    if torch.version.cuda is None:
        return [f"is known on NVIDIA GPUs only, and torch {torch.__version__} was built without CUDA"]
    if max(spec.batch, spec.heads) > _MAX_GRID:
        return [f"takes at most {_MAX_GRID} batches and heads"]
    return []
