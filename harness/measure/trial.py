"""One plan on the open case: checked by the profiler, sampled, and judged in the state in which it was sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from attnbench.errors import AttnbenchError
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Operands, Saved, gradient_dtype
from attnbench.kernels.execution import Execution
from attnbench.kernels.plan import Plan

from .accuracy import Judgements, TensorName
from .findings import Findings, Side, Visit
from .open_case import OpenCase
from .probes import LeakProbe, negate, same_bits, undo_negation
from .replay import RecordingError, replay_of
from .timing import COSTS, Cost, Timer
from .trace import mismatch, shorten_names, trace_call

__all__ = ["Trial"]

_T = TypeVar("_T")
_Values = dict[TensorName, Tensor]
_HISTORY = 3  # runs on a family before it is judged, for kernels whose scales depend on earlier inputs
_HISTORY_SECONDS = 0.1
_NOISE = 2.0  # times the difference between two runs on the same inputs
_SETTLING_SECONDS = 0.05  # on a CPU, where nothing shows whether another thread still works


class Trial:
    """A plan with its kernels; it reads the case's buffers, which hold the first family between any two calls."""

    def __init__(self, plan: Plan, case: OpenCase) -> None:
        self.forward: ForwardKernel = case.registry.forward(plan.forward)
        self.backward: BackwardKernel | None = None if plan.backward is None else case.registry.backward(plan.backward)
        self.ran: dict[Side, list[str]] = {}
        self.case = case
        self._steps: dict[Cost, Callable[[], object]] = {}
        self._replayed: dict[Cost, bool] = {}
        self._untouched = True
        self._worn = False
        self._call = _call_of(Execution(case.case.spec, self.forward, self.backward), case)

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self.case.device.type == "cuda":
            torch.cuda.synchronize(self.case.device)

    def run(self, *, prove: bool = False) -> tuple[Operands, _Values]:
        """Run both passes once on the buffers' contents; the operands, and each result under its name.

        With ``prove`` each pass runs under the profiler.  Raises AttnbenchError if another kernel than the plan's runs.
        """
        passed = self._proved if prove else _unseen
        inputs, spec = self.case.buffers, self.case.case.spec
        with torch.no_grad():
            operands = self.forward.prepare(inputs.qkv, spec)
            out, lse, state = passed("forward", self.forward, partial(self.forward.run, operands))
            values: _Values = {"out": out}
            if lse is not None:
                values["lse"] = lse
            if self.backward is not None:
                assert inputs.grad_out is not None, "training inputs come with one"
                run = partial(self.backward.run, Saved(operands.kept(), out, lse, state), inputs.grad_out)
                values["dq"], values["dk"], values["dv"] = passed("backward", self.backward, run)
        self._check(values)
        return operands, values

    def call(self) -> None:
        """Make the whole call once.

        A process's first one imports parts of torch for autograd (sympy, a second), and may compile: not while others
        wait to be timed.
        """
        self._call()
        self.synchronize()

    def _check(self, values: _Values) -> None:
        """Raise AttnbenchError if an answer has the wrong dtype, or lacks its log-sum-exp."""
        wanted = gradient_dtype(self.case.case.spec)
        for name, value in values.items():
            if name != "lse" and value.dtype != wanted:
                raise AttnbenchError(f"{name} is {value.dtype}, not {wanted}")
        row = self.forward.rows.get(self.case.device.type)
        if "lse" not in values and row is not None and row.lse:
            raise AttnbenchError(f"{self.forward.name} returned no log-sum-exp, which its row declares")

    def _renew(self) -> None:
        """Mark the inputs as written, so that results cached by address and version are computed anew."""
        for x in self.case.tensors:
            x[:0].zero_()

    def restore(self) -> None:
        """Restore the inputs that the next plan must find, and note whether this plan has changed them."""
        case = self.case
        if not case.unchanged(case.case.families[0]):
            self._untouched = False
            case.load(case.case.families[0])

    def _proved(self, side: Side, kernel: ForwardKernel | BackwardKernel, run: Callable[[], _T]) -> _T:
        device = self.case.device
        result, names = trace_call(run, device)
        self.ran[side] = shorten_names(kernel, names, device.type)
        if reason := mismatch(kernel, names, device.type):
            raise AttnbenchError(reason)
        return result

    def sample(
        self, timer: Timer, replay: bool, costs: Collection[Cost] = COSTS, launch_ms: float | None = None
    ) -> Visit:
        """Samples of these costs; with ``replay`` a cost that the host slows down is recorded as a CUDA graph.

        The host's part of a call is given as on a host that needs ``launch_ms`` to start a small kernel.
        """
        if not self._steps:
            self._steps = self._make_steps()
        times: dict[Cost, list[float]] = {}
        host: list[float] = []
        late, scale, launched = 0.0, 1.0, None
        start = time.perf_counter()
        for cost in [each for each in self._steps if each in costs]:
            # The inputs of the other costs are never written: autograd would reject a changed one.
            renew = self._renew if cost in ("prepared", "call") else _nothing
            taken = timer.take(self._steps[cost], renew)
            if replay and taken.host_bound and cost != "call" and self._replay(cost):
                taken = timer.take(self._steps[cost], renew)
            if cost == "call":
                late, launched = taken.late_ms, taken.launch_ms
                # The host of a call that waits for the device may be waiting all the time.
                if launched and launch_ms and not taken.host_bound:
                    scale = launch_ms / launched
                host = [each * scale for each in taken.host_ms]
                # In a stream of calls the slower of the two sets the pace.
                times[cost] = [max(pair) for pair in zip(taken.device_ms, host, strict=True)]
            else:
                times[cost] = taken.device_ms
        stop = time.perf_counter()
        self.restore()
        replayed = tuple(cost for cost in COSTS if self._replayed.get(cost))
        return Visit(times, host, (start, stop), replayed, late, self._worn, launched, scale)

    def _replay(self, cost: Cost) -> bool:
        """Replace a step by its recorded graph; True if that worked.  Each cost is tried once."""
        device = self.case.device
        if device.type != "cuda" or cost in self._replayed or self._worn:
            return False
        try:
            replay = replay_of(self._steps[cost], device)
        except RecordingError:
            self._worn = True
            return False
        self._replayed[cost] = replay is not None
        if replay is not None:
            self._steps[cost] = replay
        return replay is not None

    def _make_steps(self) -> dict[Cost, Callable[[], object]]:
        inputs, spec, forward = self.case.buffers, self.case.case.spec, self.forward
        given = inputs.qkv
        with torch.no_grad():
            # Copies: the buffers are written between visits, and prepare may return its own inputs.
            operands = forward.prepare(Inputs.of((x.clone() for x in given.unquantised()), given.lengths), spec)
            steps: dict[Cost, Callable[[], object]] = {
                "kernel": partial(forward.run, operands),
                "prepared": lambda: forward.run(forward.prepare(given, spec)),
            }
            if self.backward is not None:
                assert inputs.grad_out is not None, "training inputs come with one"
                out, lse, state = forward.run(operands)
                saved = Saved(operands.kept(), out, lse, state)
                steps["backward"] = partial(self.backward.run, saved, inputs.grad_out)
        return steps | {"call": self._call}

    def conclude(self) -> Findings:
        """Judge the plan in the state that the samples left.  What it held for them is released first."""
        self._steps.clear()
        memory, retained = self._memory()
        case, (first, *others) = self.case, self.case.case.families
        judged: dict[str, Judgements] = {}
        floor: dict[str, Judgements] = {}
        own: dict[str, Judgements] = {}

        self._spoil()
        operands, values = self.run()
        now = {name: value.clone() for name, value in values.items()}  # before anything waits for the device
        self.synchronize()
        if case.device.type == "cpu":
            time.sleep(_SETTLING_SECONDS)
        settled = _same(now, values)
        self.restore()
        again = {name: value.clone() for name, value in self.run()[1].items()}
        deterministic = _same(now, again)
        leak = self._leak(now["out"], again["out"])
        for family in (first, *others):
            if family != first:
                case.load(family)
                operands, now = self._after_history()
            truth = case.truth(family)
            judged[family] = truth.judge(now)
            if exact := case.exact_on(family, self.forward.name, operands):
                floor[family], own[family] = exact.judgements, exact.judge(now)
            del operands, now
        held = self.run()[1]
        kept = {name: value.clone() for name, value in held.items()}
        negate(*case.tensors)
        stale = case.truth(family).judge(undo_negation(self.run()[1]))
        settled &= _same(kept, held)  # a result belongs to the caller: the next call may not overwrite it
        case.load(first)
        evidence = (judged, floor, own, stale, settled, self._untouched)
        return Findings(
            *evidence,
            truth=case.truth(first).note,
            deterministic=deterministic,
            leak=leak,
            memory_bytes=memory,
            retained_bytes=retained,
        )

    def _leak(self, before: Tensor, again: Tensor) -> float | None:
        """How far the visible rows changed when what the mask hides from them changed."""
        case = self.case
        probe = LeakProbe.of(case.case.spec, case.buffers)
        if probe is None:
            return None
        probe.change(case.buffers.q, case.buffers.k, case.buffers.v)
        leak = probe.leak(before, self.run()[1]["out"])
        if leak <= _NOISE * probe.leak(before, again):  # no more than between two runs on the same inputs
            leak = 0.0
        case.load(case.case.families[0])
        return leak

    def _after_history(self) -> tuple[Operands, _Values]:
        start = time.perf_counter()
        for _ in range(_HISTORY):
            self.run()
            self.synchronize()
            if time.perf_counter() - start > _HISTORY_SECONDS:
                break
        self._spoil()
        return self.run()

    def _spoil(self) -> None:
        """Fill with NaN the memory that the next results may get.

        Freed memory is reused with the last call's results in it: values that a kernel does not write would look right.
        """
        inputs = {x.untyped_storage().data_ptr() for x in self.case.tensors}
        for value in self.run()[1].values():
            if value.untyped_storage().data_ptr() not in inputs:
                value.detach().fill_(torch.nan)  # detached, because autograd may track the value

    def _memory(self) -> tuple[int | None, int | None]:
        """Bytes beyond those held before: at the peak of a call, and after its forward while the result is held."""
        device, spec = self.case.device, self.case.case.spec
        if device.type != "cuda":
            return None, None
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self._call()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(device) - before
        before = torch.cuda.memory_allocated(device)
        with torch.set_grad_enabled(spec.training):
            held = _forward_of(Execution(spec, self.forward, self.backward), self.case)()
        self.synchronize()
        retained = torch.cuda.memory_allocated(device) - before
        del held
        return peak, max(0, retained)


def _nothing() -> None:
    pass


def _same(before: _Values, after: _Values) -> bool:
    return before.keys() == after.keys() and all(same_bits(x, after[name]) for name, x in before.items())


def _unseen(side: Side, kernel: ForwardKernel | BackwardKernel, run: Callable[[], _T]) -> _T:
    return run()


def _forward_of(execution: Execution, case: OpenCase) -> Callable[[], Tensor]:
    inputs = case.buffers.qkv
    if execution.spec.training:
        inputs = Inputs.of((x.detach().requires_grad_() for x in inputs.unquantised()), inputs.lengths)
    return lambda: execution(inputs)[0]


def _call_of(execution: Execution, case: OpenCase) -> Callable[[], object]:
    """What a user pays for: the forward, and in training the backward with it."""
    inputs, grad_out = case.buffers, case.buffers.grad_out
    if execution.backward is None:
        return partial(execution, inputs.qkv)
    assert grad_out is not None, "training inputs come with one"
    leaves = [x.detach().requires_grad_() for x in inputs.qkv.unquantised()]

    def call() -> object:
        with torch.enable_grad():
            # Not .backward(): that would add to .grad, an extra cost from the second call on.
            return torch.autograd.grad(execution(Inputs.of(leaves, inputs.lengths))[0], leaves, grad_out)

    return call
