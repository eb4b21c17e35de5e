"""Activation checkpointing and torch.compile for each block, in place; parameter names do not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from .linears import transformer_engine

__all__ = ["checkpoint_blocks", "compile_blocks"]


def checkpoint_blocks(blocks: Sequence[nn.Module], te: bool, offload: bool = False) -> None:
    """Keep only each block's inputs for the backward, with ``offload`` on the host, and compute the rest again.

    ``te`` uses TransformerEngine's own function: its scales depend on the forwards that they see, and must not see one
    twice.
    """
    how: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if te:
        how = partial(transformer_engine().checkpoint, use_reentrant=False)
    for block in blocks:
        block.forward = _recomputing(how, block.forward, offload)


def _recomputing(how: Callable[..., Any], forward: Callable[..., Any], offload: bool) -> Callable[..., Any]:
    # Functions of this file: torch.compile skips one of torch's own, and the whole block with it, without a word, and
    # TransformerEngine writes attributes to what it checkpoints, which a bound method has no room for.
    def run(*args: Any, **named: Any) -> Any:
        return forward(*args, **named)

    def recomputed(*args: Any, **named: Any) -> Any:
        return how(run, *args, **named)

    def offloaded(x: Tensor, *args: Any, **named: Any) -> Any:
        with save_on_cpu(pin_memory=x.is_cuda):  # sees the inputs alone: inside, checkpointing's own hooks come first
            return how(run, x, *args, **named)

    return offloaded if offload else recomputed


def compile_blocks(blocks: Sequence[nn.Module], backend: str = "inductor", *, within: bool = False) -> None:
    """Compile each block, after ``checkpoint_blocks``; equal blocks share the compiled code.

    ``within``: before it, because whatever TransformerEngine's function calls runs uncompiled, unless it is compiled
    itself.
    """
    for block in blocks:
        if within:
            block.forward = torch.compile(block.forward, backend=backend)
        else:
            block.compile(backend=backend)
