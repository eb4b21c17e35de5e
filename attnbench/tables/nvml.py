"""Facts from NVIDIA's driver (NVML): GPUs are found by UUID; each missing fact has a reason."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["Gpu", "Nvml"]

_NOT_AVAILABLE = 2**32 - 1  # NVML_VALUE_NOT_AVAILABLE as the unsigned number that most facts are


class Nvml(AbstractContextManager["Nvml"]):
    """A session with NVML, as a context manager.  Raises nothing; ``reason`` says why a fact is missing."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._library: Any = None
        try:
            library: Any = importlib.import_module("pynvml")
        except ImportError as error:
            self.reason = f"nvidia-ml-py cannot be imported: {error}"
            return
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            self.reason = f"NVML does not start: {error}"
            return
        self._library = library

    def driver(self) -> str | None:
        """The version of the NVIDIA driver."""
        if self._library is None:
            return None
        try:
            return str(self._library.nvmlSystemGetDriverVersion())
        except self._library.NVMLError as error:
            self.reason = f"NVML does not tell the driver's version: {error}"
            return None

    def names(self) -> list[str]:
        """The names of all GPUs in NVML's order, which is not torch's."""
        if self._library is None:
            return []
        nvml = self._library
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            return [str(nvml.nvmlDeviceGetName(handle)) for handle in handles]
        except nvml.NVMLError as error:
            self.reason = f"NVML does not list the GPUs: {error}"
            return []

    def gpu(self, uuid: str) -> Gpu | None:
        """The GPU or MIG instance of a UUID, with or without NVML's prefix; ``reason`` does not disclose it."""
        if self._library is None:
            return None
        prefixes = [""] if uuid.startswith(("GPU-", "MIG-")) else ["GPU-", "MIG-"]
        refusals = []
        for prefix in prefixes:
            try:
                return Gpu(self._library, self._library.nvmlDeviceGetHandleByUUID(prefix + uuid))
            except self._library.NVMLError as error:
                refusals.append(str(error))
        self.reason = f"NVML finds no GPU of this device's UUID: {', '.join(dict.fromkeys(refusals))}"
        return None

    def close(self) -> None:
        """End the session."""
        if self._library is None:
            return
        library, self._library = self._library, None
        try:
            library.nvmlShutdown()
        except library.NVMLError as error:
            self.reason = f"NVML does not shut down: {error}"

    def __exit__(self, *_: object) -> None:
        self.close()


class Gpu:
    """One GPU in a session.  Unknown facts are None; ``silences`` maps a fact's name to the first reason."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle
        self.silences: dict[str, str] = {}

    def clock_mhz(self) -> int | None:
        """What the multiprocessors' clock is now."""
        nvml = self._library
        return self._ask("clock", lambda: nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM))

    def memory_mhz(self) -> int | None:
        """What the memory's clock is now."""
        nvml = self._library
        return self._ask("memory clock", lambda: nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_MEM))

    def power_w(self) -> float | None:
        """What the board draws now.  nvmlDeviceGetPowerUsage gives a second's mean, longer than most measurements."""

        def ask() -> int:
            nvml = self._library
            answer = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])[0]
            if answer.nvmlReturn != nvml.NVML_SUCCESS:
                raise nvml.NVMLError(answer.nvmlReturn)
            return int(answer.value.uiVal)

        milliwatts = self._ask("power", ask)
        return None if milliwatts is None else milliwatts / 1000

    def temperature_c(self) -> int | None:
        """What the chip's temperature is now."""
        nvml = self._library
        return self._ask("temperature", lambda: nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU))

    def clock_reasons(self) -> int | None:
        """What holds the clock where it is: the bits of nvmlClocksEventReasons in nvml.h."""
        nvml = self._library
        return self._ask("clock reasons", lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))

    def highest_clock_mhz(self) -> int | None:
        """The highest clock that the multiprocessors can be given."""
        nvml = self._library
        return self._ask("highest clock", lambda: nvml.nvmlDeviceGetMaxClockInfo(self._handle, nvml.NVML_CLOCK_SM))

    def power_cap_w(self) -> int | None:
        """The power limit that the driver enforces."""
        milliwatts = self._ask("power cap", lambda: self._library.nvmlDeviceGetEnforcedPowerLimit(self._handle))
        return None if milliwatts is None else round(milliwatts / 1000)

    def _ask(self, fact: str, ask: Callable[[], Any]) -> int | None:
        try:
            value = int(ask())
        except (self._library.NVMLError, AttributeError) as error:  # a later nvidia-ml-py may have dropped the function
            self.silences.setdefault(fact, str(error))
            return None
        if value == _NOT_AVAILABLE:
            self.silences.setdefault(fact, "NVML calls it not available")
            return None
        return value
