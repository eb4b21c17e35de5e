"""What a call of torch's SDPA hides.  Mask tensors are looked at once: models hand one from layer to layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.weak import WeakTensorKeyDictionary

from attnbench.mask import Mask
from attnbench.mask_of_tensor import mask_of_tensor

from .calls import Calls

__all__ = ["MaskTensors", "hidden"]

_Read = tuple[tuple[int, int, int, bool], Mask | None]


class MaskTensors:
    """The masks that tensors describe.  Looking at a tensor waits for its device; the answer is remembered."""

    def __init__(self) -> None:
        self._read: Any = WeakTensorKeyDictionary()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def read(self, tensor: Tensor, seqlen_q: int, seqlen_kv: int, padding: bool = False) -> Mask | None:
        """The mask that ``tensor`` (..., Sq or 1, Skv or 1) describes; None where that is none, causal or a window not.

        With ``padding`` the tensor is (B, Skv).  Also None for a bias that is learned.  Code that is being compiled
        breaks its graph here.
        """
        if tensor.requires_grad:
            return None
        if tensor.is_inference():  # has no version, so that nobody could tell whether it has changed
            return _look(tensor, seqlen_q, seqlen_kv, padding)
        key = (tensor._version, seqlen_q, seqlen_kv, padding)
        known: _Read | None = self._read.get(tensor)
        if known is None or known[0] != key:
            known = (key, _look(tensor, seqlen_q, seqlen_kv, padding))
            self._read[tensor] = known
        return known[1]


def _look(tensor: Tensor, seqlen_q: int, seqlen_kv: int, padding: bool) -> Mask | None:
    return mask_of_tensor(tensor[:, None, None, :] if padding else tensor, seqlen_q, seqlen_kv)


def hidden(
    calls: Calls,
    tensors: MaskTensors,
    tensor: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    seqlen_q: int,
    seqlen_kv: int,
    padding: bool = False,
) -> Mask | None:
    """The mask that SDPA's arguments ask for; None where attnbench cannot serve them and the call is handed on.

    With ``padding`` the tensor is (B, Skv).  Raises InputError where it is not handed on.
    """
    if dropout_p > 0:
        reason = "dropout"
    elif tensor is None:
        return Mask(right=0) if is_causal else Mask()
    elif is_causal:
        reason = "an attn_mask beside is_causal=True"
    elif calls.hands_on and is_compiling():
        reason = "an attn_mask in compiled code"
    else:
        mask: Mask | None = tensors.read(tensor, seqlen_q, seqlen_kv, padding)
        if mask is not None:
            return mask
        reason = "an attn_mask that pads, biases or blocks"
    calls.refuse(reason)
    return None
