"""FP32 products in FP32, whatever shorter type the program allows for them: an error is declared for one arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["full_fp32"]


@contextmanager
def full_fp32() -> Iterator[None]:
    """Within the block, matrix products of FP32 tensors use neither TF32 nor bf16; afterwards what was set before.

    ``torch.get_float32_matmul_precision`` raises once a program has set a backend's own ``fp32_precision``, so
    these are read and set here: that call sets them too.
    """
    matmuls: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = [each.fp32_precision for each in matmuls]
    for each in matmuls:
        each.fp32_precision = "ieee"
    try:
        yield
    finally:
        for each, precision in zip(matmuls, before, strict=True):
            each.fp32_precision = precision
