"""What a layer of transformers asks of the attention function that it looks up: a mask, or a reason to refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from attnbench.errors import InputError
from attnbench.problem.mask import Mask

from .transformers_mask import UnservableError

__all__ = ["asked_mask", "asks_causal"]

# Arguments that change the result and that SDPA does not support either: keys of a paged cache, sparse choices of keys,
# the lengths of packed sequences, masks of heads.
_UNKNOWN = (
    "sinks", "cache", "indexer", "indices", "block_indices", "cu_seq_lens_q", "cu_seq_lens_k", "head_mask",
)  # fmt: skip


def asked_mask(
    module: nn.Module,
    seqlen_q: int,
    seqlen_kv: int,
    mask: Any,
    read: Callable[[Tensor, int, int], Mask | None],
    *,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> Mask:
    """The mask that a layer asks for by the arguments that transformers passes.

    ``mask`` is a mask, None, or a tensor, which ``read`` interprets.  As in transformers' SDPA, a given mask says all
    that is hidden, and without one ``is_causal`` does.  Raises UnservableError for what only SDPA can compute, and
    InputError for what SDPA does not support either.
    """
    layer = type(module).__name__
    for each in _UNKNOWN:
        if others.get(each) is not None:
            raise InputError(f"{layer} wants {each}, which attnbench does not know")
    if others.get("output_attentions"):
        raise InputError("output_attentions=True wants probabilities, which no kernel here keeps")
    if mask is None:
        if sliding_window and seqlen_kv > sliding_window:  # 0 is none to Qwen2-MoE
            raise InputError(f"{layer} has a sliding window of {sliding_window} keys, and no mask was made for it")
        mask = Mask(right=0) if asks_causal(module, is_causal) and seqlen_q > 1 else Mask()
    elif not isinstance(mask, (Mask, Tensor)):
        raise InputError(f"{layer} has a mask of the class {type(mask).__name__}")
    if dropout:
        raise UnservableError("dropout")
    if position_bias is not None:
        raise UnservableError("a bias of positions")
    found = read(mask, seqlen_q, seqlen_kv) if isinstance(mask, Tensor) else mask
    if found is None:
        raise UnservableError("a mask tensor other than none, causal or a window")
    return found


def asks_causal(module: nn.Module, is_causal: bool | None) -> bool:
    """Whether a layer without a mask is causal, as transformers' SDPA function takes it."""
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
