"""Running a plan: prepare, forward, and a backward that sees exactly what the forward saw."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled

from ..problem.spec import AttentionSpec
from .contract import BackwardKernel, ForwardKernel, Inputs, Operands, Result, Saved, Whole
from .devices import bind
from .guard_hook import watching
from .plan import Plan
from .sinks import gradient_of_sinks, with_sinks

__all__ = ["Execution", "Underived", "as_written"]

_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Execution:
    """The kernels of a plan, ready to be called for one spec.

    Every forward goes through ``answer`` and every backward through ``gradients``, which notify an open guard; only the
    steps of a ring over ranks do not, because no single rank may change its plans.
    ``budget`` is the error that the plan was chosen under, None if nothing was chosen.
    """

    spec: AttentionSpec
    forward: ForwardKernel
    backward: BackwardKernel | None = None
    budget: float | None = None

    @property
    def plan(self) -> Plan:
        """The names of the kernels."""
        return Plan(self.forward.name, None if self.backward is None else self.backward.name)

    def __call__(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """(out, lse) of the inputs; out carries gradients where the spec asks for training."""
        whole = self._whole_on_gpu if inputs.q.is_cuda else self._whole_on_cpu
        if whole is not None and watching.active is None and not _is_any_autocast_enabled():
            return whole(*inputs[:3])  # type: ignore[arg-type]  # a spec with descales has none
        if self.backward is None:
            _, (out, lse, _) = self.answer(inputs)
            return out, lse
        out, lse = _recorded(*inputs.unquantised(), inputs.sinks, inputs, self)  # type: ignore[no-untyped-call]
        return out, lse

    @cached_property
    def _whole_on_gpu(self) -> Whole | None:
        return self._whole("cuda")

    @cached_property
    def _whole_on_cpu(self) -> Whole | None:
        return self._whole("cpu")

    def _whole(self, device_type: str) -> Whole | None:
        spec, backward = self.spec, self.backward
        if spec.lengths is not None or spec.sinks or spec.partial or spec.descale is not None:
            return None
        if backward is not None and backward.name != self.forward.name:
            return None
        return self.forward.whole(spec, device_type)

    @cached_property
    def without_sinks(self) -> Execution:
        """What the kernels run: the same plan for the spec without sinks."""
        return Execution(self.spec.replace(sinks=False), self.forward, self.backward, self.budget)

    def answer(self, inputs: Inputs) -> tuple[Operands, Result]:
        """The forward kernel's operands and result; nothing is recorded for gradients."""
        if inputs.sinks is not None:
            operands, result = self.without_sinks.answer(inputs._replace(sinks=None))
            return operands, with_sinks(result, inputs.sinks)
        forward = self.forward
        if inputs.q.is_cuda:
            bind(inputs.device)
        if _is_any_autocast_enabled():
            with as_written(inputs.device):
                operands = forward.prepare(inputs, self.spec)
                result = forward.run(operands)
        else:
            operands = forward.prepare(inputs, self.spec)
            result = forward.run(operands)
        watcher = watching.active
        if watcher is not None:
            watcher.answered(self, operands, inputs, result.out)
        return operands, result

    def prepare(self, inputs: Inputs) -> Operands:
        """What the forward kernel computes with: the same each time, as long as the inputs are."""
        bind(inputs.device)
        with as_written(inputs.device):
            operands = self.forward.prepare(inputs, self.spec)
        watcher = watching.active
        if watcher is not None:
            watcher.prepared(operands, inputs)
        return operands

    def gradients(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of what a forward has saved, by the plan's backward kernel."""
        assert self.backward is not None, "only a spec of a training direction is asked for gradients"
        bind(grad_out.device)  # autograd's own thread
        with as_written(grad_out.device):
            gradients = self.backward.run(saved, grad_out)
        watcher = watching.active
        if watcher is not None and not self.spec.sinks:  # what they change a guard does not know
            watcher.derived(self, saved.operands, grad_out, gradients)
        return gradients


def as_written(device: torch.device) -> AbstractContextManager[object]:
    """Kernels state their precision themselves; autocast must not turn their fp32 products into bf16 ones."""
    enabled = _is_any_autocast_enabled() and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else _NOTHING


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, inputs: Inputs, execution: Execution
    ) -> tuple[Tensor, Tensor | None]:
        """``inputs`` holds q, k, v and sinks, which torch wants one by one: gradients flow into them."""
        operands, (out, lse, state) = execution.answer(inputs)
        kept, together = operands.apart()
        # Through save_for_backward, so that torch sees a tensor that is changed before the
        # backward reads it; the private state belongs to the kernel.
        ctx.places = _save(ctx, (out, lse, sinks, *kept))
        watcher = watching.active
        sample = None if watcher is None or sinks is not None else watcher.sample(execution, inputs)
        ctx.others = together, state, execution, sample
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # no zeros for the log-sum-exp, which would be a launch in every backward
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        unique = ctx.saved_tensors
        saved = iter([None if place is None else unique[place] for place in ctx.places])
        together, state, execution, sample = ctx.others
        out, lse, sinks = next(saved), next(saved), next(saved)
        assert out is not None, "every forward has one"
        if grad_out is None:  # what comes after has none to give
            grad_out = torch.zeros_like(out)
        operands = together(saved)
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
            gradients: tuple[Tensor, ...] = execution.gradients(Saved(operands, out, lse, state), grad_out)
            if sample is not None:
                sample.derived(grad_out, gradients)
            if sinks is not None:
                assert lse is not None, "sinks are added to a log-sum-exp"
                gradients = (*gradients, gradient_of_sinks(sinks, out, lse, grad_out))
        wanted = zip(gradients, ctx.needs_input_grad, strict=False)
        found = [gradient if needed else None for gradient, needed in wanted]
        if torch.is_grad_enabled():  # create_graph=True: these may be differentiated
            found = [None if each is None else Underived.apply(each, out, grad_out) for each in found]  # type: ignore[no-untyped-call]
        return *found, *[None] * (6 - len(found))


# What ``_Attention.apply`` does when no transform of torch.func is active: ``attention`` has checked its tensors, and
# ``apply`` would check each argument again.
_recorded = super(torch.autograd.Function, _Attention).apply


class Underived(torch.autograd.Function):
    """A gradient whose own derivative raises.

    torch's ``once_differentiable`` raises only if ``grad_out`` requires gradients, so that a penalty on a gradient of a
    plain sum would pass as a constant.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, out: Tensor, grad_out: Tensor) -> Tensor:
        """The gradient, made of ``out`` and ``grad_out``."""
        return gradient.clone()  # a view made here could not be changed in place

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        """Raise RuntimeError."""
        raise RuntimeError("attnbench.attention has no second derivative")


def _save(ctx: Any, tensors: Sequence[Tensor | None]) -> list[int | None]:
    """Save each tensor once: a hook may move what is saved elsewhere.  Returns each one's place among those saved."""
    known: dict[int, int] = {}
    found: list[Tensor] = []
    places: list[int | None] = []
    for x in tensors:
        if x is None:
            places.append(None)
            continue
        place = known.setdefault(id(x), len(found))
        if place == len(found):
            found.append(x)
        places.append(place)
    ctx.save_for_backward(*found)
    return places
