"""The mask of a call of torch's SDPA.  A mask tensor is read at each call: no other way notices changes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.bias import CausalBias, CausalVariant

from attnbench.problem.mask import Mask
from attnbench.problem.mask_of_tensor import HIDDEN, mask_of_tensor

from .calls import Calls
from .padding_masks import PaddingMasks
from .transformers_sequences import Sequences

__all__ = ["MaskTensors", "dense", "hidden"]

_FULL, _CAUSAL = Mask(), Mask(right=0)
_KEPT = 64  # memory addresses whose last mask is remembered
_SMALL = 2**20  # largest mask, in elements, whose copy in CPU memory is kept for the next comparison


class MaskTensors:
    """The masks that tensors describe.

    A tensor's version does not count writes by NumPy, DLPack or ``.data``.  So the answer of an earlier call is a
    guess, which is compared with the tensor: a few operators and one wait, where finding the mask takes a loop over its
    rows.
    """

    def __init__(self) -> None:
        self._guesses: dict[tuple[int, int, int], Mask] = {}
        self._padding = PaddingMasks()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def read(self, tensor: Tensor, seqlen_q: int, seqlen_kv: int) -> Mask | None:
        """The mask that ``tensor`` (..., Sq or 1, Skv or 1) is equivalent to: none, causal or a window; otherwise None.

        Also None for a learned bias, and for one batched by ``vmap``.  Compiled code breaks its graph here.
        """
        if tensor.requires_grad or tensor.numel() == 0 or _is_batched(tensor):
            return None
        place = (_unwrapped(tensor).data_ptr(), seqlen_q, seqlen_kv)
        guess = self._guesses.get(place)
        if guess is not None and _describes(tensor, guess, seqlen_q, seqlen_kv):
            return guess
        found = mask_of_tensor(tensor, seqlen_q, seqlen_kv)
        self._guesses.pop(place, None)
        if found is not None:
            if len(self._guesses) >= _KEPT:
                self._guesses.pop(next(iter(self._guesses)), None)
            self._guesses[place] = found
        return found

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def sequences(self, tensor: Tensor, weights: tuple[int, ...]) -> Sequences | None:
        """The sequences that a mask of padding leaves in scores (B, H, Sq, Skv); None where ``read`` has no answer."""
        if tensor.requires_grad or tensor.numel() == 0 or _is_batched(tensor) or len(weights) != 4:
            return None
        return self._padding.read(tensor, weights)


def hidden(
    calls: Calls,
    tensors: MaskTensors,
    tensor: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    weights: tuple[int, ...],
    query: Tensor,
) -> Mask | Sequences | None:
    """The mask that SDPA's arguments ask for, or the sequences that one of padding leaves; None if attnbench cannot
    serve them and the call is handed on.

    ``weights`` is the shape (..., Sq, Skv) of the scores.  Raises InputError if calls are not handed on, and what torch
    raises for an invalid mask or dropout.
    """
    if not 0 <= dropout_p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
    if tensor is not None and not isinstance(tensor, CausalBias):
        _check(tensor, weights, query)
    if dropout_p > 0:
        reason = "dropout"
    elif tensor is None:
        return _CAUSAL if is_causal else _FULL
    elif is_causal:
        if isinstance(tensor, CausalBias):
            raise ValueError("CausalBias should not be used with causal=True")
        reason = "an attn_mask beside is_causal=True"
    elif calls.hands_on and is_compiling():
        reason = "an attn_mask in compiled code"
    else:
        read = _of_bias if isinstance(tensor, CausalBias) else tensors.read
        mask: Mask | None = read(tensor, *weights[-2:])
        if mask is not None:
            return mask
        of_padding: Sequences | None = None if isinstance(tensor, CausalBias) else tensors.sequences(tensor, weights)
        if of_padding is not None:
            return of_padding
        reason = "an attn_mask that biases or blocks"
    calls.refuse(reason)
    return None


def dense(mask: Mask, seqlen_q: int, seqlen_kv: int, device: torch.device | str | None) -> Tensor:
    """The mask as a tensor (Sq, Skv), true where a key is seen."""
    rows, keys = (torch.arange(count, device=device) for count in (seqlen_q, seqlen_kv))
    unseen = mask.hidden(rows, keys, seqlen_q, seqlen_kv)
    return rows.new_ones(seqlen_q, seqlen_kv, dtype=torch.bool) if unseen is None else ~unseen


_kept_on_cpu = lru_cache(maxsize=16)(dense)


def _check(tensor: Tensor, weights: tuple[int, ...], query: Tensor) -> None:
    """Raise RuntimeError for a mask tensor that torch's SDPA does not take."""
    if tensor.dtype not in (torch.bool, torch.float32, query.dtype):
        castable = tensor.is_floating_point() and tensor.dtype != torch.float64  # by torch's autocast
        if not castable or not torch.is_autocast_enabled(query.device.type):
            raise RuntimeError(
                "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: "
                f"{tensor.dtype} and query.dtype: {query.dtype} instead."
            )
    if tensor.device != query.device:
        raise RuntimeError(f"Expected attn_mask on the device of query, {query.device}, but it is on {tensor.device}.")
    tensor.expand(weights)


def _of_bias(bias: Any, seqlen_q: int, seqlen_kv: int) -> Mask | None:
    """The mask of torch's ``causal_upper_left`` and ``causal_lower_right``."""
    if bias.variant == CausalVariant.UPPER_LEFT or bias.seq_len_q == bias.seq_len_kv:
        return _CAUSAL
    mask = Mask(right=0, alignment="bottom-right")
    fits = (bias.seq_len_q, bias.seq_len_kv) == (seqlen_q, seqlen_kv)
    return mask if fits and not mask.has_empty_rows(seqlen_q, seqlen_kv) else None


def _describes(tensor: Tensor, mask: Mask, seqlen_q: int, seqlen_kv: int) -> bool:
    """Whether the tensor equals the mask in all batch entries and heads."""
    for axis in range(tensor.ndim - 2):
        if tensor.stride(axis) == 0 and tensor.shape[axis]:
            tensor = tensor.narrow(axis, 0, 1)  # the same memory over and over
    # Nothing is kept on a GPU, where it could be memory of a CUDA graph that was being captured.
    small = tensor.is_cpu and seqlen_q * seqlen_kv <= _SMALL
    seen = (_kept_on_cpu if small else dense)(mask, seqlen_q, seqlen_kv, tensor.device)
    same = tensor == seen if tensor.dtype == torch.bool else torch.where(seen, tensor == 0, tensor <= HIDDEN)
    return bool(same.all())


def _is_batched(tensor: Tensor) -> bool:
    """Whether ``vmap`` has a different mask for each of its entries."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _unwrapped(tensor: Tensor) -> Tensor:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor
