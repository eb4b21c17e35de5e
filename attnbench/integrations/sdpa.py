"""Replaces ``torch.nn.functional.scaled_dot_product_attention`` within a block.

A ``TorchFunctionMode`` intercepts the calls of its own thread; nothing of torch is patched.
``torch.nn.MultiheadAttention`` calls SDPA inside a function that modes see as a whole: that function runs with another
SDPA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from attnbench.dispatch.context import Wish, asked_in_context, use_backend
from attnbench.kernels.execution import Execution
from attnbench.problem.mask import Mask

from .calls import Calls
from .checkpointing import KEEPING, carry_into_recompute
from .mask_tensors import MaskTensors, hidden
from .transformers_sequences import Sequences

__all__ = ["replaced"]

_SDPA: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention
_HEADS: Any = F.multi_head_attention_forward
_OWN = "a call of attnbench's own"


@contextmanager
def replaced(
    backend: str = "auto", *, dtype: str | None = None, max_error: float | None = None, otherwise: str = "raise"
) -> Iterator[Calls]:
    """Within the block, ``attnbench.attention`` serves this thread's calls of torch's SDPA.

    Arguments have torch's meaning: (..., S, D) tensors of two or more axes, ``is_causal`` aligned top-left,
    ``enable_gqa``, ``scale``, autocast, a mask tensor (read at each call, served if it is equivalent to no mask, causal
    or a window, or hides the padding of rows, which are then packed).  ``backend``, ``dtype`` and ``max_error`` are
    those of ``attention``; what they leave out ``use_backend`` decides.

    What cannot be served (dropout, a bias, masks inside compiled code, nested tensors and other tensor
    classes, what ``attention`` refuses) raises InputError or attention's own error with ``otherwise="raise"``; with
    ``otherwise="torch"`` torch computes it, with a warning for the first call of each reason and a count of all.

    Yields the counts.  Of nested blocks the innermost applies.  Backwards need not be in the block.

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
        if func is _SDPA or func is _HEADS:
            reason = None if is_compiling() else self._callers()
            if reason is not _OWN:
                ours = self._sdpa if func is _SDPA else self._heads
                return ours(*args, **(kwargs or {}), reason=reason)
        return func(*args, **(kwargs or {}))

    def _callers(self) -> str | None:
        """Inspect the callers on the stack; returns why the call cannot be served, None if nothing is in the way.

        Within a kernel of ours, or another block like this one, torch's own SDPA is meant.  Checkpoints are changed to
        recompute within this block.
        """
        enter, reason = partial(self._recompute, asked_in_context()), None
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code in _OURS:
                return _OWN
            if code.co_name in KEEPING and not carry_into_recompute(frame, enter):
                reason = "an autograd function that may compute attention again in its backward"
            frame = frame.f_back
        return reason

    @contextmanager
    def _recompute(self, wish: Wish | None) -> Iterator[None]:
        backend, dtype, max_error, _ = wish or Wish()
        with self, use_backend(backend, dtype=dtype, max_error=max_error):
            yield

    def _heads(self, *args: Any, reason: str | None, **kwargs: Any) -> Any:
        """The same function with our SDPA, which no mode intercepts again."""
        ours = partial(self._sdpa, reason=reason)
        names = {"scaled_dot_product_attention": ours, "has_torch_function": lambda tensors: False}
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
        *,
        reason: str | None,
    ) -> Tensor:
        mask = None
        if not isinstance(query, Tensor):
            pass  # a proxy of torch.fx: SDPA is what its graph shall hold
        elif (reason := reason or _obstacle(query, key, value)) is not None:
            self._calls.refuse(reason)
        else:
            weights = () if attn_mask is None else (*query.shape[:-1], key.shape[-2])
            mask = hidden(self._calls, self._masks, attn_mask, dropout_p, is_causal, weights, query)
        if isinstance(mask, Sequences):
            out = mask.attend(self._calls, query, key, value, Mask(), scale=scale, enable_gqa=enable_gqa)
            if out is not None:
                return out.transpose(1, 2)
        elif mask is not None:
            q, k, v = (query, key, value) if query.ndim == 4 else (_four(x) for x in (query, key, value))
            out = self._calls.attend(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
            if out is not None:
                return out if query.ndim == 4 else out.reshape(*query.shape[:-1], value.shape[-1])
        return _SDPA(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa,
        )  # fmt: skip


def _obstacle(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why attnbench cannot serve these tensors, whatever the mask; None if it can."""
    if query.is_nested or key.is_nested or value.is_nested:
        return "nested tensors"
    if not is_compiling():
        if not (type(query) in _PLAIN and type(key) in _PLAIN and type(value) in _PLAIN):
            return "tensors of classes of their own"
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return "torch.jit.trace, which records no operator of attnbench"
    shape, keys, values = query.shape, key.shape, value.shape
    if len(shape) == len(keys) == len(values) >= 2:
        if len(shape) == 4 and shape[0] == keys[0] == values[0]:  # the common case, without slicing
            return None
        if shape[:-3] == keys[:-3] == values[:-3]:
            return None
    return "tensors that are broadcast against each other"


def _four(x: Tensor) -> Tensor:
    """(..., S, D) as (B, H, S, D); heads are the third axis from the end."""
    return x[None, None] if x.ndim == 2 else x.reshape(-1, *x.shape[-3:])


_PLAIN = (Tensor, torch.nn.Parameter)
_OURS: frozenset[CodeType] = frozenset(
    each.__code__
    for each in (
        Execution.answer, Execution.prepare, Execution.gradients, _Replacing._sdpa,
    )
)  # fmt: skip
