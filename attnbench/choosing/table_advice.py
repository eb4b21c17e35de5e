"""What to say where a device has no table of its own: the command that makes one, and how long that takes."""

from __future__ import annotations

import warnings

import torch

from ..errors import AttnbenchWarning
from ..kernels.devices import describe
from ..state import Cache
from ..text.printable import printable
from .candidate import Candidate
from .choice import Choice

__all__ = ["advice", "warn_of_rule"]

_COMMAND = "`attnbench sweep --preset table` makes a table of this device in about 10 minutes"
_warned: Cache[torch.device, str] = Cache(lasting=True)


def advice(winner: Candidate) -> str | None:
    """The hint of a choice by rule, or by another GPU's times; None for others."""
    if winner.basis == "rule":
        return f"nothing like this was measured on this device; {_COMMAND}"
    return f"its times were measured on another GPU; {_COMMAND}" if winner.basis == "scaled" else None


def warn_of_rule(choice: Choice, device: torch.device) -> None:
    """Warn if ``auto`` chose by rule on a GPU, once a device; on a CPU a rule is the usual thing."""
    if choice.basis != "rule" or device.type != "cuda" or device in _warned.entries:
        return
    where = printable(describe(device).name)
    message = f"nothing like {choice.spec} was measured on {where}, so a fixed order of kernels decides; {_COMMAND}"
    if _warned.of(device, lambda: message) is message:  # not another thread's
        warnings.warn(message, AttnbenchWarning, stacklevel=2)
