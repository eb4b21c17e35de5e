"""Hash Triton's functions after what they call, so that a kernel has the same key in every process.

Compiled code is found on the disk by a key that contains the kernel's hash.  Triton 3.6 adds the global values that a
callee uses to its caller's hash only if the callee was hashed before (``DependenciesFinder._update_hash`` in
triton/runtime/jit.py), so the key depends on which kernels ran earlier in the process, and code that another process
compiled is compiled again.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

__all__ = ["hash_in_order"]


def hash_in_order(function: Any, above: tuple[Any, ...] = ()) -> None:
    """Hash a function of Triton, after all that it calls; nothing is done for what is no such function.

    ``above`` are its callers, which a function that calls itself would come back to.
    """
    # Triton computes the hash once, when it is first asked for, and keeps it.
    if getattr(function, "hash", "") is not None or function in above:
        return
    for callee in _named_in(function.fn):
        hash_in_order(callee, (*above, function))
    function.cache_key  # noqa: B018


def _named_in(function: Any) -> list[Any]:
    """The values of all names in a Python function that are global, or attributes of a module that is."""
    names, scope = function.__code__.co_names, function.__globals__
    found = [scope[name] for name in names if name in scope]
    modules = [each for each in found if isinstance(each, ModuleType)]
    return found + [getattr(module, name) for module in modules for name in names if hasattr(module, name)]
