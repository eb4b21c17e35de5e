"""How wrong an answer is: relative L2 against exact attention in FP64 on the original inputs.

Beside each error stands its floor: the error of exact attention on the operands that the
kernel really used, which tells a bad kernel from a hard input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attnbench.errors import AttnbenchError
from attnbench.fp8 import Quantised
from attnbench.kernel import Operands, Saved
from attnbench.registry import Registry
from attnbench.spec import AttentionSpec

from .inputs import Inputs

__all__ = ["LARGEST_TRUTH", "TensorName", "Truth", "relative_l2"]

TensorName = Literal["out", "lse", "dq", "dk", "dv"]
_GRADIENTS: tuple[TensorName, ...] = ("dq", "dk", "dv")
_EXACT = "reference:fp64"
# Operations that one truth or floor may cost.  An H200 multiplies about 50e12 a second in FP64,
# half of the time going to the softmax, a CPU core about 10e9: well under a second on either.
LARGEST_TRUTH = {"cpu": 6e9, "cuda": 4e12}


def relative_l2(value: Tensor, truth: Tensor) -> float:
    """‖value − truth‖ / ‖truth‖ in FP64, 0 for nothing against nothing; infinite where anything is wrong in kind.

    Where the truth is minus infinity (the LSE of a row without keys), the value must be
    exactly that and does not count further; any other non-finite value makes the error infinite.
    """
    absent = truth == -torch.inf
    if bool(absent.any()):
        if not bool((value[absent] == -torch.inf).all()):
            return math.inf
        value, truth = value[~absent], truth[~absent]
    wide, exact = value.to(torch.float64), truth.to(torch.float64)
    difference = float(torch.linalg.vector_norm(wide - exact))
    size = float(torch.linalg.vector_norm(exact))
    if difference == 0.0:
        return 0.0
    error = difference / size if size else math.inf
    return error if math.isfinite(error) else math.inf


@dataclass(frozen=True)
class Truth:
    """Exact out, lse (and dq, dk, dv) of a spec on some inputs, or of some of its heads where all cost too much.

    A group is one (batch, key head) with the query heads that read it: the smallest part
    whose outputs and gradients stand alone.  ``groups`` are those computed, as indices into
    batch × kv_heads; ``values`` holds FP64 tensors (groups, heads a group, S, D).
    """

    spec: AttentionSpec
    groups: tuple[int, ...]
    values: Mapping[TensorName, Tensor]
    grad_out: Tensor | None
    registry: Registry

    @classmethod
    def of(cls, spec: AttentionSpec, inputs: Inputs, registry: Registry, largest: float | None = None) -> Truth:
        """Compute the truth within ``largest`` operations, LARGEST_TRUTH of the device unless given.

        Where not all groups fit, those taken are spread evenly over batch and heads, one at least.
        """
        limit = LARGEST_TRUTH[inputs.q.device.type] if largest is None else largest
        count = spec.batch * spec.kv_heads
        afford = min(count, max(1, int(limit * count / max(spec.flops, 1.0))))
        groups = tuple(index * count // afford for index in range(afford))
        parts = [_part(x, spec, groups) for x in (inputs.q, inputs.k, inputs.v)]
        grad_out = None if inputs.grad_out is None else _part(inputs.grad_out, spec, groups)
        return cls(spec, groups, _exact(spec, parts, grad_out, registry), grad_out, registry)

    @property
    def note(self) -> str:
        """What the errors were taken on, for the record."""
        count = self.spec.batch * self.spec.kv_heads
        return f"exact attention in FP64 on {len(self.groups)} of {count} (batch, key head) groups"

    def errors(self, values: Mapping[TensorName, Tensor]) -> dict[TensorName, float]:
        """Relative L2 of each named tensor, as the kernel returned it.  Raises AttnbenchError on a wrong shape."""
        found: dict[TensorName, float] = {}
        for name, value in values.items():
            truth = self.values[name]
            heads = self.spec.kv_heads if name in ("dk", "dv") else self.spec.heads
            expected = (self.spec.batch, heads, *truth.shape[2:])
            if value.shape != expected:
                raise AttnbenchError(f"{name} has the shape {tuple(value.shape)}, not {expected}")
            found[name] = relative_l2(_part(value, self.spec, self.groups), truth)
        return found

    def floor(self, operands: Operands) -> dict[TensorName, float]:
        """Errors of exact attention, forward and backward, on the quantised operands; empty where none is quantised.

        Raises AttnbenchError where operands have another shape than the inputs.
        """
        if not any(isinstance(x, Quantised) for x in (operands.q, operands.k, operands.v)):
            return {}
        spec = self.spec
        keys = (spec.batch, spec.kv_heads, spec.seqlen_kv)
        shapes = (
            (spec.batch, spec.heads, spec.seqlen_q, spec.head_dim),
            (*keys, spec.head_dim),
            (*keys, spec.head_dim_v),
        )
        used = operands.tensors(torch.float64)
        for name, x, shape in zip("qkv", used, shapes, strict=True):
            if x.shape != shape:
                raise AttnbenchError(f"the operand {name} has the shape {tuple(x.shape)}, not {shape}")
        exact = _exact(spec, [_part(x, spec, self.groups) for x in used], self.grad_out, self.registry)
        return {name: relative_l2(exact[name], truth) for name, truth in self.values.items()}


def _part(x: Tensor, spec: AttentionSpec, groups: tuple[int, ...]) -> Tensor:
    """(B, H, ...) to (groups, H / kv_heads, ...), copying only the groups asked for."""
    index = torch.tensor(groups, device=x.device)
    grouped = x.reshape(spec.batch, spec.kv_heads, -1, *x.shape[2:])
    return grouped[index // spec.kv_heads, index % spec.kv_heads]


def _exact(
    spec: AttentionSpec, qkv: list[Tensor], grad_out: Tensor | None, registry: Registry
) -> dict[TensorName, Tensor]:
    q, k, v = (x.to(torch.float64) for x in qkv)
    part = spec.replace(batch=q.shape[0], heads=spec.group, kv_heads=1, dtype="fp64")
    with torch.no_grad():
        operands = registry.forward(_EXACT).prepare(q, k, v, part)
        out, lse, state = registry.forward(_EXACT).run(operands)
        if lse is None:
            raise AttnbenchError(f"{_EXACT} returned no log-sum-exp")
        values: dict[TensorName, Tensor] = {"out": out, "lse": lse}
        if grad_out is not None:
            saved = Saved(operands, out, lse, state)
            gradients = registry.backward(_EXACT).run(saved, grad_out.to(torch.float64))
            values.update(zip(_GRADIENTS, gradients, strict=True))
    return values
