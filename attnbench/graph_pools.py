"""Tensors kept between calls, allocated outside of CUDA graphs' memory pools.

While a graph is recorded, or torch warms up for a recording (``torch.compile(mode="reduce-overhead")``), allocations
come from the graph's pool: torch reuses that memory once the graph's outputs are dead, and raises if something in it is
still held.  torch redirects the allocations of one thread, or of the capturing stream (``use_mem_pool`` in
torch/cuda/memory.py, torch/_inductor/cudagraph_trees.py, aten/src/ATen/cuda/CUDAGraph.cpp).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["current_stream", "outside_pools", "permanent", "recording"]

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED in cuda.h
_P = ParamSpec("_P")
_T = TypeVar("_T")


def recording() -> bool:
    """Whether a CUDA graph is being recorded on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def current_stream(device: torch.device) -> int:
    """The stream of work on the device, 0 on a CPU; part of cache keys, because another stream would read too early."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def outside_pools(make: Callable[[], _T], device: torch.device) -> _T:
    """What ``make`` returns, allocated outside of every graph's pool, ordered on the current stream.

    It runs in a new thread, without the caller's modes.  Not for a stream that is being captured.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_on_stream, make, stream).result()


def permanent(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """``make``, called once for each tuple of arguments, the last of which is a device; results are never freed.

    Any stream and recorded graph may read a result.  It may run while a graph is recorded.  For few, small results.
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
    """What ``make`` returns, after the device has finished it."""
    device: torch.device = arguments[-1]
    if device.type != "cuda":
        return make(*arguments)
    _permit_waiting()
    stream = _side_stream(device)
    while _captured(stream):  # torch reuses its streams in turn, including one that is captured
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        found = make(*arguments)
    stream.synchronize()
    return found


def _permit_waiting() -> None:
    """Lets this thread copy to the device and wait for it while another one records a graph.

    ``torch.cuda.graph`` records in CUDA's global mode, which forbids both to every thread that does not say so.
    """
    with suppress(OSError):  # a GPU of another maker has no such library
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
