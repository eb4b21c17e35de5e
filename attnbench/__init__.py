"""attnbench: measure every FP8 attention on your own GPU and shapes, then run the fastest one that is accurate enough.

The names below are loaded when they are first used, so that ``attnbench --help`` does
not wait for torch and ``import attnbench`` touches no vendor package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "AttentionSpec": "spec",
    "AttnbenchError": "errors",
    "Choice": "choice",
    "Mask": "mask",
    "Plan": "plan",
    "attention": "api",
    "autotune": "harness.autotune.run",
    "explain": "api",
    "freeze": "freezing",
    "guard": "guarding",
    "use_backend": "context",
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
    from .choice import Choice
    from .context import use_backend
    from .errors import AttnbenchError
    from .freezing import freeze
    from .guarding import guard
    from .harness.autotune.run import autotune
    from .mask import Mask
    from .plan import Plan
    from .spec import AttentionSpec


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
