"""A failed graph capture: its plan is timed without replay, its backend gets a new process, and no row is lost."""

import torch

from attnbench.harness.cases.case import Case
from attnbench.harness.measure.setup import DeviceSetup, registry_of
from attnbench.harness.measure.timing import Timer
from attnbench.harness.sweep.device_sweep import DeviceSweep, PhaseStarted
from attnbench.harness.sweep.worker_process import Worker
from attnbench.kernels.plan import Plan
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.environment import Environment

SOURCE = "recordable:recordable"
SPEC = AttentionSpec.make(batch=1, heads=2, seqlen_q=64, head_dim=64)
PLANS = [Plan.parse(f"graph:bf16-{name}") for name in ("one", "waits", "two")]


def test_a_call_that_cannot_be_captured_is_timed_uncaptured_with_its_backend(monkeypatch):
    device = torch.device("cuda", 0)
    workers, made = [], Worker.start

    def start(self):
        if not any(each is self for each in workers):
            workers.append(self)
        return made(self)

    monkeypatch.setattr(Worker, "start", start)
    here = Environment.detect(device, registry_of(SOURCE))
    with DeviceSweep(DeviceSetup(device, here, Timer.for_device(device), source=SOURCE)) as line:
        rows = {
            event.plan: event
            for event in line.measure(Case("short", SPEC, ("normal", "outlier")), PLANS)
            if not isinstance(event, PhaseStarted)
        }
        (worker,) = workers
        assert worker.generation == 2
    assert {row.status for row in rows.values()} == {"ok"}, [row.reason for row in rows.values()]
    one, waits, two = (rows[plan] for plan in PLANS)
    assert waits.performance.replayed == []
    assert one.performance.replayed == two.performance.replayed == ["kernel", "prepared"]
    assert all(len(row.time_ms[cost]) >= 2 for row in rows.values() for cost in ("kernel", "call"))
