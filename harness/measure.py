"""One plan on one case: prove that it ran, judge it, time it, or say what went wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from attnbench.budget import class_bound
from attnbench.environment import Environment
from attnbench.errors import AttnbenchError
from attnbench.execution import Execution
from attnbench.kernel import BackwardKernel, ForwardKernel, Saved
from attnbench.plan import Plan
from attnbench.registry import Registry

from .accuracy import TensorName, Truth
from .cases import Case
from .inputs import Inputs, draw
from .peaks import peak_share
from .records import LONGEST_REASON, Measurement, Side, Status
from .timing import Cost, Timer
from .trace import mismatch, shortened, traced

__all__ = ["Bench", "Laboratory", "failed", "passed_over"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Laboratory:
    """What every measurement of a sweep shares.

    ``max_error`` replaces the bound of FP8 plans; the others keep that of their precision.
    """

    device: torch.device
    registry: Registry
    environment: Environment
    timer: Timer
    max_error: float | None = None

    def bound(self, plan: Plan, case: Case) -> float:
        """The largest error with which the plan is still ``ok``."""
        return self.max_error if plan.fp8 and self.max_error is not None else class_bound(plan, case.spec)


@dataclass
class _Findings:
    """What is known of a plan so far, kept where an exception cannot take it away."""

    started: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    ran: dict[Side, list[str]] = field(default_factory=dict)
    error: dict[str, dict[TensorName, float]] = field(default_factory=dict)
    floor: dict[str, dict[TensorName, float]] = field(default_factory=dict)

    def proved(
        self, side: Side, kernel: ForwardKernel | BackwardKernel, run: Callable[[], _T], device: torch.device
    ) -> _T:
        """The result of a pass; at its first run, what ran is noted and held against the kernel's evidence.

        Raises AttnbenchError where another kernel answered.
        """
        if side in self.ran:
            return run()
        result, names = traced(run, device)
        self.ran[side] = shortened(kernel, names, device.type)
        if reason := mismatch(kernel, names, device.type):
            raise AttnbenchError(reason)
        return result

    def verdict(self, bound: float) -> str | None:
        """The sentence that makes the plan inaccurate, or None."""
        errors = [(value, name, family) for family, each in self.error.items() for name, value in each.items()]
        worst, name, family = max(errors)
        if worst <= bound:
            return None
        said = (
            f"{worst:.3g}"
            if math.isfinite(worst)
            else "infinite (values that are not finite, or not where they must be)"
        )
        return f"the error of {name} on {family} inputs is {said}, beyond {bound:g}"


class Bench:
    """One case on one device: the inputs of each family and their truth, made once for all plans.

    A floor is a property of the operands, so plans with the same forward share it.
    """

    def __init__(self, case: Case, laboratory: Laboratory) -> None:
        self.case, self.laboratory = case, laboratory
        self._inputs = {family: draw(case.spec, family, laboratory.device) for family in case.families}
        self._truths = {
            family: Truth.of(case.spec, inputs, laboratory.registry) for family, inputs in self._inputs.items()
        }
        self._floors: dict[tuple[str, str], dict[TensorName, float]] = {}

    def measure(self, plan: Plan) -> Measurement:
        """The record of a plan that nothing refuses; whatever its kernels raise becomes a status and a reason."""
        found = _Findings()
        try:
            return self._measured(plan, found)
        except Exception as error:  # a kernel may raise anything; it costs this row alone
            row = failed(self.case, plan, error, self.laboratory, found.ran)
        # Only here, where the traceback no longer keeps the tensors of the failure alive.
        if self.laboratory.device.type == "cuda":
            torch.cuda.empty_cache()
        return row

    def _measured(self, plan: Plan, found: _Findings) -> Measurement:
        registry, first = self.laboratory.registry, self.case.families[0]
        forward = registry.forward(plan.forward)
        backward = None if plan.backward is None else registry.backward(plan.backward)
        with torch.no_grad():
            for family in self.case.families:
                self._judge(forward, backward, family, found)
        steps = _steps(Execution(self.case.spec, forward, backward), self._inputs[first])
        times = {cost: self.laboratory.timer.samples(step) for cost, step in steps.items()}
        share = peak_share(plan, self.case.spec, times, self.laboratory.environment.device_name)
        if share is not None and share > 1:
            raise AttnbenchError(f"{share:.0%} of the device's peak: the time or the count of operations is wrong")
        memory = _peak_memory(steps["call"], self.laboratory.device)
        bound = self.laboratory.bound(plan, self.case)
        verdict = found.verdict(bound)
        return Measurement(
            case=self.case.name,
            spec=self.case.spec,
            plan=plan,
            status="ok" if verdict is None else "inaccurate",
            reason=verdict,
            time_ms=times,
            error=found.error,
            floor=found.floor,
            bound=bound,
            declared_error=max(kernel.declared_error for kernel in (forward, backward) if kernel is not None),
            memory_bytes=memory,
            peak_share=share,
            ran=found.ran,
            truth=self._truths[first].note,
            timer=self.laboratory.timer.conditions,
            drawn_on=self._inputs[first].drawn_on,
            started=found.started,
            environment=self.laboratory.environment,
        )

    def _judge(self, forward: ForwardKernel, backward: BackwardKernel | None, family: str, found: _Findings) -> None:
        """Run once on a family and take errors and floor; the first time, prove that these kernels ran."""
        inputs, truth, device = self._inputs[family], self._truths[family], self.laboratory.device
        operands = forward.prepare(inputs.q, inputs.k, inputs.v, self.case.spec)
        result = found.proved("forward", forward, partial(forward.run, operands), device)
        values: dict[TensorName, Tensor] = {"out": result.out}
        if result.lse is not None:
            values["lse"] = result.lse
        if backward is not None:
            assert inputs.grad_out is not None, "training inputs come with one"
            saved = Saved(operands, result.out, result.lse, result.state)
            run = partial(backward.run, saved, inputs.grad_out)
            values["dq"], values["dk"], values["dv"] = found.proved("backward", backward, run, device)
        found.error[family] = truth.errors(values)
        if (family, forward.name) not in self._floors:
            self._floors[family, forward.name] = truth.floor(operands)
        if floor := self._floors[family, forward.name]:
            found.floor[family] = floor


def passed_over(case: Case, plan: Plan, status: Status, reasons: list[str], laboratory: Laboratory) -> Measurement:
    """The record of a plan that was not run."""
    return Measurement(
        case=case.name,
        spec=case.spec,
        plan=plan,
        status=status,
        reason="; ".join(reasons)[:LONGEST_REASON],
        started=datetime.now(timezone.utc),
        environment=laboratory.environment,
    )


def failed(
    case: Case,
    plan: Plan,
    error: Exception,
    laboratory: Laboratory,
    ran: Mapping[Side, list[str]] = MappingProxyType({}),
) -> Measurement:
    """The record of a plan that raised: ``oom`` where memory was what it lacked, else ``error``."""
    first = next(iter(str(error).strip().splitlines()), "")
    status: Status = "oom" if _out_of_memory(error) else "error"
    row = passed_over(case, plan, status, [f"{type(error).__name__}: {first}"], laboratory)
    return row.model_copy(update={"ran": dict(ran)})


def _steps(execution: Execution, inputs: Inputs) -> dict[Cost, Callable[[], object]]:
    """What is timed, by the cost that it is."""
    spec, forward, backward = execution.spec, execution.forward, execution.backward
    operands = forward.prepare(inputs.q, inputs.k, inputs.v, spec)
    steps: dict[Cost, Callable[[], object]] = {
        "kernel": partial(forward.run, operands),
        "prepared": lambda: forward.run(forward.prepare(inputs.q, inputs.k, inputs.v, spec)),
    }
    if backward is None:
        return steps | {"call": partial(execution, inputs.q, inputs.k, inputs.v)}
    assert inputs.grad_out is not None, "training inputs come with one"
    with torch.no_grad():
        out, lse, state = forward.run(operands)
    saved = Saved(operands, out, lse, state)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]

    def call() -> object:
        with torch.enable_grad():
            # Not .backward(): that would add to .grad, a cost of its own from the second time on.
            return torch.autograd.grad(execution(*leaves)[0], leaves, inputs.grad_out)

    return steps | {"backward": partial(backward.run, saved, inputs.grad_out), "call": call}


def _peak_memory(call: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that a call holds at its peak beyond what was held before; None where torch does not count them."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _out_of_memory(error: Exception) -> bool:
    # torch has no class of its own for a CPU allocation that fails.
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)
