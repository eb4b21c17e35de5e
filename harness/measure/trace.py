"""Which kernel really ran: the profiler's kernel names, compared with the pattern that a kernel declares."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from attnbench.kernels.contract import BackwardKernel, ForwardKernel

__all__ = ["LONGEST_NAME", "MOST_NAMES", "mismatch", "shorten_names", "trace_call"]

MOST_NAMES = 12
LONGEST_NAME = 160
_T = TypeVar("_T")
# From 2.13 on, torch's profiler writes a line about itself to standard error at every start and stop.  Silencing it
# is safe: if the profiler sees no kernel, no evidence is found.
os.environ.setdefault("KINETO_LOG_LEVEL", "7")


def trace_call(call: Callable[[], _T], device: torch.device) -> tuple[_T, list[str]]:
    """The call's result, and the names of what it ran, the longest-running first.

    On a GPU the names are those of device kernels and copies, on a CPU those of torch's operators.  The device is idle
    before and after.
    """
    gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if gpu else [ProfilerActivity.CPU]
    if gpu:
        torch.cuda.synchronize(device)
    with profile(activities=activities, acc_events=True) as profiler:
        result = call()
        if gpu:
            torch.cuda.synchronize(device)
    spent: dict[str, float] = {}
    for event in profiler.events() or ():
        if (event.device_type.name == "CUDA") == gpu:
            spent[event.name] = spent.get(event.name, 0.0) + event.time_range.elapsed_us()
    return result, sorted(spent, key=lambda name: -spent[name])


def mismatch(kernel: ForwardKernel | BackwardKernel, names: list[str], device_type: str) -> str | None:
    """Why the names are not those of this kernel; None if they are, or if it declares no evidence for the device."""
    evidence = kernel.evidence.get(device_type)
    if evidence is None or any(re.search(evidence, name) for name in names):
        return None
    ran = ", ".join(shorten_names(kernel, names, device_type)[:5]) or "nothing"
    return f"{kernel.name} did not run: nothing that ran matches {evidence!r}; what ran was {ran}"


def shorten_names(kernel: ForwardKernel | BackwardKernel, names: list[str], device_type: str) -> list[str]:
    """As many names as a record holds, those that match the evidence first."""
    evidence = kernel.evidence.get(device_type)
    ordered = sorted(names, key=lambda name: evidence is None or re.search(evidence, name) is None)
    return list(dict.fromkeys(name[:LONGEST_NAME] for name in ordered))[:MOST_NAMES]
