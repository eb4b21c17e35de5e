"""A call recorded as a CUDA graph: what the device does, without the host that starts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

__all__ = ["replay_of"]

_ALIKE = 1e-2  # atomics may add in another order; another answer is farther away than this


def replay_of(call: Callable[[], object], device: torch.device) -> Callable[[], object] | None:
    """A function that replays the call, or None where it cannot be recorded or a replay gives another answer.

    The call has run before: what it allocates or compiles the first time is not recorded.
    """
    graph = torch.cuda.CUDAGraph()
    direct = [x.clone() for x in _tensors(call())]
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            recorded = _tensors(call())
    except Exception:  # a vendor's call may refuse in any way; it is then timed as it is
        torch.cuda.synchronize(device)  # raises where the attempt left the device unusable
        return None
    for x in recorded:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize(device)
    if len(direct) != len(recorded) or not all(map(_alike, direct, recorded)):
        return None

    def replay() -> object:
        graph.replay()
        return recorded  # which must live as long as the graph that writes them

    return replay


def _alike(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not x.is_floating_point():
        return torch.equal(x, y)
    wide = x.to(torch.float32).nan_to_num()
    return bool((wide - y.to(torch.float32).nan_to_num()).norm() <= _ALIKE * wide.norm())


def _tensors(value: object) -> list[Tensor]:
    """Every tensor in a result, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [x for each in value for x in _tensors(each)]
    if isinstance(value, dict):
        return [x for each in value.values() for x in _tensors(each)]
    if is_dataclass(value) and not isinstance(value, type):
        return [x for each in fields(value) for x in _tensors(getattr(value, each.name))]
    return []
