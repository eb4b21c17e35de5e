"""Attention on behalf of another library: its options, and counts of its calls."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attnbench.api import attention
from attnbench.dispatch.context import use_backend
from attnbench.errors import AttnbenchWarning, InputError, NoPlanError, RefusedError
from attnbench.problem.mask import Mask

__all__ = ["Calls", "chosen"]

_REFUSALS = (InputError, RefusedError, NoPlanError)
_serials: Iterator[int] = itertools.count()
_open: WeakValueDictionary[int, Calls] = WeakValueDictionary()


class Calls:
    """The counts of a library's attention calls.

    ``served`` counts calls that attnbench answered, ``handed_on`` those that ``fallback`` did, by reason.  In compiled
    code ``handed_on`` counts once for each compilation.
    """

    def __init__(
        self, whose: str, fallback: str, otherwise: str, backend: str, dtype: str | None, max_error: float | None
    ) -> None:
        """Raises InputError if ``otherwise`` is neither raise nor the fallback, and what use_backend raises."""
        chosen("otherwise", otherwise, "raise", fallback)
        with use_backend(backend, dtype=dtype, max_error=max_error):
            self._asked: dict[str, Any] = {"backend": backend, "dtype": dtype, "max_error": max_error}
        self.served = 0
        self.handed_on: Counter[str] = Counter()
        self.hands_on = otherwise == fallback
        self._whose, self._fallback = whose, fallback
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._serial = next(_serials)
        _open[self._serial] = self

    def __str__(self) -> str:
        lines = [f"{self.served} calls served by attnbench, {self.handed_on.total()} handed on to {self._fallback}"]
        return "\n".join([*lines, *(f"  {count} {reason}" for reason, count in self.handed_on.most_common())])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, **named: Any) -> Tensor | None:
        """``attnbench.attention``; None if it refuses and the call is handed on."""
        window = mask.left, mask.right
        try:
            out = attention(q, k, v, window=window, causal_alignment=mask.alignment, **named, **self._asked)
        except _REFUSALS as error:
            if not self.hands_on:
                raise
            self.refuse(f"attention raises {type(error).__name__}", str(error))
            return None
        if not is_compiling():
            with self._lock:
                self.served += 1
        assert isinstance(out, Tensor)
        return out

    def refuse(self, reason: str, detail: str = "") -> None:
        """Raise InputError with the reason; if calls are handed on, count this one instead, and warn once."""
        self.warn(reason, detail)
        if is_compiling():
            _count_traced(self._serial, reason)
        else:
            self._count(reason)

    def warn(self, reason: str, detail: str = "") -> None:
        """Raise InputError with the reason; if calls are handed on, warn of it once instead."""
        if not self.hands_on:
            raise InputError(
                f"{self._whose}: {reason}, which attnbench cannot serve; "
                f'otherwise="{self._fallback}" hands such calls on'
            )
        if is_compiling():
            _warn_traced(self._serial, reason)
        else:
            self._warn(reason, detail)

    def _count(self, reason: str) -> None:
        with self._lock:
            self.handed_on[reason] += 1

    def _warn(self, reason: str, detail: str = "") -> None:
        with self._lock:
            new = reason not in self._warned
            self._warned.add(reason)
        if new:
            message = f"{reason}: {detail}" if detail else reason
            message = f"{self._whose}: {message}; such calls are handed on to {self._fallback}"
            warnings.warn(message, AttnbenchWarning, stacklevel=2)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _count_traced(serial: int, reason: str) -> None:
    _open[serial]._count(reason)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn_traced(serial: int, reason: str) -> None:
    _open[serial]._warn(reason)


def chosen(name: str, value: object, *names: str) -> None:
    """Raise InputError unless ``value`` is one of the names."""
    if value not in names:
        raise InputError(f"{name} must be {' or '.join(map(repr, names))}, not {value!r}")
