"""A faster interpreter for Triton without repeated work for each operation: the same bits in a fifth of the time.

The tests' blocks are small, so nearly all of the time is Python overhead: the language is patched again for each call
of a function, integers are checked for overflow without a reader, types and shapes are recreated for each number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import pytest

__all__ = ["WRITTEN_FOR", "QuickerParts", "quick_interpreter", "quicker_parts"]

WRITTEN_FOR = "3.6."  # of Triton; interpreters of other versions are not changed

QuickerParts = list[tuple[Any, str, Any]]  # objects, names of attributes, and faster replacements


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Makes Triton's interpreter fast in the block; does nothing for compiled kernels or another version of Triton."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, quicker in quicker_parts():
            patch.setattr(owner, name, quicker)
        yield


def quicker_parts() -> QuickerParts:
    """The replacements; each function has the original as ``__wrapped__``."""
    try:
        import triton
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return []
    from attnbench.backends.triton.interpreter import interpreted

    if not interpreted() or not triton.__version__.startswith(WRITTEN_FOR):
        return []
    core, builder = language.core, interpreter.interpreter_builder
    parts: QuickerParts = [
        (interpreter, "_patch_lang", _patched_once(interpreter._patch_lang, interpreter, language)),
        (interpreter, "_get_np_dtype", _looked_up(interpreter._get_np_dtype, core)),
        (core.block_type, "__init__", _block_type(core.block_type.__init__, core)),
        (core.tensor, "__init__", _tensor(core.tensor.__init__, core)),
    ]
    if not builder.options.debug:  # only in debug mode are overflow checks read
        parts.append((builder, "options", replace(builder.options, sanitize_overflow=False)))
    return parts


def _patched_once(original: Callable[[Any], Any], interpreter: Any, language: Any) -> Callable[[Any], Any]:
    """Skips patching for functions called in a kernel: the kernel's launch has already patched the language."""

    @cache
    def seen(function: Any) -> list[Any]:
        return [x for x in (language, language.core) if any(x is each for each in function.__globals__.values())]

    @wraps(original)
    def patch(function: Any) -> Any:
        members = [each for x in seen(function) for each in (x.load, x.tensor.__add__)]
        if not members or any(map(language.core.is_builtin, members)):
            return original(function)
        return interpreter._LangPatchScope()

    return patch


def _looked_up(original: Callable[[Any], Any], core: Any) -> Callable[[Any], Any]:
    """Caches NumPy's dtypes for Triton's, whose table is otherwise rebuilt for each call."""
    known: dict[str, Any] = {}

    @wraps(original)
    def look_up(dtype: Any) -> Any:
        name = (dtype.element_ty if isinstance(dtype, core.block_type) else dtype).name
        if name not in known:
            known[name] = original(dtype)
        return known[name]

    return look_up


def _block_type(original: Callable[..., None], core: Any) -> Callable[..., None]:
    """Computes the attributes of each block type (dtype and shape) once."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    @wraps(original)
    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(x.value if isinstance(x, core.constexpr) else x for x in shape))
        if key not in known:
            original(self, element_ty, shape)
            known[key] = dict(vars(self))
            known[key]["of_tensor"] = core.constexpr(self.numel), core.tuple([core.constexpr(x) for x in self.shape])
        vars(self).update(known[key], element_ty=element_ty)

    return init


def _tensor(original: Callable[..., None], core: Any) -> Callable[..., None]:
    """Takes a tensor's shape from its type."""
    of_scalar = core.constexpr(1), core.tuple([])

    @wraps(original)
    def init(self: Any, handle: Any, type: Any) -> None:
        found = getattr(type, "of_tensor", None) if type.is_block() else of_scalar
        if found is None:  # its type was created by Triton's own constructor
            original(self, handle, type)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = found

    return init
