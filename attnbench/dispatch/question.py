"""What a call of ``attention`` asks, as a key: everything that its choice depends on, and nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..choosing.choice import Choice
from ..choosing.selector import choose
from ..errors import InputError
from ..problem.dtypes import FROM_TORCH
from ..problem.mask import Alignment
from ..problem.spec import FP8_DTYPES, Granularity
from ..problem.tensor_kinds import check_plain
from ..problem.tensors import Shape, granularity, mask_of, spec_of
from .context import Wish, asked_in_context, asked_in_environment, check_budget, wished

__all__ = ["Question", "ask", "check_askable", "decide", "settled"]


class Question(NamedTuple):
    """Everything that a choice depends on, flat: the key under which it is remembered.

    ``wish`` is what the context asks for, ``variable`` what the environment does, as it is stored there.
    """

    q: Shape
    k: Shape
    v: Shape
    q_dtype: torch.dtype
    k_dtype: torch.dtype
    v_dtype: torch.dtype
    q_device: torch.device
    k_device: torch.device
    v_device: torch.device
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
    wish: Wish | None
    variable: Any


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
) -> tuple[Any, ...]:
    """The fields of the ``Question`` that these arguments ask, as a plain tuple, which is made in half the time.

    Little is checked: a question that was answered before needs no check, and ``decide`` checks the others.
    Raises InputError for descales that do not fit, AttributeError for what is no tensor.
    """
    shared = None
    if not (q_descale is None and k_descale is None and v_descale is None):
        shared = _shared(q, k, q_descale, k_descale, v_descale, layout)
    return (
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled(),
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
        asked_in_context(),
        asked_in_environment(),
    )


def check_askable(q: object, k: object, v: object, window: object) -> None:
    """Raise InputError for what has no key: no dense tensors, or a window that cannot be hashed."""
    for name, x in zip("qkv", (q, k, v), strict=True):
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
    check_plain(q, k, v)  # type: ignore[arg-type]
    if not (window is None or isinstance(window, tuple)):
        raise InputError(f"window must be a pair (keys before, keys after), None for unlimited, got {window!r}")


def _shared(
    q: Tensor, k: Tensor, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None, layout: str
) -> Granularity:
    if FROM_TORCH.get(k.dtype) not in FP8_DTYPES:
        raise InputError(f"descales go with float8 tensors, and k is {k.dtype}")
    for name, descale in {"q": q_descale, "k": k_descale, "v": v_descale}.items():
        if not isinstance(descale, Tensor):
            raise InputError(_unscaled(name))
    if k.ndim != 4:
        raise InputError(f"k must have 4 dimensions, got shape {tuple(k.shape)}")
    assert k_descale is not None, "checked above"
    batch, heads, length, size = k.shape if layout == "bhsd" else k.transpose(1, 2).shape
    return granularity(k_descale, (batch, heads, length, size))


def _unscaled(name: str) -> str:
    return f"float8 tensors stand for stored · descale: pass {name}_descale, 1.0 if nothing was scaled"


def settled(key: Question) -> Wish:
    """What is asked for beyond the tensors: by argument, else by the context, else by the environment.

    Its dtype is ``fp8`` where FP8 plans are opened, else the tensors' own.  Raises InputError for what cannot be.
    """
    backend, dtype, max_error, asked_by = wished(key.wish, key.variable)
    if key.backend != "auto":
        backend, asked_by = key.backend, "argument"
    if not isinstance(backend, str):
        raise InputError(f"backend must be the name of a backend, kernel or plan, or auto, not {backend!r}")
    max_error = max_error if key.max_error is None else key.max_error
    check_budget(max_error)
    fp8 = _opens_fp8(dtype if key.dtype is None else key.dtype, key.q_dtype, max_error)
    return Wish(backend, "fp8" if fp8 else FROM_TORCH.get(key.q_dtype), max_error, asked_by)


def decide(key: Question) -> Choice:
    """The choice that answers the question.  Raises InputError and what ``choose`` raises."""
    if key.shared is None and FROM_TORCH.get(key.k_dtype) in FP8_DTYPES:
        raise InputError(_unscaled("q"))
    for name in ("is_causal", "enable_gqa", "return_lse"):
        value = getattr(key, name)
        if isinstance(value, Tensor) or value not in (True, False):  # "no" would count as true
            raise InputError(f"{name} must be True or False, not {value!r:.60}")
    spec = spec_of(
        (key.q, key.k, key.v),
        (key.q_dtype, key.k_dtype, key.v_dtype),
        (key.q_device, key.k_device, key.v_device),
        mask=mask_of(key.is_causal, key.window, key.alignment),
        scale=key.scale,
        softcap=key.softcap,
        enable_gqa=key.enable_gqa,
        layout=key.layout,
        direction="training" if key.training else "forward",
        return_lse=key.return_lse,
        descale=key.shared,
    )
    wish = settled(key)
    return choose(
        spec,
        key.q_device,
        backend=wish.backend,
        asked_by=wish.asked_by,
        fp8=wish.dtype == "fp8",
        max_error=wish.max_error,
    )


def _opens_fp8(dtype: str | torch.dtype | None, own: torch.dtype, max_error: float | None) -> bool:
    if dtype is None:
        return max_error is not None
    if dtype == "fp8":
        return True
    name = FROM_TORCH.get(own, str(own))
    if dtype in (own, name):
        return False
    raise InputError(f'dtype must be "fp8" (admit FP8 plans) or the tensors\' own {name}, not {dtype!r}')
