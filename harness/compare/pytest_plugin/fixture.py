"""The fixture ``attention_benchmark``: measure a plan as a sweep does, and report it to pytest-benchmark."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from attnbench.dispatch.context import check_budget
from attnbench.errors import AttnbenchWarning, InputError, MisuseError
from attnbench.kernels.devices import describe, find
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import registry
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.environment import Environment

from ...cases.case import Case
from ...cases.inputs import DEFAULT_FAMILIES
from ...measure.setup import DeviceSetup
from ...measure.timing import COSTS, Cost, Timer
from ...results.records import Measurement, Status
from ...sweep.device_sweep import DeviceSweep
from ...sweep.rows import unmeasured_row
from .samples import Benchmark, Replay, hand_over

if TYPE_CHECKING:
    from .gate import Gatekeeper, GateVerdict

__all__ = ["AttentionBenchmark", "SessionDevices", "unlike"]

# The fields of a row that go to extra_info, beside its samples.
_EXTRA_INFO = (
    "plan",
    "spec",
    "status",
    "reason",
    "check",
    "error",
    "floor",
    "bound",
    "truth",
    "drawn_on",
    "replayed",
    "memory_bytes",
    "peak_share",
    "ran",
    "gpu",
)


class SessionDevices:
    """The devices of a pytest session, each with its backends' processes until the session ends.

    ``most_seconds`` limits a plan's sampling time; a device's own limit (attnbench.harness.measure.timing.Timer)
    applies if it is shorter.
    """

    def __init__(self, most_seconds: float) -> None:
        self._most_seconds = most_seconds
        self._sweeps: dict[torch.device, DeviceSweep] = {}
        self._open = ExitStack()

    @property
    def environments(self) -> dict[str, Environment]:
        """The environments by device name."""
        return {str(device): sweep.setup.environment for device, sweep in self._sweeps.items()}

    def measure(self, case: Case, plan: Plan, device: torch.device, max_error: float | None, once: bool) -> Measurement:
        """The row of one plan; ``once``: with as few samples as a row can have."""
        sweep = self._sweep(device, once)
        sweep.setup = replace(sweep.setup, max_error=max_error)
        status, reasons = sweep.setup.registry.reasons(plan, case.spec, describe(device))
        if status != "ok":
            known: Status = "refused" if status == "refused" else "unavailable"
            return unmeasured_row(case, plan, known, reasons, sweep.setup)
        _quiesce()
        (row,) = [event for event in sweep.measure(case, [plan]) if isinstance(event, Measurement)]
        return row

    def _sweep(self, device: torch.device, once: bool) -> DeviceSweep:
        if device not in self._sweeps:
            timer = Timer.for_device(device)
            timer = replace(timer, limit=min(timer.limit, self._most_seconds))
            if once:
                timer = replace(timer, visit=0.0, limit=0.0, fewest=1)
            setup = DeviceSetup(device, Environment.detect(device, registry()), timer)
            self._sweeps[device] = self._open.enter_context(DeviceSweep(setup))
        return self._sweeps[device]

    def __enter__(self) -> SessionDevices:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


class AttentionBenchmark:
    """The fixture: called once in a test, with a plan and a spec.

    ``gatekeeper`` compares its rows with an older environment, if the session has one.
    """

    def __init__(
        self, benchmark: Benchmark, clock: Replay | None, devices: SessionDevices, gatekeeper: Gatekeeper | None = None
    ) -> None:
        if clock is None:
            raise MisuseError("request attention_benchmark as an argument of the test or of a fixture that it uses")
        self._benchmark, self._clock, self._devices = benchmark, clock, devices
        self._gatekeeper = gatekeeper

    def __call__(
        self,
        plan: Plan | str,
        spec: AttentionSpec,
        *,
        cost: Cost = "call",
        families: Sequence[str] = DEFAULT_FAMILIES,
        device: str = "auto",
        max_error: float | None = None,
        optional: bool = False,
        gate: bool = True,
    ) -> Measurement:
        """Measure the plan on the spec in a process of its own, judge its answers, and report its samples.

        ``plan`` is written ``fa3:fp8``, or ``fa3:fp8>fa4:bf16`` for training.  The samples of ``cost`` (kernel,
        prepared, backward, call) become the benchmark's, in seconds; the errors on each of ``families``, drawn for the
        spec, and the conditions become its ``extra_info``.  ``device`` is auto (the first GPU, else the CPU), cpu, cuda
        or cuda:N.  ``max_error`` is the largest error for which an FP8 plan is ``ok``, by default its class's.

        Returns the row that a sweep would write.  A plan with another status than ``ok`` fails the test with the
        reason, an inaccurate one after its times were reported; with ``optional`` a plan that is unavailable or refuses
        the spec skips it.  With ``--attention-base-python`` an ``ok`` row is also visited in that environment, in turns
        with this one: the test fails if the row is slower here, or that remains uncertain.  ``gate=False`` turns this
        off, for a plan that the other environment does not have.  If benchmarks are disabled (``--benchmark-disable``,
        xdist) the plan is judged as usual but timed as little as possible, and nothing is gated or reported.

        Raises InputError or UnknownBackendError for something that does not exist, MisuseError for arguments that do
        not fit together; pytest then shows the test's own line alone.
        """
        __tracebackhide__ = True
        try:
            row, place = self._measured(plan, spec, cost, families, device, max_error)
            verdict = self._gate(row, cost, place) if gate else None
        except MisuseError as error:
            raise error.with_traceback(None) from None
        if row.measured:
            self._report(row, cost, place, verdict)
        subject = f"{row.plan} on {spec}, {place}"
        message = f"{subject}: {row.status}, {row.reason}"
        if optional and row.status in ("refused", "unavailable"):
            pytest.skip(message)
        if row.status != "ok":
            pytest.fail(message, pytrace=False)
        if verdict is not None and verdict.fault is not None:
            pytest.fail(f"{subject}: {verdict.fault}", pytrace=False)
        return row

    def _measured(
        self,
        plan: Plan | str,
        spec: AttentionSpec,
        cost: Cost,
        families: Sequence[str],
        device: str,
        max_error: float | None,
    ) -> tuple[Measurement, torch.device]:
        """The row and the device that it was measured on."""
        plan = plan if isinstance(plan, Plan) else Plan.parse(plan)
        case = Case(str(spec), spec, tuple(families))
        place = find(device)
        check_budget(max_error)
        if max_error is not None and not plan.fp8:
            raise MisuseError(f"max_error is for FP8 plans, and {plan} is none")
        if cost not in COSTS or (cost == "backward" and not spec.training):
            raise MisuseError(f"a cost of {spec} is one of {', '.join(_costs(spec))}, not {cost!r}")
        return self._devices.measure(case, plan, place, max_error, self._benchmark.disabled), place

    def _gate(self, row: Measurement, cost: Cost, device: torch.device) -> GateVerdict | None:
        """The gate's verdict on the row; None if the row is not gated."""
        if self._gatekeeper is None or row.status != "ok":
            return None
        if self._benchmark.disabled:
            message = "--attention-base-python gates nothing where benchmarks are disabled"
            warnings.warn(AttnbenchWarning(message), stacklevel=3)
            return None
        _quiesce()
        return self._gatekeeper.judge(row, cost, device)

    def _report(self, row: Measurement, cost: Cost, device: torch.device, verdict: GateVerdict | None) -> None:
        benchmark, data = self._benchmark, row.to_dict()
        data |= data["correctness"] | data["performance"]
        if benchmark.group is None:  # rows in one table are comparable
            benchmark.group = f"{row.spec}, {cost} on {device}"
        facts = {name: data[name] for name in _EXTRA_INFO if data[name] is not None}
        benchmark.extra_info.update({"cost": cost, "device": str(device), **facts})
        if verdict is not None:
            benchmark.extra_info["gate"] = verdict.details
        hand_over(benchmark, self._clock, [sample / 1e3 for sample in row.time_ms[cost]], row.performance.timer)


def unlike(saved: Any) -> Iterator[AttnbenchWarning]:
    """Warnings for saved environments (by device) whose times cannot be compared with new ones."""
    for name, data in saved.items() if isinstance(saved, dict) else [("an unknown device", saved)]:
        try:
            before = Environment.from_dict(data)
            hard, _ = before.differences(Environment.detect(find(name), registry()))
        except InputError as error:
            hard = [str(error)]
        if hard:
            yield AttnbenchWarning(f"times saved on {name} cannot be compared with new ones: {'; '.join(hard)}")


def _costs(spec: AttentionSpec) -> list[Cost]:
    return [cost for cost in COSTS if spec.training or cost != "backward"]


def _quiesce() -> None:
    """Finish this process's GPU work, which would be timed with the plan, and release its cached memory."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
