"""One open case on one device, and the plans that are prepared for it: what a worker serves."""

from __future__ import annotations

import time
from functools import cached_property

import torch
from torch import Tensor

from attnbench.fp8 import Quantised
from attnbench.kernel import Operands
from attnbench.plan import Plan
from attnbench.registry import Registry

from .accuracy import Floor, Truth
from .cases import Case
from .findings import Findings, Opened, Prepared, Visit
from .inputs import Inputs, draw
from .laboratory import registry_of
from .timing import Timer
from .trial import Trial

__all__ = ["Bench", "OpenCase"]


class Bench:
    """Opens cases one after the other.  Each method is a request that may take long, raise, or never return."""

    def __init__(self, source: str, timer: Timer) -> None:
        self.timer = timer
        self._source = source
        self._open: OpenCase | None = None
        self._trials: dict[Plan, Trial] = {}
        if timer.device.type == "cuda":
            torch.cuda.set_device(timer.device)

    @cached_property
    def registry(self) -> Registry:
        """Made by the first case, because importing what it needs may be the fault to be noticed."""
        return registry_of(self._source)

    def open(self, case: Case) -> Opened:
        """Draw the inputs of every family and take their truths."""
        self.close()
        self._open = OpenCase(case, self.registry, self.timer.device)
        self._open.take_truths()
        first = case.families[0]
        return Opened(self._open.truths[first].note, self._open.inputs[first].drawn_on, self.timer.conditions)

    def compile(self, case: Case, plan: Plan) -> float:
        """Milliseconds of the plan's first run in this process, which leaves the compiler's work on the disk."""
        self.close()
        opened = OpenCase(case, self.registry, self.timer.device)
        start = time.perf_counter()
        trial = Trial(plan, opened)
        trial.run()
        trial.synchronize()
        return (time.perf_counter() - start) * 1e3

    def prepare(self, plan: Plan) -> Prepared:
        """Run the plan for the first time, and prove that it is what ran."""
        assert self._open is not None, "a case is opened first"
        start = time.perf_counter()
        trial = Trial(plan, self._open)
        trial.run()
        trial.synchronize()
        first_ms = (time.perf_counter() - start) * 1e3
        trial.run(prove=True)
        trial.restore()
        self._trials[plan] = trial
        return Prepared(first_ms, trial.ran)

    def sample(self, plan: Plan) -> Visit:
        """Samples of every cost of a prepared plan."""
        return self._trials[plan].sample(self.timer)

    def conclude(self, plan: Plan) -> Findings:
        """Errors, in the state that the samples left behind, and everything else that is asked of a plan."""
        with torch.no_grad():
            return self._trials.pop(plan).conclude()

    def drop(self, plan: Plan) -> None:
        """Forget a prepared plan."""
        self._trials.pop(plan, None)

    def close(self) -> None:
        """Forget the case, its plans and the memory that they took."""
        self._trials.clear()
        self._open = None
        if self.timer.device.type == "cuda":
            torch.cuda.empty_cache()


class OpenCase:
    """The inputs of every family and their truths; and one set of buffers, where every kernel finds its inputs.

    Because the buffers stay where they are while what is in them changes, a kernel that
    remembers its inputs by their address is found out.
    """

    def __init__(self, case: Case, registry: Registry, device: torch.device) -> None:
        self.case, self.registry, self.device = case, registry, device
        self.inputs = {family: draw(case.spec, family, device) for family in case.families}
        self.truths: dict[str, Truth] = {}
        first = self.inputs[case.families[0]]
        grad_out = None if first.grad_out is None else first.grad_out.clone()
        self._floors: dict[str, tuple[str, Operands, Floor | None]] = {}
        self.buffers = Inputs(first.q.clone(), first.k.clone(), first.v.clone(), grad_out, first.drawn_on)

    def take_truths(self) -> None:
        """Compute the truth of every family."""
        for family, inputs in self.inputs.items():
            self.truths[family] = Truth.of(self.case.spec, inputs, self.registry)

    def exact_on(self, family: str, forward: str, operands: Operands) -> Floor | None:
        """Exact attention on a forward's operands; kept for its next plan, whose backward is another."""
        if family in self._floors:
            before, seen, floor = self._floors[family]
            if before == forward and _same(seen, operands):
                return floor
        floor = self.truths[family].exact_on(operands)
        self._floors[family] = forward, operands, floor
        return floor

    @property
    def tensors(self) -> list[Tensor]:
        """The buffers of q, k, v and, in training, grad_out."""
        return _tensors(self.buffers)

    def load(self, family: str) -> None:
        """Put the inputs of a family into the buffers."""
        for buffer, x in zip(self.tensors, _tensors(self.inputs[family]), strict=True):
            buffer.copy_(x)

    def unchanged(self, family: str) -> bool:
        """Whether the buffers still hold the inputs of the family, bit for bit."""
        return all(
            torch.equal(buffer, x) for buffer, x in zip(self.tensors, _tensors(self.inputs[family]), strict=True)
        )


def _same(one: Operands, other: Operands) -> bool:
    """Whether both hold the same numbers quantised: a kernel's scales may follow what it has seen."""
    return all(
        isinstance(x, Quantised)
        and isinstance(y, Quantised)
        and torch.equal(x.data.view(torch.uint8), y.data.view(torch.uint8))
        and torch.equal(x.descale, y.descale)
        for x, y in zip((one.q, one.k, one.v), (other.q, other.k, other.v), strict=True)
    )


def _tensors(inputs: Inputs) -> list[Tensor]:
    return [x for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out) if x is not None]
