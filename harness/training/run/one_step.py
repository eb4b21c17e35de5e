"""One training step on one rank: launched kernel by kernel, or replayed from a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .optimisers import Optimising
from .trainable import Batch, Trainable

__all__ = ["Replayed", "take_step"]

_WARM = 2  # steps before one is recorded: they compile, make the optimiser's state and fill FP8's histories


def take_step(
    trainable: Trainable, optimiser: Optimising, parameters: Sequence[Tensor], batch: Batch
) -> tuple[Tensor, Tensor]:
    """Forward, backward, clipping by the config and update; the loss of the batch and the norm of all gradients
    before they are clipped, scalars on the device.
    """
    loss = trainable.loss(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = get_total_norm([each.grad for each in parameters if each.grad is not None])
    if trainable.config.grad_clip:
        clip_grads_with_norm_(parameters, trainable.config.grad_clip, norm)
    optimiser.step()
    optimiser.zero_grad()
    return loss.detach(), norm.full_tensor() if hasattr(norm, "full_tensor") else norm


class Replayed:
    """A step that was recorded as a CUDA graph, so that its host launches once: as torch's notes on graphs have it
    (CUDA semantics, whole-network capture).

    It repeats the rate that the optimiser had, and the attention that the model had.  ``pool`` is that of
    ``torch.cuda.graph_pool_handle``: steps that are replayed one at a time may share the memory of what lives within
    one.
    """

    def __init__(
        self, trainable: Trainable, optimiser: Optimising, parameters: Sequence[Tensor], batch: Batch, pool: Any
    ) -> None:
        self._batch = tuple(each.clone() for each in batch)
        step = trainable, optimiser, parameters, self._batch
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM):
                take_step(*step)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._found = take_step(*step)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Take the step for a batch of the same shapes; what ``take_step`` returns, until the next call."""
        for mine, new in zip(self._batch, batch, strict=True):
            mine.copy_(new)
        self._graph.replay()
        return self._found
