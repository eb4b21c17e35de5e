"""Kernels for a GPU, one of which synchronises with the device, so that no CUDA graph can capture it."""

from __future__ import annotations

import torch
from planted import REFERENCE, ROW, FakeForward, backend
from torch import Tensor

from attnbench.kernels.registry import Registry


class Recordable(FakeForward):
    def __init__(self, name: str, waits: bool = False) -> None:
        super().__init__(name, _waiting if waits else _launching)
        self.rows = {"cuda": ROW}


def _launching(out: Tensor) -> Tensor:
    """More short launches than a GPU's queue holds (1,024), so that the call is host-bound and a replay is tried."""
    for _ in range(2000):
        out = out * 1.0
    return out


def _waiting(out: Tensor) -> Tensor:
    out = _launching(out)
    torch.cuda.synchronize(out.device)
    return out


def recordable() -> Registry:
    """Two kernels that can be captured and one that synchronises, in one backend."""
    kernels = (Recordable(f"graph:bf16-{name}", name == "waits") for name in ("one", "waits", "two"))
    return Registry([REFERENCE, backend(*kernels)])
