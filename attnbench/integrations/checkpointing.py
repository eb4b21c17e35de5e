"""Activation checkpointing around a replaced SDPA: its backward computes a function again, perhaps after the block.

A mode of torch ends with its block, so a recompute would call torch's SDPA.  While a checkpointed function runs, the
object that keeps it for its backward is on the call stack and is changed to enter the mode again: ``ctx.run_function``
of a reentrant checkpoint (torch's, DeepSpeed's, Megatron's), and the ``recompute_fn`` of torch's other kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any

from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

__all__ = ["KEEPING", "carry_into_recompute"]

_WITHOUT_REENTRY = inspect.unwrap(checkpoint).__code__
# Names of the functions whose frames may keep something, to rule out most frames without a call.
KEEPING = ("forward", _WITHOUT_REENTRY.co_name)


def carry_into_recompute(frame: FrameType, enter: Callable[[], AbstractContextManager[Any]]) -> bool:
    """Run what this frame keeps for its backward within ``enter()``; False if the frame is an unknown autograd
    function's.
    """
    code = frame.f_code
    if code is _WITHOUT_REENTRY:
        generator = frame.f_locals.get("gen")  # its frame is None once it has ended, and without gradients it has none
        if generator is not None and generator.gi_frame is not None:
            held = generator.gi_frame.f_locals.get("new_frame")
            if held is not None:
                _carry(held, "recompute_fn", enter)
        return True
    if not code.co_argcount or code.co_varnames[0] == "self":
        return True
    context = frame.f_locals.get(code.co_varnames[0])
    if not isinstance(context, FunctionCtx):
        return True
    if not callable(getattr(context, "run_function", None)):
        return False
    _carry(context, "run_function", enter)
    return True


def _carry(holder: Any, attribute: str, enter: Callable[[], AbstractContextManager[Any]]) -> None:
    """Wrap the function once, for all calls of attention that it makes."""
    function = getattr(holder, attribute)
    if getattr(function, "func", None) is not _again:
        setattr(holder, attribute, partial(_again, enter, function))


def _again(enter: Callable[[], AbstractContextManager[Any]], function: Any, *args: Any, **kwargs: Any) -> Any:
    with enter():
        return function(*args, **kwargs)
