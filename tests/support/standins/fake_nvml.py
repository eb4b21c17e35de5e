"""Stand-ins for pynvml and torch's GPU properties: the test chooses every value and every failure."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

NOT_SUPPORTED, NOT_FOUND, LOST = "Not Supported", "Not Found", "GPU is lost"
SM, MEMORY, CHIP, POWER_NOW = 1, 2, 0, 186


class NVMLError(Exception):
    """As in pynvml: comparable, and so not hashable."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NVMLError) and str(self) == str(other)


@dataclass
class Board:
    """One GPU.  A value may be a function, called at every query; ``failing`` maps a query to its error message."""

    uuid: str
    name: str = "NVIDIA H200"
    clock: int | Callable[[], int] = 1980
    memory: int = 3201
    milliwatts: int = 690_400
    degrees: int = 61
    reasons: int = 0
    highest: int = 1980
    cap: int = 700_000
    failing: dict[str, str] = field(default_factory=dict)


class FakeNvml:
    """The pynvml functions that attnbench calls; counts open ``sessions`` and records the calling ``threads``."""

    def __init__(self, *boards: Board, start: str | None = None, driver: str = "580.159.04") -> None:
        self.boards, self.start, self.version = boards, start, driver
        self.sessions = 0
        self.threads: set[threading.Thread] = set()

    def init(self) -> None:
        if self.start is not None:
            raise NVMLError(self.start)
        self.sessions += 1

    def shutdown(self) -> None:
        self.sessions -= 1

    def handle_by_uuid(self, uuid: str) -> Board:
        for board in self.boards:
            if board.uuid == uuid:
                return board
        raise NVMLError(NOT_FOUND)

    def field_values(self, board: Board, fields: list[int]) -> list[Any]:
        assert fields == [POWER_NOW]
        if "milliwatts" in board.failing:  # the call succeeds, and the field has the error
            return [SimpleNamespace(nvmlReturn=board.failing["milliwatts"], value=SimpleNamespace(uiVal=0))]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=board.milliwatts))]

    def query(self, board: Board, what: str) -> int:
        self.threads.add(threading.current_thread())
        if what in board.failing:
            raise NVMLError(board.failing[what])
        value = getattr(board, what)
        return value() if callable(value) else value


def install(monkeypatch: Any, *boards: Board, start: str | None = None) -> FakeNvml:
    """Makes ``import pynvml`` find these boards for the duration of a test."""
    fake = FakeNvml(*boards, start=start)
    module = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_SUCCESS=0,
        NVML_CLOCK_SM=SM,
        NVML_CLOCK_MEM=MEMORY,
        NVML_TEMPERATURE_GPU=CHIP,
        NVML_FI_DEV_POWER_INSTANT=POWER_NOW,
        nvmlInit=fake.init,
        nvmlShutdown=fake.shutdown,
        nvmlSystemGetDriverVersion=lambda: fake.version,
        nvmlDeviceGetCount=lambda: len(fake.boards),
        nvmlDeviceGetHandleByIndex=lambda index: fake.boards[index],
        nvmlDeviceGetHandleByUUID=fake.handle_by_uuid,
        nvmlDeviceGetName=lambda board: board.name,
        nvmlDeviceGetClockInfo=lambda board, kind: fake.query(board, {SM: "clock", MEMORY: "memory"}[kind]),
        nvmlDeviceGetMaxClockInfo=lambda board, kind: fake.query(board, {SM: "highest"}[kind]),
        nvmlDeviceGetTemperature=lambda board, sensor: fake.query(board, {CHIP: "degrees"}[sensor]),
        nvmlDeviceGetCurrentClocksEventReasons=lambda board: fake.query(board, "reasons"),
        nvmlDeviceGetEnforcedPowerLimit=lambda board: fake.query(board, "cap"),
        nvmlDeviceGetFieldValues=fake.field_values,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return fake


def pretend_cuda(monkeypatch: Any, *uuids: str, name: str = "NVIDIA H200", memory: int = 150_754_820_096) -> None:
    """Makes torch list these GPUs, in this order; nothing can be computed on them."""
    found = [SimpleNamespace(name=name, major=9, minor=0, uuid=uuid, total_memory=memory) for uuid in uuids]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: found[device if isinstance(device, int) else device.index],
    )
