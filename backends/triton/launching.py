"""Launching a kernel again without asking Triton what was asked before.

``JITFunction`` looks at every argument of every launch, to find what was compiled for such arguments: that takes the
host several times as long as the launch itself.  Where nothing has changed but the memory behind the tensors, the
answer is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import triton
from torch import Tensor

from .interpreter import interpreted

__all__ = ["Launch", "Launches", "addresses"]

_INTERPRETED = interpreted()  # decided where kernels are defined
_MOST = 4096  # launches kept of one kernel: more come of shapes that no call repeats
_ALIGNED = 16  # bytes: Triton compiles apart for memory that begins at multiples of it


class Launch:
    """A kernel, its grid, and all that it is called with except the memory.

    ``constants`` are the arguments behind the first, in the order of the kernel's own; ``options`` are the compiler's.
    The first arguments may have other memory from call to call, but the same dtypes and the same integers.
    """

    __slots__ = ("_compiled", "constants", "grid", "kernel", "options")

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], constants: tuple[Any, ...], options: Mapping[str, Any]
    ) -> None:
        self.kernel, self.grid, self.constants, self.options = kernel, grid, constants, dict(options)
        self._compiled: dict[int, Any] = {}

    def __call__(self, first: tuple[Any, ...], addresses: int) -> None:
        """Start it on the current stream of the current device; ``addresses`` are those of its memory, or-ed."""
        arguments = (*first, *self.constants)
        if addresses % _ALIGNED:
            self.kernel[self.grid](*arguments, **self.options)
            return
        device = _current_device()
        compiled = self._compiled.get(device)
        if compiled is None:
            # None under the interpreter, which has nothing to keep.
            self._compiled[device] = self.kernel[self.grid](*arguments, **self.options)
        else:
            compiled[self.grid](*arguments)


class Launches:
    """The launches of one kernel, by all that they depend on."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._made: dict[tuple[Any, ...], Launch] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        constants: tuple[Any, ...],
        dtypes: tuple[Any, ...],
        **options: Any,
    ) -> Launch:
        """The one for these constants; ``dtypes`` are those of its memory that may differ from call to call."""
        key = grid, constants, dtypes, tuple(options.items())
        launch = self._made.get(key)
        if launch is None:
            if len(self._made) >= _MOST:
                self._made.clear()
            launch = self._made[key] = Launch(self._kernel, grid, constants, options)
        return launch


def addresses(memory: Iterable[Tensor | None]) -> int:
    """Where the tensors begin, or-ed."""
    found = 0
    for each in memory:
        if each is not None:
            found |= each.data_ptr()
    return found


def _current_device() -> int:
    """The number of the current GPU; under the interpreter there is none to ask."""
    return 0 if _INTERPRETED else triton.runtime.driver.active.get_current_device()
