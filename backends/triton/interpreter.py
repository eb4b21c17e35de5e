"""Triton's interpreter, which stands in for a GPU: whether it is on, and that one thread uses it at a time."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from attnbench.kernels.capabilities import Device

__all__ = ["alone", "interpreted", "misplaced"]

_TURN = threading.RLock()
_FREE: AbstractContextManager[None] = nullcontext()


def interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU, which it decides where they are defined."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def misplaced(device: Device) -> list[str]:
    """Why no kernel runs there: a CPU without the interpreter, or a GPU with it, as at most one reason."""
    if device.type == "cpu" and not interpreted():
        return ["runs on a CPU under Triton's interpreter alone (TRITON_INTERPRET=1)"]
    if device.type == "cuda" and interpreted():
        return ["runs on no GPU while TRITON_INTERPRET is set, for Triton then computes on the CPU"]
    return []


def alone(device: torch.device) -> AbstractContextManager[Any]:
    """Around launches: on a CPU one thread at a time, for the interpreter changes ``triton.language`` while it runs."""
    return _TURN if device.type == "cpu" else _FREE
