"""From arguments to parts of a spec."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from .fp8 import BLOCK, Quantised
from .mask import Alignment, Mask
from .spec import AttentionSpec, Granularity

__all__ = ["Shape", "granularity", "mask_of", "quantised"]

Shape = tuple[int, ...]


def mask_of(is_causal: bool, window: tuple[int | None, int | None] | None, alignment: Alignment) -> Mask:
    """The mask that ``is_causal`` and ``window`` (keys before, keys after; None is unlimited) describe together."""
    if window is None:
        left, right = None, None
    elif isinstance(window, tuple) and len(window) == 2:
        left, right = window
    else:
        raise InputError(f"window must be a pair (keys before, keys after), None for unlimited, got {window!r}")
    mask = Mask(left, right, alignment)  # checked as given, before causal hides a wrong side
    return Mask(left, 0, alignment) if is_causal else mask


def granularity(k_descale: Tensor, k_shape: Shape) -> Granularity:
    """Which elements share a scale, by the shape of ``k_descale``; ``k_shape`` is (B, Hkv, Skv, D).

    One element: the tensor; (B, H): a head; (B, H, ceil(S / BLOCK)): a block; (B, H, S): a token.  Raises InputError
    for any other shape.
    """
    batch, kv_heads, length, _ = k_shape
    shape = tuple(k_descale.shape)
    if k_descale.numel() == 1:
        return "tensor"
    if shape == (batch, kv_heads):
        return "head"
    if shape == (batch, kv_heads, length):
        return "token"
    if shape == (batch, kv_heads, -(-length // BLOCK)):
        return "block"
    raise InputError(
        f"k_descale has shape {shape}; expected one element, ({batch}, {kv_heads}), "
        f"({batch}, {kv_heads}, {-(-length // BLOCK)}) for blocks of {BLOCK} or ({batch}, {kv_heads}, {length})"
    )


def quantised(name: str, data: Tensor, descale: Tensor, spec: AttentionSpec) -> Quantised:
    """An FP8 tensor (B, H, S, D) with its descale in fp32, broadcastable to it; q also takes a descale for each key
    head.

    Raises InputError if the shape does not fit.
    """
    shared = spec.descale
    assert shared is not None, "only a spec of FP8 tensors comes here"
    batch, heads, length, _ = data.shape
    if descale.device != data.device:
        raise InputError(f"{name}_descale is on {descale.device}, {name} on {data.device}")
    if not descale.is_floating_point():
        raise InputError(f"{name}_descale must hold floating-point numbers, not {descale.dtype}")
    scale = descale.detach().to(torch.float32)
    if shared == "tensor" and scale.numel() == 1:
        return Quantised(data, scale.reshape(1, 1, 1, 1), shared)
    if scale.ndim >= 2 and heads == spec.heads and scale.shape[1] == spec.kv_heads:
        scale = scale.repeat_interleave(spec.group, dim=1)
    expected = {
        "head": (batch, heads),
        "block": (batch, heads, -(-length // BLOCK)),
        "token": (batch, heads, length),
    }.get(shared, ())
    if tuple(scale.shape) != expected:
        raise InputError(f"{name}_descale has shape {tuple(descale.shape)}; expected {expected or 'one element'}")
    if shared == "block":
        scale = scale.repeat_interleave(BLOCK, dim=2)[:, :, :length]
    return Quantised(data, scale.reshape(batch, heads, -1, 1), shared)
