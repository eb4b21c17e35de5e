"""What is asked for beyond the tensors: by argument, by context, by environment variable, in that order."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from ..errors import AttnbenchError, InputError
from ..kernels.registry import registry
from ..problem.spec import DTYPES
from ..text.printable import brief

__all__ = [
    "VARIABLE",
    "Wish",
    "asked_in_context",
    "asked_in_environment",
    "asked_while_tracing",
    "check_traced",
    "current",
    "use_backend",
    "wished",
]

VARIABLE = "ATTNBENCH_BACKEND"


class Wish(NamedTuple):
    """A backend, a dtype and a budget; ``auto`` and None leave the decision to the next source."""

    backend: str = "auto"
    dtype: str | None = None
    max_error: float | None = None
    asked_by: str = "default"


_context: ContextVar[Wish | None] = ContextVar("attnbench_wish", default=None)
# What lies behind os.environ.  Its ``get`` takes most of a microsecond where nothing is set, and what torch.compile
# has made of it does not notice a change; a look-up in the dictionary is thirty times as fast, and guarded.
_environment: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
_variable: Any = os.environ.encodekey(VARIABLE)


class _OfThread(threading.local):
    """The context once more for torch.compile, which guards attributes of objects but not a ContextVar."""

    def __init__(self) -> None:
        self.wish: Wish | None = None


_of_thread = _OfThread()


# The wish of the innermost context, and the environment variable as it is stored: parts of a hashable key.
asked_in_context: Callable[[], Wish | None] = _context.get
asked_in_environment: Callable[[], Any] = partial(_environment.get, _variable)


def asked_while_tracing() -> tuple[Wish | None, Any]:
    """Both for code that torch.compile traces: it compiles anew where either has changed."""
    return _of_thread.wish, _environment.get(_variable)


def check_traced() -> None:
    """Raise AttnbenchError if compiled code cannot see the context: tasks of one thread with different contexts."""
    if _context.get() != _of_thread.wish:
        raise AttnbenchError(
            "compiled code sees the context of its thread, and this task has another one; "
            "name backend, dtype and max_error in the call of attention"
        )


def wished(wish: Wish | None, variable: Any) -> Wish:
    """The context's wish, with the environment variable as its default."""
    wish = wish or Wish()
    if wish.backend == "auto" and variable:
        named = os.environ.decodevalue(variable)
        if named != "auto":
            return wish._replace(backend=named, asked_by=VARIABLE)
    return wish


def current() -> Wish:
    """The wish of the innermost context, with the environment variable behind it."""
    return wished(asked_in_context(), asked_in_environment())


@contextmanager
def use_backend(backend: str = "auto", *, dtype: str | None = None, max_error: float | None = None) -> Iterator[None]:
    """Within the block, ``attention`` uses this backend, kernel or plan, dtype and error budget.

    Arguments of a call take precedence; what is left out here comes from the enclosing block.  Applies to the current
    thread or task only.  Raises UnknownBackendError for an unknown name, InputError for an invalid dtype or budget.

    >>> with use_backend("sdpa-flash"):
    ...     out = attention(q, k, v)
    >>> with use_backend(dtype="fp8", max_error=0.08):
    ...     out = attention(q, k, v)
    """
    if not isinstance(backend, str):
        raise InputError(f"backend must be the name of a backend, kernel or plan, or auto, not {backend!r}")
    if backend != "auto":
        registry().check(backend)
    if dtype not in (None, "fp8", *DTYPES):
        raise InputError(f'dtype must be "fp8" (admit FP8 plans) or the name of the tensors\' own, not {dtype!r}')
    check_budget(max_error)
    outer = _context.get() or Wish()
    wish = Wish(
        backend if backend != "auto" else outer.backend,
        dtype if dtype is not None else outer.dtype,
        max_error if max_error is not None else outer.max_error,
        "context" if backend != "auto" else outer.asked_by,
    )
    token, before = _context.set(wish), _of_thread.wish
    _of_thread.wish = wish
    try:
        yield
    finally:
        _context.reset(token)
        _of_thread.wish = before


def check_budget(max_error: object) -> None:
    """Raise InputError unless ``max_error`` is None or a positive number."""
    if max_error is None:
        return
    if isinstance(max_error, bool) or not isinstance(max_error, (int, float)) or not _positive(max_error):
        raise InputError(f"max_error must be a positive relative error such as 0.08, got {brief(max_error)}")


def _positive(number: float) -> bool:
    """Whether it is positive; infinity is allowed, an integer too large for a float is not."""
    return number > 0 and not sys.float_info.max < number < math.inf
