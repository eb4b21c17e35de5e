"""The next-token loss in fp32, without holding all logits of a long batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["LARGEST_LOGITS", "head_loss", "token_loss"]

LARGEST_LOGITS = 2**27  # logits at a time: 512 MiB in fp32


def head_loss(hidden: Tensor, head: Tensor, targets: Tensor, largest: int = LARGEST_LOGITS) -> Tensor:
    """Mean cross-entropy, an fp32 scalar, of ``hidden`` (..., width) under ``head`` (vocab, width).

    ``targets`` (...) are token numbers; -100, padding, does not count.  Beyond ``largest`` logits the tokens are
    processed in parts, whose logits the backward computes again.
    """

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        return _summed(F.linear(hidden, head), targets)

    return _in_parts(part, hidden, targets, largest // head.shape[0])


def token_loss(logits: Tensor, targets: Tensor, largest: int = LARGEST_LOGITS) -> Tensor:
    """The same for logits (..., vocab) that a model has computed; it avoids keeping fp32 copies of them."""
    return _in_parts(_summed, logits, targets, largest // logits.shape[-1])


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def _in_parts(part: Callable[[Tensor, Tensor], Tensor], x: Tensor, targets: Tensor, rows: int) -> Tensor:
    """The mean over the targets that count; ``part`` computes the sum for at most ``rows`` of them at a time."""
    x, targets, rows = x.flatten(0, -2), targets.flatten(), max(1, rows)
    count = (targets >= 0).sum()
    if targets.numel() <= rows:
        return part(x, targets) / count
    sums = [
        checkpoint(
            part, x[first : first + rows], targets[first : first + rows], use_reentrant=False, preserve_rng_state=False
        )
        for first in range(0, targets.numel(), rows)
    ]
    return torch.stack(sums).sum() / count
