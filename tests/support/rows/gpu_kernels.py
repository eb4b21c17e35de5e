"""The kernels that run in a call on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def kernels_of(call: Callable[[], object]) -> list[str]:
    """The names of what runs on the GPU in a call, each once."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sorted({event.key for event in seen.key_averages()})
