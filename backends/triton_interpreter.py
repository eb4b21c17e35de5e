"""Triton's interpreter, which stands in for a GPU: whether it is on, and that one thread uses it at a time."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["alone", "interpreted"]

_TURN = threading.RLock()


def interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU, which it decides where they are defined."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def alone(device: torch.device) -> AbstractContextManager[Any]:
    """Around launches: on a CPU one thread at a time, for the interpreter changes ``triton.language`` while it runs."""
    return _TURN if device.type == "cpu" else nullcontext()
