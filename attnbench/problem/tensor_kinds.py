"""The kinds of tensors that a call may be given: plain memory for kernels, and tensors that torch handles first."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _is_any_autocast_enabled, _is_tracing, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..errors import InputError

__all__ = ["as_autocast", "check_plain", "intercepted", "ordinary", "plain", "refuse_tangents", "requires_gradient"]

_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
_STRIDED = torch.strided
_OBSERVING = ("FakeTensorMode", "ProxyTorchDispatchMode")  # modes for which nothing is computed


def ordinary(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the tensors need none of the checks below, as in nearly every call; takes half a microsecond."""
    return (
        type(q) is type(k) is type(v) is Tensor
        and q.layout is k.layout is v.layout is _STRIDED
        and not (q.is_neg() or k.is_neg() or v.is_neg())
        and not (_are_functorch_transforms_active() or _is_tracing() or _len_torch_dispatch_stack())
        and not _is_any_autocast_enabled()
        and forward_ad._current_level < 0
    )


def intercepted(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the call must go through an operator, because kernels cannot read its tensors' memory.

    True for a transform of torch.func, jit.trace, make_fx, fake tensors, and subclasses that handle operators
    themselves.  Raises InputError under forward-mode differentiation, which kernels do not have.
    """
    if forward_ad._current_level >= 0:
        _check_no_tangent(q, k, v)
    if _are_functorch_transforms_active() or _is_tracing():
        return True
    if type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN:
        if not _len_torch_dispatch_stack():
            return False
        return any(type(mode).__name__ in _OBSERVING for mode in _get_current_dispatch_mode_stack())
    own = (isinstance(x, Tensor) and type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__ for x in (q, k, v))
    return any(own)


def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors as dense memory, torch's negation mark resolved.  Raises InputError for sparse and nested ones."""
    check_plain(q, k, v)
    return q.resolve_neg(), k.resolve_neg(), v.resolve_neg()


def check_plain(*tensors: Tensor) -> None:
    """Raise InputError for sparse and nested tensors, which are named q, k and v."""
    for name, x in zip("qkv", tensors, strict=False):
        if x.is_nested:
            raise InputError(
                f"{name} is a nested tensor, and attention takes dense ones; "
                "call it for each sequence, or pad them to one length (torch.nested.to_padded_tensor) and mask the rest"
            )
        if x.layout is not _STRIDED:
            raise InputError(f"{name} has the layout {x.layout}, not {_STRIDED}; pass {name}.to_dense()")


def as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs cast as torch's autocast casts those of its attention: all floating types but fp64; FP8 stays."""
    device = "cuda" if q.is_cuda else "cpu"
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)


def requires_gradient(x: Tensor) -> bool:
    """Whether x requires a gradient, at any level of torch.func's transforms."""
    if not is_dynamo_compiling():
        while not x.requires_grad and torch._C._functorch.is_functorch_wrapped_tensor(x):
            x = torch._C._functorch.get_unwrapped(x)
    return x.requires_grad


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.dtype in (torch.float32, torch.bfloat16, torch.float16) else x


def _check_no_tangent(*tensors: Tensor) -> None:
    for x in tensors:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
            refuse_tangents()


def refuse_tangents() -> NoReturn:
    """Raise InputError: there is no forward-mode derivative."""
    raise InputError(
        "attnbench.attention has no forward-mode derivative (jvp, jacfwd, hessian); "
        "torch's scaled_dot_product_attention has one within sdpa_kernel(SDPBackend.MATH)"
    )
