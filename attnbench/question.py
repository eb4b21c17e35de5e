"""What a call of ``attention`` asks, as a key: everything that its choice depends on, and nothing else."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .choice import Choice
from .context import Wish, check_budget, current
from .dtypes import FROM_TORCH
from .errors import InputError
from .mask import Alignment
from .selector import choose
from .spec import FP8_DTYPES, Granularity
from .tensors import Shape, granularity, mask_of, spec_of

__all__ = ["Question", "ask", "decide"]


class Question(NamedTuple):
    """Everything that a choice depends on: the key under which it is remembered."""

    shapes: tuple[Shape, Shape, Shape]
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    devices: tuple[torch.device, torch.device, torch.device]
    training: bool
    is_causal: bool
    window: tuple[int | None, int | None] | None
    alignment: Alignment
    scale: float | None
    softcap: float | None
    enable_gqa: bool
    layout: str
    return_lse: bool
    shared: Granularity | None
    dtype: str | torch.dtype | None
    backend: str
    max_error: float | None
    wish: Wish


def ask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    window: tuple[int | None, int | None] | None,
    alignment: Alignment,
    scale: float | None,
    softcap: float | None,
    enable_gqa: bool,
    layout: str,
    dtype: str | torch.dtype | None,
    backend: str,
    max_error: float | None,
    return_lse: bool,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> Question:
    """The question that these arguments ask.  Raises InputError for what could not even be remembered."""
    for name, x in zip("qkv", (q, k, v), strict=True):
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
    if not (window is None or isinstance(window, tuple)):
        raise InputError(f"window must be a pair (keys before, keys after), None for unlimited, got {window!r}")
    shared = None
    if FROM_TORCH.get(k.dtype) in FP8_DTYPES or any(x is not None for x in (q_descale, k_descale, v_descale)):
        shared = _shared(q, k, q_descale, k_descale, v_descale, layout)
    training = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return Question(
        (q.shape, k.shape, v.shape),
        (q.dtype, k.dtype, v.dtype),
        (q.device, k.device, v.device),
        training,
        is_causal,
        window,
        alignment,
        scale,
        softcap,
        enable_gqa,
        layout,
        return_lse,
        shared,
        dtype,
        backend,
        max_error,
        current(),
    )


def _shared(
    q: Tensor, k: Tensor, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None, layout: str
) -> Granularity:
    if FROM_TORCH.get(k.dtype) not in FP8_DTYPES:
        raise InputError(f"descales go with float8 tensors, and k is {k.dtype}")
    for name, descale in {"q": q_descale, "k": k_descale, "v": v_descale}.items():
        if not isinstance(descale, Tensor):
            raise InputError(
                f"float8 tensors stand for stored · descale: pass {name}_descale, 1.0 if nothing was scaled"
            )
    if k.ndim != 4:
        raise InputError(f"k must have 4 dimensions, got shape {tuple(k.shape)}")
    assert k_descale is not None, "checked above"
    batch, heads, length, size = k.shape if layout == "bhsd" else k.transpose(1, 2).shape
    return granularity(k_descale, (batch, heads, length, size))


def decide(key: Question) -> Choice:
    """The choice that answers the question.  Raises InputError and what ``choose`` raises."""
    spec = spec_of(
        key.shapes,
        key.dtypes,
        key.devices,
        mask=mask_of(key.is_causal, key.window, key.alignment),
        scale=key.scale,
        softcap=key.softcap,
        enable_gqa=key.enable_gqa,
        layout=key.layout,
        direction="training" if key.training else "forward",
        return_lse=key.return_lse,
        descale=key.shared,
    )
    wish = key.wish
    backend, asked_by = (wish.backend, wish.asked_by) if key.backend == "auto" else (key.backend, "argument")
    if not isinstance(backend, str):
        raise InputError(f"backend must be the name of a backend, kernel or plan, or auto, not {backend!r}")
    max_error = wish.max_error if key.max_error is None else key.max_error
    check_budget(max_error)
    dtype = wish.dtype if key.dtype is None else key.dtype
    return choose(
        spec,
        key.devices[0],
        backend=backend,
        asked_by=asked_by,
        fp8=_opens_fp8(dtype, key.dtypes[0], max_error),
        max_error=max_error,
    )


def _opens_fp8(dtype: str | torch.dtype | None, own: torch.dtype, max_error: float | None) -> bool:
    if dtype is None:
        return max_error is not None
    if dtype == "fp8":
        return True
    if dtype in (own, FROM_TORCH[own]):
        return False
    raise InputError(f'dtype must be "fp8" (admit FP8 plans) or the tensors\' own {FROM_TORCH[own]}, not {dtype!r}')
