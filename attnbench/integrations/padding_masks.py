"""Mask tensors of torch's SDPA that hide padding, as the sequences of a packed call.

Models of diffusers pad their text: a mask (B, 1, 1, Skv) hides padded keys from every query, a mask (B, 1, Sq, Skv)
leaves padded queries no key either.  Both are attention of packed sequences, one a row of the batch.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.problem.mask_of_tensor import HIDDEN

from .transformers_sequences import Sequences

__all__ = ["PaddingMasks"]

_KEPT = 8  # shapes of masks whose last padding is remembered


class _Known(NamedTuple):
    facts: Tensor
    sequences: Sequences


class PaddingMasks:
    """The sequences that mask tensors leave.

    A mask is read at each call, by one copy of B · (Sq + Skv) truths to the host; the sequences of the last one of its
    shape serve again if it says the same.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], _Known] = {}
        self._lock = threading.Lock()

    def read(self, tensor: Tensor, weights: tuple[int, ...]) -> Sequences | None:
        """The sequences in rows of the batch if ``tensor`` hides padding and nothing else, for all heads alike.

        ``weights`` is the shape (B, H, Sq, Skv) of the scores.  None for any other mask.
        """
        batch, _, seqlen_q, seqlen_kv = weights
        facts = _facts(tensor.expand(weights)).cpu()  # the one wait for the device
        if not bool(facts[0]):
            return None
        key = (*weights, tensor.device)
        known = self._known.get(key)
        if known is None or not torch.equal(known.facts, facts):
            asks = facts[1 : 1 + batch * seqlen_q].view(batch, seqlen_q)
            real = facts[1 + batch * seqlen_q :].view(batch, seqlen_kv)
            made = Sequences.of_shown(real, None if bool(asks.all()) else asks, seqlen_q, tensor.device)
            known = _Known(facts, made)
            with self._lock:
                if len(self._known) >= _KEPT and key not in self._known:
                    del self._known[next(iter(self._known))]
                self._known[key] = known
        return known.sequences


def _facts(mask: Tensor) -> Tensor:
    """Whether ``mask`` (B, H, Sq, Skv), expanded, hides padding alone, which queries see keys and which keys are seen.

    Flat truths: one, B · Sq and B · Skv.  Axes along which the mask repeats are looked at once.  Numbers that are added
    to the scores hide nothing from a query that they hide all keys from, so such masks are others.
    """
    batch, _, seqlen_q, _ = mask.shape
    for axis in (1, 2):
        if mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    shown = mask if mask.dtype == torch.bool else mask == 0
    real, asks = shown[:, 0].any(1), shown[:, 0].any(2)
    alike = (shown == (asks[:, :, None] & real[:, None])[:, None]).all()
    if mask.dtype != torch.bool:
        alike &= (shown | (mask <= HIDDEN)).all() & asks.all()
    if mask.shape[2] != seqlen_q:  # every query alike, also in a row without a key, where none sees any
        asks = asks.new_ones(batch, 1)
    return torch.cat([alike.view(1), asks.expand(batch, seqlen_q).flatten(), real.flatten()])
