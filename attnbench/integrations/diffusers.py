"""attnbench as an attention backend of diffusers: ``model.set_attention_backend("attnbench")`` after ``register``.

diffusers keeps its backends in a registry whose keys are the members of an enumeration, so a member is added.
"""

from __future__ import annotations

import functools
import warnings
from enum import EnumMeta
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.errors import AttnbenchWarning, InputError
from attnbench.problem.mask import Mask

from .calls import Calls
from .mask_tensors import MaskTensors, hidden
from .transformers_sequences import Sequences

__all__ = ["register"]

_INSTALL = "pip install 'diffusers>=0.35'"
_added: dict[str, Calls] = {}


def register(
    name: str = "attnbench",
    *,
    backend: str = "auto",
    dtype: str | None = None,
    max_error: float | None = None,
    otherwise: str = "raise",
) -> Calls:
    """Add ``name`` to diffusers: ``model.set_attention_backend(name)`` and ``with attention_backend(name)``.

    ``backend``, ``dtype`` and ``max_error`` are those of ``attnbench.attention``; what they leave out ``use_backend``
    decides.  Registering a name again changes them; several names may have different ones.

    Arguments of layers mean what they mean to diffusers' ``native`` backend.  Mask tensors, (B, Skv) of padding or (B
    or 1, H or 1, Sq or 1, Skv), are read, and served if they are equivalent to no mask, causal or a window, or hide
    padding: then layers gather the tokens of each row into packed tensors.  Other masks, dropout, and what
    ``attention`` refuses raise InputError or attention's own error; with ``otherwise="native"`` torch's SDPA computes
    those calls and masks inside compiled code, with a warning for the first of each reason and a count of all.  Context
    parallelism and ``return_lse`` are always refused.

    Returns the counts.  Raises InputError if diffusers is missing or incompatible, ``name`` is one of its own, or an
    option is invalid.
    """
    calls = Calls(f"diffusers with the backend {name!r}", "native", otherwise, backend, dtype, max_error)
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    except ImportError as error:
        raise InputError(f"diffusers 0.35 or later is needed ({error}): {_INSTALL}") from None
    tensors = MaskTensors()

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Tensor:
        """q (B, Sq, H, D), k and v (B, Skv, Hkv, D) to (B, Sq, H, Dv)."""
        if _parallel_config is not None or return_lse:
            raise InputError(f"diffusers with the backend {name!r}: context parallelism and return_lse are not served")
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):  # padding
            attn_mask = attn_mask[:, None, None, :]
        weights = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        mask = hidden(calls, tensors, attn_mask, dropout_p, is_causal, weights, query)
        if isinstance(mask, Sequences):
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            out = mask.attend(calls, q, k, v, Mask(), scale=scale, enable_gqa=enable_gqa)
            if out is not None:
                return out
        elif mask is not None:
            out = calls.attend(query, key, value, mask, scale=scale, enable_gqa=enable_gqa, layout="bshd")
            if out is not None:
                return out
        return F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=attn_mask,
            dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        ).transpose(1, 2)  # fmt: skip

    member = _member(AttentionBackendName, name)
    _AttentionBackendRegistry.register(member)(attend)
    if not _added:
        _watch_models()
    _added[name] = calls
    return calls


def _watch_models() -> None:
    """Make ``set_attention_backend`` report the layers of a model that ignore the backend.

    diffusers silently leaves out layers whose processor calls torch's SDPA itself (SD3, PixArt, CogVideoX, DiT, the
    UNets).
    """
    from diffusers.models.modeling_utils import ModelMixin

    method = ModelMixin.set_attention_backend

    @functools.wraps(method)
    def set_attention_backend(self: Any, backend: str, *args: Any, **kwargs: Any) -> Any:
        calls = _added.get(backend.lower())
        if calls is not None:
            _check_layers(self, calls)
        return method(self, backend, *args, **kwargs)

    mixin: Any = ModelMixin
    mixin.set_attention_backend = set_attention_backend


def _check_layers(model: nn.Module, calls: Calls) -> None:
    """Warn of layers that take no backend; raise InputError if no layer takes one, unless calls are handed on."""
    processors = [each for each in (getattr(module, "processor", None) for module in model.modules()) if each]
    deaf = [each for each in processors if not hasattr(each, "_attention_backend")]
    if processors and not deaf:
        return
    kinds = ", ".join(sorted({type(each).__name__ for each in deaf}))
    which = f"{len(deaf)} of {len(processors)} attention layers" if deaf else "what attention it has"
    message = (
        f"{type(model).__name__}: no backend of diffusers reaches {which}{f' ({kinds})' if kinds else ''}; "
        "attnbench.integrations.sdpa.replaced() serves layers that call torch's SDPA"
    )
    if len(deaf) == len(processors) and not calls.hands_on:
        raise InputError(message)
    warnings.warn(message, AttnbenchWarning, stacklevel=3)


def _member(names: Any, name: str) -> Any:
    """The member of the enumeration with this value, made once.  Raises InputError if it is diffusers' own."""
    if name != name.lower():
        raise InputError(f"diffusers writes the names of its backends in lower case, not {name!r}")
    if not isinstance(names, EnumMeta) or not issubclass(names, str):
        raise InputError("this release of diffusers keeps its attention backends in another way")
    kind: Any = names
    if name in _added:
        return kind(name)
    if any(each.value == name for each in kind):
        raise InputError(f"{name!r} is a backend of diffusers; register under another name")
    member = str.__new__(kind, name)
    member._name_, member._value_ = name.upper(), name
    member.__objclass__, member._sort_order_ = kind, len(kind._member_names_)
    kind._member_names_.append(member._name_)
    kind._member_map_[member._name_] = kind._value2member_map_[name] = member
    type.__setattr__(kind, member._name_, member)  # the enumeration's own forbids it
    return member
