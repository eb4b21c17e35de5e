"""Tensors that are kept between calls, and the CUDA graphs that those calls may be recorded into.

A graph's memory comes from a pool of its own, and so does all that is allocated while torch warms up for a recording
(``torch.compile(mode="reduce-overhead")``) or records: torch reuses it as soon as the graph's outputs are dead, and
refuses to go on where something else of it is still held.  So what a call keeps for later ones is allocated here.

torch leads the allocations of one thread, or of the stream that is captured, into a pool (``use_mem_pool`` in
torch/cuda/memory.py, torch/_inductor/cudagraph_trees.py, aten/src/ATen/cuda/CUDAGraph.cpp): another thread's are left
alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["current_stream", "outside_pools", "permanent", "recording"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def recording() -> bool:
    """Whether a CUDA graph is being recorded on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def current_stream(device: torch.device) -> int:
    """The stream that work on the device goes to; 0 on a CPU.  Part of a key: other streams would read too early."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def outside_pools(make: Callable[[], _T], device: torch.device) -> _T:
    """What ``make`` returns, allocated outside of every graph's pool, in the order of the current stream.

    It runs in a new thread, so neither inference mode nor any other mode of the caller's stays with what it makes.
    Not for a stream that is being captured, on which nothing runs before the graph does.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_on_stream, make, stream).result()


def permanent(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """``make``, called once for each arguments, whose last is a device; what it returns is kept for good.

    Any stream may read it, and a graph that has recorded its address may be replayed as long as the process lives.
    It may be asked for while a graph is recorded, and may copy from the host then.  For what is small, and has few
    different arguments.
    """
    made: dict[Any, _T] = {}
    lock = threading.Lock()

    @wraps(make)
    def kept(*arguments: _P.args, **_: _P.kwargs) -> _T:
        if arguments in made:
            return made[arguments]
        with lock:
            if arguments not in made:
                with ThreadPoolExecutor(1) as thread:
                    made[arguments] = thread.submit(_complete, make, arguments).result()
        return made[arguments]

    return kept


def _on_stream(make: Callable[[], _T], stream: torch.cuda.Stream | None) -> _T:
    with torch.cuda.stream(stream):  # which does nothing for None
        return make()


def _complete(make: Callable[..., _T], arguments: tuple[Any, ...]) -> _T:
    """What ``make`` returns, once the device has made it."""
    device: torch.device = arguments[-1]
    if device.type != "cuda":
        return make(*arguments)
    stream = _side_stream(device)
    while _captured(stream):  # torch deals its streams out in turns, to those who record as well
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        found = make(*arguments)
    stream.synchronize()
    return found


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
