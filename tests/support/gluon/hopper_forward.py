"""Runs the forward's Hopper kernel in the Gluon emulator on a CPU, as if with three multiprocessors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from gluon_on_cpu import emulated

_MODULES = [
    f"attnbench.backends.triton.forward.hopper.{name}" for name in ("kernel", "order", "products", "scales", "softmax")
]


@contextmanager
def forward_on_cpu(late: Callable[[], bool]) -> Iterator[None]:
    """Runs the kernel emulated in the block; ``late`` decides for each program when asynchronous operations happen."""
    from attnbench.backends.triton.forward import launch
    from attnbench.backends.triton.forward.hopper import launch as hopper

    def emulating(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            with emulated(late, *_MODULES):
                return function(*args, **named)

        run.__dict__.update(vars(function), cache_clear=getattr(function, "cache_clear", None))
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "runs_on", lambda device: True)
        patch.setattr(hopper, "_multiprocessors", lambda device: 3)
        # Layouts are not cached, because they hold the emulator's kernel.
        for name, function in {"layout_of": launch.layout_of.__wrapped__, "attend": launch.attend}.items():
            patch.setattr(launch, name, emulating(function))
        yield
