"""A drop-in for ``torch.nn.functional.scaled_dot_product_attention``: within a block its calls are attnbench's.

A ``TorchFunctionMode`` sees the calls of its own thread, by whatever name they are made; nothing of torch is patched.
``torch.nn.MultiheadAttention`` asks SDPA too, from inside a function that torch hands to modes as a whole: that
function runs with an SDPA of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from attnbench.execution import Execution

from .calls import Calls
from .mask_tensors import MaskTensors, hidden

__all__ = ["replaced"]

_SDPA: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention
_HEADS: Any = F.multi_head_attention_forward


@contextmanager
def replaced(
    backend: str = "auto", *, dtype: str | None = None, max_error: float | None = None, otherwise: str = "raise"
) -> Iterator[Calls]:
    """Within the block, this thread's calls of torch's SDPA are answered by ``attnbench.attention``.

    They mean what they mean to torch: (..., S, D) tensors of two to any number of axes, ``is_causal`` aligned
    top-left, ``enable_gqa``, ``scale``, autocast, a mask tensor (which is looked at, and served where it is none,
    causal or a window).  ``backend``, ``dtype`` and ``max_error`` are those of ``attention``, and leave to
    ``use_backend`` what they do not name.  FP8 is opted into here as there.

    What cannot be served (dropout, padding, a bias, masks inside compiled code, nested and other tensors of classes of
    their own, what ``attention`` refuses) raises InputError or attention's own error with ``otherwise="raise"``; with
    ``otherwise="torch"`` torch computes it, with a warning for the first call of each reason and a count of all.

    Yields the counts.  Of nested blocks the innermost holds.  Backwards need not be in the block.

    >>> with replaced(dtype="fp8", max_error=0.08, otherwise="torch") as calls:
    ...     loss = model(batch)
    >>> print(calls)
    """
    calls = Calls("scaled_dot_product_attention", "torch", otherwise, backend, dtype, max_error)
    with _Replacing(calls):
        yield calls


class _Replacing(TorchFunctionMode):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls, self._masks = calls, MaskTensors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _SDPA:
            if is_compiling() or not _inside_attnbench():
                return self._sdpa(*args, **(kwargs or {}))
        elif func is _HEADS and (is_compiling() or not _inside_attnbench()):
            return self._heads(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _heads(self, *args: Any, **kwargs: Any) -> Any:
        """The same function, where SDPA is ours and no mode is asked again."""
        names = {"scaled_dot_product_attention": self._sdpa, "has_torch_function": lambda tensors: False}
        heads = FunctionType(_HEADS.__code__, {**_HEADS.__globals__, **names}, _HEADS.__name__, _HEADS.__defaults__)
        heads.__kwdefaults__ = _HEADS.__kwdefaults__
        return heads(*args, **kwargs)

    def _sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        mask = None
        if (obstacle := _obstacle(query, key, value)) is not None:
            self._calls.refuse(obstacle)
        else:
            lengths = query.shape[-2], key.shape[-2]
            mask = hidden(self._calls, self._masks, attn_mask, dropout_p, is_causal, *lengths)
        if mask is not None:
            q, k, v = (_four(x) for x in (query, key, value))
            out = self._calls.attend(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
            if out is not None:
                return out.reshape(*query.shape[:-1], value.shape[-1])
        return _SDPA(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa,
        )  # fmt: skip


def _obstacle(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why attnbench cannot serve these tensors, whatever is hidden; None where nothing is in the way."""
    tensors = (query, key, value)
    if any(x.is_nested for x in tensors):
        return "nested tensors"
    if not is_compiling() and any(type(x) not in (Tensor, torch.nn.Parameter) for x in tensors):
        return "tensors of classes of their own"
    if not query.ndim == key.ndim == value.ndim >= 2 or not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        return "tensors that are broadcast against each other"
    return None


def _four(x: Tensor) -> Tensor:
    """(..., S, D) as (B, H, S, D): heads are the third axis from the end, as they are to ``enable_gqa``."""
    return x if x.ndim == 4 else x[None, None] if x.ndim == 2 else x.reshape(-1, *x.shape[-3:])


def _inside_attnbench() -> bool:
    """Whether a kernel of ours, or another block like this, has made the call: those mean torch's own SDPA."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code in _OURS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_OURS: frozenset[CodeType] = frozenset(
    each.__code__
    for each in (
        Execution.answer, Execution.prepare, Execution.gradients, Execution.quantised, _Replacing.__torch_function__,
    )
)  # fmt: skip
