"""One open case on one device, and the plans that are prepared for it: what a worker serves."""

from __future__ import annotations

import time
from functools import cached_property

import torch
from torch import Tensor

from attnbench.kernels.contract import Operands
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry
from attnbench.problem.fp8 import Quantised

from ..cases.case import Case
from ..cases.inputs import Inputs, draw
from .accuracy import Floor, Truth
from .findings import Findings, Opened, Prepared, Visit
from .setup import registry_of
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
        self._open.load_first()
        start = time.perf_counter()
        trial = Trial(plan, self._open)
        trial.run()
        trial.synchronize()
        first_ms = (time.perf_counter() - start) * 1e3
        trial.run(prove=True)
        trial.restore()
        self._trials[plan] = trial
        return Prepared(first_ms, trial.ran)

    def sample(self, plan: Plan, replay: bool = True) -> Visit:
        """Samples of every cost of a prepared plan; ``replay`` lets short ones be recorded as CUDA graphs."""
        trial = self._trials[plan]
        trial.case.load_first()
        return trial.sample(self.timer, replay)

    def conclude(self, plan: Plan) -> Findings:
        """Errors, in the state that the samples left behind, and everything else that is asked of a plan."""
        trial = self._trials.pop(plan)
        trial.case.load_first()
        with torch.no_grad():
            return trial.conclude()

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
        self._floors: dict[str, tuple[str, list[Tensor] | None, Floor | None]] = {}
        self.buffers = Inputs(first.q.clone(), first.k.clone(), first.v.clone(), grad_out, first.drawn_on)

    def take_truths(self) -> None:
        """Compute the truth of every family."""
        for family, inputs in self.inputs.items():
            self.truths[family] = Truth.of(self.case.spec, inputs, self.registry)

    def exact_on(self, family: str, forward: str, operands: Operands) -> Floor | None:
        """Exact attention on a forward's operands; kept for its next plan, whose backward is another."""
        if family in self._floors:
            before, seen, floor = self._floors[family]
            if before == forward and seen is not None and _same(seen, operands):
                return floor
        floor = self.truths[family].exact_on(operands)
        self._floors[family] = forward, _kept(operands), floor
        return floor

    @property
    def tensors(self) -> list[Tensor]:
        """The buffers of q, k, v and, in training, grad_out."""
        return _tensors(self.buffers)

    def load(self, family: str) -> None:
        """Put the inputs of a family into the buffers."""
        for buffer, x in zip(self.tensors, _tensors(self.inputs[family]), strict=True):
            buffer.copy_(x)

    def load_first(self) -> None:
        """Put back what every request must find, whatever the one before left when it failed."""
        self.load(self.case.families[0])

    def unchanged(self, family: str) -> bool:
        """Whether the buffers still hold the inputs of the family, bit for bit."""
        return all(
            torch.equal(buffer, x) for buffer, x in zip(self.tensors, _tensors(self.inputs[family]), strict=True)
        )


def _quantised(operands: Operands) -> list[Tensor] | None:
    """The numbers of the operands, None where one of them is not quantised."""
    parts = [x for x in (operands.q, operands.k, operands.v) if isinstance(x, Quantised)]
    return [x for part in parts for x in (part.data.view(torch.uint8), part.descale)] if len(parts) == 3 else None


def _kept(operands: Operands) -> list[Tensor] | None:
    """A copy, because a kernel may write its next operands where these are."""
    numbers = _quantised(operands)
    return None if numbers is None else [x.clone() for x in numbers]


def _same(seen: list[Tensor], operands: Operands) -> bool:
    """Whether the operands are those again: a kernel's scales may follow what it has seen."""
    numbers = _quantised(operands)
    return numbers is not None and all(map(torch.equal, seen, numbers))


def _tensors(inputs: Inputs) -> list[Tensor]:
    return [x for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out) if x is not None]
