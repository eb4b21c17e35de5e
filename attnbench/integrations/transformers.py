"""attnbench as an attention implementation of transformers: ``attn_implementation="attnbench"`` after ``register``.

transformers looks up an attention function by name, and a function that makes its masks; both are registered, nothing
is patched.  A layer computes what it computes with ``"sdpa"``: the mask says what is hidden, and without one
``is_causal`` does, aligned top-left.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from attnbench.errors import InputError
from attnbench.problem.mask import Mask

from .calls import Calls, chosen
from .mask_tensors import MaskTensors, dense
from .transformers_layer import asked_mask, asks_causal
from .transformers_mask import Caller, LayerMask, MaskRequest, UnservableError, layer_mask
from .transformers_models import watch_models
from .transformers_sequences import Sequences, named_lengths

__all__ = ["register"]

_INSTALL = "pip install 'transformers>=4.53'"


def register(
    name: str = "attnbench",
    *,
    backend: str = "auto",
    dtype: str | None = None,
    max_error: float | None = None,
    padding: str = "unpad",
    otherwise: str = "raise",
) -> Calls:
    """Let transformers know ``attn_implementation=name``: for new models, and ``model.set_attn_implementation``.

    ``backend``, ``dtype`` and ``max_error`` are those of ``attnbench.attention``; what they leave out ``use_backend``
    decides.  Registering a name again changes them, in existing models too; several names may have different ones.

    Served are full and causal masks and sliding windows (eager, or with a growing cache), softcaps, grouped heads,
    scales, sinks (gpt-oss); rows with padding, by a 2-D ``attention_mask``; and rows of several sequences, by
    ``position_ids`` that start anew or by ``cu_seq_lens_q`` and its like.  Layers gather the tokens of such rows into
    packed tensors and give 0 at padding that asks, where SDPA gives what must not be used.  ``padding="right"`` leaves
    causal batches that are padded at the right only as they are, which more kernels serve: their padding gets what a
    token there would get.

    Everything else raises InputError: blocks and chunks, static caches, custom mask tensors unless equivalent to a mask
    above, dropout, biases of positions, padding in compiled code.  With ``otherwise="sdpa"`` transformers' own SDPA
    function computes those calls, with a warning for the first of each reason and a count of all; it has no sinks.
    Paged caches, sparse keys and ``output_attentions`` are always refused: SDPA does not support them.

    Returns the counts.  Raises InputError if transformers is missing, and for invalid options.
    """
    chosen("padding", padding, "unpad", "right")
    calls = Calls(f'transformers with attn_implementation="{name}"', "sdpa", otherwise, backend, dtype, max_error)
    try:
        from transformers import AttentionInterface, AttentionMaskInterface

        answers = _Answers(calls, padding == "right")
    except ImportError as error:
        raise InputError(f"transformers 4.53 or later is needed ({error}): {_INSTALL}") from None
    AttentionInterface.register(name, answers.attend)
    AttentionMaskInterface.register(name, answers.mask)
    watch_models(name, calls)
    return calls


class _Answers:
    """What transformers calls for a registered name: ``mask`` for each kind of layer, then ``attend`` in each layer."""

    def __init__(self, calls: Calls, right_padding: bool) -> None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask

        self._calls, self._right_padding = calls, right_padding
        self._sdpa: Any = sdpa_attention_forward
        self._sdpa_mask: Any = sdpa_mask
        self._tensors = MaskTensors()

    def mask(self, *positions: Any, **named: Any) -> LayerMask | Tensor | None:
        """What layers are given: a mask, None, or the tensor that SDPA is given where those calls are handed on."""
        known = named.get("attention_mask")
        if isinstance(known, LayerMask):  # made before, for generate
            return known
        window = named.get("local_size")
        try:
            if window is None or window > 0:
                caller = Caller() if is_compiling() else Caller.of(sys._getframe(1))
                return layer_mask(
                    MaskRequest.of(*positions, **named), self._right_padding, self._calls.hands_on, caller
                )
            # A window of no keys, for layers that the model does not have: Qwen2-MoE's default.
        except UnservableError as reason:
            self._calls.warn(str(reason))
        plain = {**named, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        tensor: Tensor | None = self._sdpa_mask(*positions, **plain)
        return tensor

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        position_bias: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: Any = None,
        max_length_k: Any = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """q (B, H, Sq, D), k and v (B, Hkv, Skv, D) to (B, Sq, H, Dv)."""
        layer = type(module).__name__
        named = named_lengths(layer, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        sequences = None
        if isinstance(attention_mask, LayerMask) and attention_mask.sequences is not None:
            sequences = attention_mask.sequences
            if (query.shape[0], query.shape[2], key.shape[2]) != attention_mask.sizes:
                sequences, attention_mask = None, attention_mask.tensor()  # a layer of other rows, which may share it
        if named is not None:
            if sequences is not None and sequences.keys is not None:
                raise InputError(f"{layer} wants cu_seq_lens_q beside an attention_mask that pads; pass one of them")
            sequences = named
        try:
            mask = asked_mask(
                module, query.shape[2], key.shape[2], attention_mask, self._read, dropout=dropout,
                is_causal=is_causal, sliding_window=sliding_window, position_bias=position_bias, **others,
            )  # fmt: skip
        except UnservableError as reason:
            self._calls.refuse(str(reason))
        else:
            options: dict[str, Any] = {"scale": scaling, "softcap": softcap or None, "sinks": s_aux}
            if sequences is not None:
                mask = replace(mask, alignment="bottom-right")
                out = sequences.attend(self._calls, query, key, value, mask, **options)
            else:
                out = self._calls.attend(query, key, value, mask, **options)
                out = None if out is None else out.transpose(1, 2).contiguous()
            if out is not None:
                return out, None
        if s_aux is not None:
            raise InputError(f"{layer} has sinks, which transformers' SDPA does not know")
        if isinstance(attention_mask, LayerMask):
            attention_mask = attention_mask.tensor()
        causal = asks_causal(module, is_causal)
        if named is not None:
            attention_mask = _within(named, attention_mask, causal, query, key)
        given: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        if position_bias is not None:
            given["position_bias"] = position_bias
        function = self._sdpa
        if softcap:
            function = _eager(module)
            if function is None:
                raise InputError(f"{layer} has a softcap, which transformers' SDPA does not know")
            attention_mask, given["softcap"] = _added(attention_mask, causal, query, key), softcap
        return function(module, query, key, value, attention_mask, **given)[0], None

    def _read(self, tensor: Tensor, seqlen_q: int, seqlen_kv: int) -> Mask | None:
        return None if self._calls.hands_on else self._tensors.read(tensor, seqlen_q, seqlen_kv)


def _eager(module: nn.Module) -> Any:
    """The eager attention of the model's module, if it supports a softcap; else None."""
    function = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    return function if function is not None and "softcap" in inspect.signature(function).parameters else None


def _added(mask: Tensor | None, causal: bool, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask in the form that eager attention adds to the scores; it does not support ``is_causal``."""
    if mask is None and causal and query.shape[2] > 1:
        mask = dense(Mask(right=0), query.shape[2], key.shape[2], query.device)
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(
        ~mask, torch.finfo(query.dtype).min
    )


def _within(sequences: Sequences, mask: Tensor | None, causal: bool, query: Tensor, key: Tensor) -> Tensor:
    """The mask for SDPA, which does not know the lengths of sequences, with other sequences hidden."""
    batch, _, seqlen_q, _ = query.shape
    seqlen_kv = key.shape[2]
    if seqlen_q != seqlen_kv:
        raise InputError("cu_seq_lens_q beside a cache, which SDPA does not know either")
    own = sequences.visible_keys(batch, seqlen_q, seqlen_kv)
    if mask is None:
        return own & dense(Mask(right=0), seqlen_q, seqlen_kv, query.device) if causal else own
    return own & mask if mask.dtype == torch.bool else mask.masked_fill(~own, torch.finfo(mask.dtype).min)
