"""Launch a kernel again without Triton's look at every argument, which takes several times as long as the launch.

If only the memory behind the tensors has changed, the compiled kernel is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from .blocks import Piece, tensor_of
from .descriptors import Described, all_of
from .direct import Start, starter
from .hashing import hash_in_order
from .interpreter import interpreted

__all__ = ["KEPT", "Launch", "Launches", "on"]

KEPT = 1024  # of what is kept for calls that are alike: more come of shapes that no call repeats
_INTERPRETED = interpreted()  # decided where kernels are defined
_MOST = 4096  # launches kept of one kernel
_ALIGNED = 16  # bytes: Triton compiles apart for memory that begins at multiples of it
_HERE: AbstractContextManager[None] = nullcontext()
# ``torch.cuda.current_device`` first asks whether CUDA is initialised, as it is where there is a tensor on it.
_current: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class Launch:
    """A kernel, its grid, and all its arguments except the memory.

    ``constants`` are the arguments behind the first ones, in the kernel's order; ``options`` are the compiler's.  The
    first arguments may have other memory from call to call, but the same dtypes and integers.
    """

    __slots__ = ("_again", "_start", "constants", "grid", "kernel", "options")

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], constants: tuple[Any, ...], options: Mapping[str, Any]
    ) -> None:
        if not _INTERPRETED:
            hash_in_order(kernel)
        self.kernel, self.grid, self.constants, self.options = kernel, grid, constants, dict(options)
        self._start: dict[int, Callable[..., None]] = {}
        self._again: dict[int | None, Start] = {}

    def again(self, device: int | None, addresses: int, first: tuple[Any, ...]) -> bool:
        """Start it if it is known how without tensors: ``first`` has addresses for those, and for descriptors.

        ``device`` is the current GPU's number.  Returns whether it was started; ``__call__`` starts it otherwise.
        """
        start = self._again.get(device)
        return start is not None and not addresses % _ALIGNED and start(first)

    def __call__(self, first: tuple[Any, ...], addresses: int) -> None:
        """Start it on the current stream; ``addresses`` are its memory's, or-ed, without the descriptors', which are
        aligned.
        """
        if addresses % _ALIGNED:
            self.kernel[self.grid](*first, *self.constants, **self.options)
            return
        device = _current_device()
        start = self._start.get(device)
        if start is not None:
            start(*first, *self.constants)
            return
        compiled = self.kernel[self.grid](*first, *self.constants, **self.options)
        if compiled is not None:  # as it is under the interpreter, which has nothing to keep
            self._start[device] = compiled[self.grid]
            direct = starter(compiled, self.grid, first, self.constants)
            if direct is not None:
                self._again[device] = direct

    def on(
        self, device: torch.device, memory: Sequence[Tensor | Piece | None], described: Sequence[Described] = ()
    ) -> None:
        """Start it with these tensors, the first of which are read as ``described``."""
        places = tuple([x.address if type(x) is Piece else None if x is None else x.data_ptr() for x in memory])
        begins = 0
        for place in places:
            begins |= place or 0
        if not self.again(device.index, begins, places):
            tensors: list[Any] = list(map(tensor_of, memory))
            count = len(described)
            self((*all_of(described, tensors[:count]), *tensors[count:]), begins)


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


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Around launches: makes a GPU the current one, for which nothing is to be done where it is that already."""
    if device.type != "cuda" or device.index == _current():
        return _HERE
    return torch.cuda.device(device)


def _current_device() -> int:
    """The number of the current GPU; under the interpreter there is none to ask."""
    return 0 if _INTERPRETED else triton.runtime.driver.active.get_current_device()
