"""Record a call as a CUDA graph, to time the device without the host that launches it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnbench.errors import AttnbenchError
from attnbench.kernels.contract import Result

__all__ = ["RecordingError", "replay_of"]

_ALIKE = 3e-2  # atomics may add in another order, in bf16 too; a different answer is farther away than this


class RecordingError(AttnbenchError):
    """The call cannot be recorded: it waits for the device, or uses another stream."""


def replay_of(call: Callable[[], object], device: torch.device) -> Callable[[], object] | None:
    """A function that replays the call; None if a replay gives another answer.

    The call must have run before, so that its first allocations and compilations are not recorded.  Raises
    RecordingError if it cannot be recorded; the process should then do no more, because torch's allocator stays in its
    recording state (pytorch/pytorch#180395).
    """
    graph = torch.cuda.CUDAGraph()
    direct = [x.clone() for x in _answers(call())]
    try:
        # In a stream context, because a failed recording leaves its own stream the current one.
        stream, recording = (
            torch.cuda.current_stream(device),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        )
        with torch.cuda.stream(stream), recording:
            recorded = _answers(call())
    except Exception as error:  # a vendor's call may fail in any way; it is then timed without a graph
        raise RecordingError(f"{type(error).__name__}: {error}") from None
    for x in recorded:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize(device)
    if len(direct) != len(recorded) or not all(map(_alike, direct, recorded)):
        return None

    def replay() -> object:
        graph.replay()
        return held

    # All that the graph reads or writes must live as long as it does: the call's operands and its results.
    held = call, recorded

    return replay


def _alike(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not x.is_floating_point():
        return torch.equal(x, y)
    wide = x.to(torch.float32).nan_to_num()
    return bool((wide - y.to(torch.float32).nan_to_num()).norm() <= _ALIKE * wide.norm())


def _answers(value: object) -> list[Tensor]:
    """The tensors that a pass returns, without a forward's private state, which may hold the inputs."""
    answers = value[:2] if isinstance(value, Result) else value
    return [x for x in answers if isinstance(x, Tensor)] if isinstance(answers, tuple) else []
