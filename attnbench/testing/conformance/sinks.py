"""Conformance with sinks: what a kernel's log-sum-exp and a backward that is given another one are worth."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ...harness.cases.inputs import Drawn
from ...harness.measure.accuracy import TensorName
from ...kernels.contract import BackwardKernel, ForwardKernel, Inputs
from ...kernels.execution import Execution
from ...problem.spec import AttentionSpec
from .subject import Subject, inputs_of, truth_of

__all__ = ["check_sinks", "serves_sinks"]

_EXACT = "reference:fp64"


def serves_sinks(subject: Subject, spec: AttentionSpec) -> bool:
    """Whether the plan takes sinks on such a spec."""
    return spec.descale is None and not subject.refusals(spec.replace(sinks=True))


def check_sinks(subject: Subject, spec: AttentionSpec) -> str | None:
    """Out, LSE and gradients beside exact attention: sinks about as large as a row's sum, and one that is none."""
    drawn, whole = inputs_of(spec, subject.device), spec.replace(sinks=True)
    sinks = math.log(spec.seqlen_kv) + torch.randn(spec.heads, generator=torch.Generator().manual_seed(0))
    if spec.heads > 1:
        sinks[-1] = -torch.inf
    found, gradient = _answers(subject.forward, subject.backward, whole, drawn, sinks)
    grad_out = None if drawn.grad_out is None else drawn.grad_out.double()
    wide = Drawn(drawn.q.double(), drawn.k.double(), drawn.v.double(), grad_out, drawn.drawn_on)
    forward = subject.registry.forward(_EXACT)
    backward = subject.registry.backward(_EXACT) if spec.training else None
    exact, own = _answers(forward, backward, whole.replace(dtype="fp64"), wide, sinks)
    truth = truth_of(subject, spec, drawn)
    values = {name: exact[name].reshape(x.shape) for name, x in truth.values.items()}
    if problem := subject.wrong(spec, found, replace(truth, values=values)):
        return problem
    if gradient is None or own is None:
        return None
    off = float(torch.linalg.vector_norm(gradient.double() - own))
    most = subject.allowed(spec) * max(float(torch.linalg.vector_norm(own)), math.sqrt(spec.batch * spec.seqlen_q))
    return None if off <= most else f"the gradient of the sinks is off by {off:.3g}, {most:.3g} allowed"


def _answers(
    forward: ForwardKernel, backward: BackwardKernel | None, spec: AttentionSpec, drawn: Drawn, sinks: Tensor
) -> tuple[dict[TensorName, Tensor], Tensor | None]:
    """What ``Execution`` makes of the kernels, and the gradient of the sinks."""
    q, k, v = tensors = [x.detach().requires_grad_(spec.training) for x in (drawn.q, drawn.k, drawn.v)]
    sinks = sinks.to(drawn.q.device).requires_grad_(spec.training)
    out, lse = Execution(spec, forward, backward)(Inputs(q, k, v, sinks=sinks))
    assert lse is not None, "kernels without an LSE refuse sinks"
    found: dict[TensorName, Tensor] = {"out": out.detach(), "lse": lse}
    if not spec.training:
        return found, None
    *gradients, own = torch.autograd.grad(out, (*tensors, sinks), drawn.grad_out)
    found["dq"], found["dk"], found["dv"] = gradients
    return found, own
