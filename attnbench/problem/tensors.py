"""From tensors to a spec: what may come in, and one clear sentence for what may not."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from .dtypes import FROM_TORCH
from .fp8 import BLOCK, Quantised
from .mask import Alignment, Mask
from .spec import AttentionSpec, Direction, Granularity

__all__ = ["Shape", "granularity", "mask_of", "quantised", "spec_of"]

Shape = tuple[int, ...]


def spec_of(
    shapes: tuple[Shape, Shape, Shape],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    devices: tuple[torch.device, torch.device, torch.device],
    *,
    mask: Mask,
    scale: float | None,
    softcap: float | None,
    enable_gqa: bool,
    layout: str,
    direction: Direction,
    return_lse: bool,
    descale: Granularity | None,
) -> AttentionSpec:
    """The spec of q, k, v with these shapes (in ``layout``), types and devices.

    Raises InputError for a wrong rank, shapes that do not fit, types or devices that differ
    or are unsupported, and numbers that describe no attention.
    """
    if layout not in ("bhsd", "bshd"):
        raise InputError(f'layout must be "bhsd" or "bshd", not {layout!r}')
    for name, shape in zip("qkv", shapes, strict=True):
        if len(shape) != 4:
            raise InputError(f"{name} must have 4 dimensions ({', '.join(layout)}), got shape {tuple(shape)}")
    if len(set(devices)) > 1:
        raise InputError(f"q, k, v must be on one device, got {', '.join(map(str, devices))}")
    if devices[0].type not in ("cpu", "cuda"):
        raise InputError(f"attention runs on cpu and cuda, not on {devices[0].type}")
    if len(set(dtypes)) > 1:
        raise InputError(f"q, k, v must have one dtype, got {', '.join(map(str, dtypes))}")
    if dtypes[0] not in FROM_TORCH:
        raise InputError(f"dtype {dtypes[0]} is not supported; {', '.join(map(str, FROM_TORCH))} are")
    heads, length = (1, 2) if layout == "bhsd" else (2, 1)
    q, k, v = shapes
    for what, axis in {"batch": 0, "heads": heads, "length": length}.items():
        if k[axis] != v[axis]:
            raise InputError(f"k and v must agree in {what}, got {k[axis]} and {v[axis]}")
    if q[0] != k[0]:
        raise InputError(f"q and k must agree in batch, got {q[0]} and {k[0]}")
    if q[3] != k[3]:
        raise InputError(f"q and k must agree in head dimension, got {q[3]} and {k[3]}")
    if not enable_gqa and q[heads] != k[heads]:
        raise InputError(
            f"q has {q[heads]} heads and k has {k[heads]}; enable_gqa=True lets query heads share key heads"
        )
    return AttentionSpec.make(
        batch=q[0],
        heads=q[heads],
        kv_heads=k[heads],
        seqlen_q=q[length],
        seqlen_kv=k[length],
        head_dim=q[3],
        head_dim_v=v[3],
        dtype=FROM_TORCH[dtypes[0]],
        scale=scale,
        mask=mask,
        softcap=0.0 if softcap is None else softcap,
        direction=direction,
        return_lse=return_lse,
        descale=descale,
    )


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
    """Which elements share a scale, read off the descales' shapes; k_shape is (B, Hkv, Skv, D).

    One element: the tensor; (B, H): a head; (B, H, ceil(S / BLOCK)): a block; (B, H, S): a token.
    Raises InputError for any other shape.
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
    """An FP8 tensor (B, H, S, D) with its descale brought to a shape that broadcasts to it, in fp32.

    A query tensor also takes a descale for each key head (FlashAttention-3's convention),
    which its group of query heads shares.  Raises InputError where the shape fits nothing.
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
