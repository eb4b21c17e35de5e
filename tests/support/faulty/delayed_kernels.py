"""A registry of kernels with known delays, all in one worker."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from planted import REFERENCE, FakeBackward, FakeForward, backend, same, slowly

import attnbench.kernels.registry
from attnbench import AttentionSpec
from attnbench.harness.autotune import run as autotune
from attnbench.harness.measure.timing import Timer
from attnbench.kernels.registry import Registry

SOURCE = "delayed_kernels:paced"
BREAKS_HOW = "PACED_BREAKS"  # how paced:bf16-breaks breaks: it dies or hangs
HANG_SECONDS = 600.0
SLOW, FAST = 0.03, 0.01


def run_or_break(value: Any) -> Any:
    how = os.environ.get(BREAKS_HOW)
    if how == "dies":
        os._exit(7)
    return slowly(HANG_SECONDS if how == "hangs" else SLOW, value)


def paced() -> Registry:
    """The default kernel is slow, another is faster, and the fastest is in FP8."""
    changes = {
        "paced:bf16-slow": partial(slowly, SLOW),
        "paced:bf16-breaks": run_or_break,
        "paced:bf16-fast": partial(slowly, FAST),
        "paced:fp8": same,
    }
    forwards = [FakeForward(name, change) for name, change in changes.items()]
    for place, forward in enumerate(forwards):
        if not forward.name.endswith("fp8"):
            forward.preference, forward.declared_error = place, 0.005
    backwards = [FakeBackward(each.name) for each in forwards if not each.name.endswith("fp8")]
    for backward in backwards:
        backward.declared_error = 0.005
    return Registry([REFERENCE, backend(*forwards, *backwards)])


def install(set_attribute: Any = setattr) -> None:
    """Installs the registry in this process and its workers, and shortens measurements."""
    known = paced()
    set_attribute(attnbench.kernels.registry, "_load", lambda: iter(known.backends.values()))
    attnbench.kernels.registry.registry.cache_clear()
    set_attribute(autotune, "INSTALLED", SOURCE)
    set_attribute(Timer, "for_device", staticmethod(lambda device: Timer(device, visit=0.0, limit=0.05, patience=1.0)))


def spec(length: int = 32, **more: Any) -> AttentionSpec:
    return AttentionSpec.make(batch=1, heads=2, seqlen_q=length, head_dim=16, **more)
