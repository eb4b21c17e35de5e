"""Measure attention's share of a training step with the profiler, forward and backward.

Hooks around the modules that contain only attention open and close ranges; whatever runs in an open range is
attention's.  A compiled model would have to be compiled again for such hooks, so there the operators of attention
(attnbench's own and torch's) are the ranges.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from ...measure.trace import LONGEST_NAME, MOST_NAMES  # which also keeps torch's profiler from talking
from ..rows import Share

__all__ = ["share_of_attention"]

_STEP = "attnbench training step"
_FORWARD, _BACKWARD = "attnbench attention forward", "attnbench attention backward"
_OPERATORS = {
    "forward": re.compile(r"attnbench::attention|aten::_?scaled_dot_product_\w*attention(_for_cpu)?"),
    "backward": re.compile(r"attnbench::attention_backward|aten::_scaled_dot_product_\w*_backward"),
}


def share_of_attention(
    steps: Sequence[Callable[[], None]], modules: Sequence[nn.Module], device: torch.device, *, compiled: bool
) -> Share | None:
    """Run the steps under the profiler; None if it recorded nothing, or nothing of attention."""
    gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if gpu else [ProfilerActivity.CPU]
    with _ranges([] if compiled else modules), profile(activities=activities, acc_events=True) as profiler:
        for step in steps:
            with record_function(_STEP):
                step()
        if gpu:
            torch.cuda.synchronize(device)
    events = list(profiler.events() or ())
    spent = {side: _Spent(gpu) for side in ("forward", "backward")}
    for event in events:
        side = _side(event, compiled)
        if side is not None:
            spent[side].add(event, compiled)
    busy_us = _busy_us(events) if gpu else sum(event.time_range.elapsed_us() for event in events if event.name == _STEP)
    forward, backward = spent["forward"].us, spent["backward"].us
    if not busy_us or not forward + backward:
        return None
    names: dict[str, float] = {}
    for each in spent.values():
        for name, us in each.names.items():
            names[name] = names.get(name, 0.0) + us
    return Share(
        steps=len(steps),
        forward_ms=forward / 1e3 / len(steps),
        backward_ms=backward / 1e3 / len(steps),
        busy_ms=busy_us / 1e3 / len(steps),
        share=min(1.0, (forward + backward) / busy_us),
        kernels=[name[:LONGEST_NAME] for name in sorted(names, key=lambda name: -names[name])][:MOST_NAMES],
    )


@contextmanager
def _ranges(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Name every forward and backward of the modules in the profile."""
    handles: list[Any] = []
    opened: dict[tuple[nn.Module, str], list[record_function]] = {}

    def enter(module: nn.Module, name: str) -> None:
        opened.setdefault((module, name), []).append(record_function(name))
        opened[module, name][-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(module: nn.Module, name: str) -> None:
        if opened.get((module, name)):
            opened[module, name].pop().__exit__(None, None, None)

    for module in modules:
        handles += [
            module.register_forward_pre_hook(lambda module, _: enter(module, _FORWARD)),
            # Checkpointing ends a recomputation by an exception, which must close the range, too.
            module.register_forward_hook(lambda module, *_: leave(module, _FORWARD), always_call=True),
            module.register_full_backward_pre_hook(lambda module, _: enter(module, _BACKWARD)),
            module.register_full_backward_hook(lambda module, *_: leave(module, _BACKWARD)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for left in opened.values():
            while left:
                left.pop().__exit__(None, None, None)


class _Spent:
    """The time of ranges on the device, and the kernels that took it; a range inside another counts only once.

    Such nesting occurs if checkpointing recomputes a forward inside a backward, and between torch's own operators.
    """

    def __init__(self, gpu: bool) -> None:
        self._gpu = gpu
        self.us = 0.0
        self.names: dict[str, float] = {}

    def add(self, event: Any, compiled: bool) -> None:
        if self._gpu:
            for kernel in event.kernels:
                self.us += kernel.duration
                self._name(kernel.name, kernel.duration)
        else:
            self.us += event.time_range.elapsed_us() - _inner_us(event, compiled)
        for child in event.cpu_children:
            if _side(child, compiled) is not None:
                continue
            if self._gpu:
                self.add(child, compiled)
            else:
                self._name(child.name, child.time_range.elapsed_us())

    def _name(self, name: str, us: float) -> None:
        self.names[name] = self.names.get(name, 0.0) + us


def _side(event: Any, compiled: bool) -> str | None:
    if event.device_type.name != "CPU":
        return None  # on a GPU a range appears a second time, from its first kernel to its last
    if not compiled:
        return {_FORWARD: "forward", _BACKWARD: "backward"}.get(event.name)
    return next((side for side, pattern in _OPERATORS.items() if pattern.fullmatch(event.name)), None)


def _inner_us(event: Any, compiled: bool) -> float:
    """The time of the outermost ranges inside this event."""
    return sum(
        _inner_us(child, compiled) if _side(child, compiled) is None else child.time_range.elapsed_us()
        for child in event.cpu_children
    )


def _busy_us(events: Sequence[Any]) -> float:
    """How long anything ran on the GPU: overlapping kernels count once, NCCL's, which wait for other ranks, never."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA"
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith("nccl")
    )
    busy = until = 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy
