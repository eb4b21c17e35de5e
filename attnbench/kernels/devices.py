"""torch devices as the rest of attnbench sees them."""

from __future__ import annotations

import threading

import torch

from ..errors import InputError
from ..state import Cache
from ..text.printable import brief
from .capabilities import Device

__all__ = ["bind", "describe", "find"]

_of_thread = threading.local()
_known: Cache[torch.device, Device] = Cache()


def bind(device: torch.device) -> None:
    """Make a GPU's context current in this thread, as a first call of the CUDA runtime does.

    A library that encodes TMA descriptors with the driver (FlashAttention-3) fails in a thread without a context: the
    descriptor is invalid, and the kernel that reads it loses the GPU for the process.
    """
    if device.type != "cuda":
        return
    try:
        bound: set[torch.device] = _of_thread.bound
    except AttributeError:
        bound = _of_thread.bound = set()
    if device not in bound:
        # A call that may also be made while a CUDA graph is recorded.
        torch.cuda.Event().record(torch.cuda.current_stream(device))  # type: ignore[no-untyped-call]
        bound.add(device)


def describe(device: torch.device) -> Device:
    """The facts about a device that a refusal may depend on, cached."""
    return _known.of(device, _described, device)


def _described(device: torch.device) -> Device:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device("cuda", properties.name, (properties.major, properties.minor))
    return Device(device.type, device.type.upper())


def find(name: str) -> torch.device:
    """The device called ``auto`` (the first GPU, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``.  Raises InputError."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"a device is auto, cpu, cuda or cuda:N, not {brief(name)}") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"attnbench measures on cpu and cuda, not on {device.type}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(f"{name} was asked for, but torch sees no GPU here; `attnbench doctor` says more")
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise InputError(f"{name} was asked for, but torch sees only {torch.cuda.device_count()} GPU(s) here")
    elif device.index not in (None, 0):
        raise InputError(f"there is one cpu, not {brief(name)}")
    return device if device.type == "cuda" else torch.device("cpu")
