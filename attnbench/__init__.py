"""attnbench: measure every FP8 attention on your own GPU and shapes, then run the fastest one that is accurate enough.

The names below are loaded when they are first used, so that ``attnbench --help`` does
not wait for torch and ``import attnbench`` touches no vendor package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "AttentionSpec": "problem.spec",
    "AttnbenchError": "errors",
    "Choice": "choosing.choice",
    "Mask": "problem.mask",
    "Plan": "kernels.plan",
    "attention": "api",
    "autotune": "harness.autotune.run",
    "explain": "api",
    "freeze": "freezing.freeze",
    "guard": "guarding.guard",
    "use_backend": "dispatch.context",
}
__all__ = [
    "AttentionSpec",
    "AttnbenchError",
    "Choice",
    "Mask",
    "Plan",
    "__version__",
    "attention",
    "autotune",
    "explain",
    "freeze",
    "guard",
    "use_backend",
]

if TYPE_CHECKING:
    from .api import attention, explain
    from .choosing.choice import Choice
    from .dispatch.context import use_backend
    from .errors import AttnbenchError
    from .freezing.freeze import freeze
    from .guarding.guard import guard
    from .harness.autotune.run import autotune
    from .kernels.plan import Plan
    from .problem.mask import Mask
    from .problem.spec import AttentionSpec


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
