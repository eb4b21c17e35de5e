"""What calls do on a GPU: device time in turns, for ratios within one test, and the kernels that run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

_AHEAD = 2_000_000  # cycles: the host is ahead then, so that launches cost no device time
_WARM = 3


def in_turns(calls: Sequence[Callable[[], object]], rounds: int = 30) -> list[float]:
    """Median milliseconds of each call, by CUDA events."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + _WARM):
        for call, taken in zip(calls, times, strict=True):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_AHEAD)
            start.record()
            call()
            stop.record()
            torch.cuda.synchronize()
            if turn >= _WARM:
                taken.append(start.elapsed_time(stop))
    return [sorted(taken)[len(taken) // 2] for taken in times]


def kernels_of(call: Callable[[], object]) -> list[str]:
    """The names of what runs on the GPU in a call, each once."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sorted({event.key for event in seen.key_averages()})
