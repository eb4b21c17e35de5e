"""Test the harness: a sweep over kernels with planted faults, and what it failed to notice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ..harness.cases.case import Case
from ..harness.measure.setup import DeviceSetup, registry_of
from ..harness.measure.timing import Timer
from ..harness.results.records import Measurement
from ..harness.results.store import Store
from ..harness.sweep.run import Finished, Task, run_sweep
from ..tables.environment import Environment
from .faults import FAULTS, GPU_FAULTS, HONEST, Fault

__all__ = ["sweep_faults", "why_missed"]

_SOURCE = "attnbench.testing.faults:registry"
_SECONDS = 20.0  # the limit for a hang; the correct kernel needs one second on a busy machine


def sweep_faults(device: torch.device) -> Iterator[tuple[Fault, Measurement]]:
    """Every fault with its row in a sweep on the device, and the correct kernel on each spec."""
    faults = [*FAULTS, *(GPU_FAULTS if device.type == "cuda" else ())]
    faults += [Fault("none", spec, "ok", HONEST) for spec in dict.fromkeys(fault.spec for fault in faults)]
    cases = {fault.spec: Case(str(fault.spec), fault.spec) for fault in faults}
    by_key = {(cases[fault.spec].name, fault.plan): fault for fault in faults}
    tasks = [Task(cases[fault.spec], fault.plan, "ok", ()) for fault in faults]
    tasks.sort(key=lambda task: task.case.name)
    environment = Environment.detect(device, registry_of(_SOURCE))
    setup = DeviceSetup(device, environment, Timer.for_device(device), source=_SOURCE, seconds=_SECONDS)
    with TemporaryDirectory() as folder, Store(Path(folder), environment) as store:
        for event in run_sweep(tasks, [setup], store):
            if isinstance(event, Finished):
                yield by_key[event.row.key], event.row


def why_missed(fault: Fault, row: Measurement) -> str | None:
    """What the row of a fault should say and does not; None if the fault was found by name."""
    if row.status != fault.status:
        return f"{fault.name}: the status is {row.status} ({row.reason}), not {fault.status}"
    if row.check != fault.check:
        return f"{fault.name}: found by {row.check} ({row.reason}), not by {fault.check}"
    if fault.reason not in (row.reason or ""):
        return f"{fault.name}: the reason is {row.reason!r}, without {fault.reason!r}"
    if fault.flag == "leak" and not row.correctness.leak:
        return f"{fault.name}: leak is {row.correctness.leak}"
    if fault.flag == "deterministic" and row.correctness.deterministic is not False:
        return f"{fault.name}: deterministic is {row.correctness.deterministic}"
    return None
