"""What is asked for beyond the tensors: by argument, by context, by environment variable, in that order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from .errors import InputError
from .registry import registry
from .spec import DTYPES

__all__ = ["VARIABLE", "Wish", "current", "use_backend"]

VARIABLE = "ATTNBENCH_BACKEND"


class Wish(NamedTuple):
    """A backend, a type and a budget; ``auto`` and None leave the matter to the next in line."""

    backend: str = "auto"
    dtype: str | None = None
    max_error: float | None = None
    asked_by: str = "default"


_NO_WISH = Wish()
_context: ContextVar[Wish] = ContextVar("attnbench_wish", default=_NO_WISH)


def current() -> Wish:
    """The wish of the innermost context, with the environment variable behind it."""
    wish = _context.get()
    if wish.backend == "auto":
        named = os.environ.get(VARIABLE)
        if named and named != "auto":
            return wish._replace(backend=named, asked_by=VARIABLE)
    return wish


@contextmanager
def use_backend(backend: str = "auto", *, dtype: str | None = None, max_error: float | None = None) -> Iterator[None]:
    """Within the block, ``attention`` uses this backend, kernel or plan, type and error budget.

    What a call names itself goes first; what is left out here comes from the block around.
    It holds for the current thread or task alone.  Raises UnknownBackendError at once where
    nothing carries the name, InputError where type or budget are none.

    >>> with use_backend("sdpa-flash"):
    ...     out = attention(q, k, v)
    >>> with use_backend(dtype="fp8", max_error=0.08):
    ...     out = attention(q, k, v)
    """
    if backend != "auto":
        registry().check(backend)
    if dtype not in (None, "fp8", *DTYPES):
        raise InputError(f'dtype must be "fp8" (admit FP8 plans) or the name of the tensors\' own, not {dtype!r}')
    check_budget(max_error)
    outer = _context.get()
    wish = Wish(
        backend if backend != "auto" else outer.backend,
        dtype if dtype is not None else outer.dtype,
        max_error if max_error is not None else outer.max_error,
        "context" if backend != "auto" else outer.asked_by,
    )
    token = _context.set(wish)
    try:
        yield
    finally:
        _context.reset(token)


def check_budget(max_error: object) -> None:
    """Raise InputError unless ``max_error`` is None or a positive number."""
    if max_error is None:
        return
    if isinstance(max_error, bool) or not isinstance(max_error, (int, float)) or not max_error > 0:
        raise InputError(f"max_error must be a positive relative error such as 0.08, got {max_error!r}")
