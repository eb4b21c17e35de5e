"""Runs many specs on many kernels in one process and collects their disagreements with dense FP64 without raising."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import dense
import torch
from torch import Tensor

from attnbench import AttentionSpec
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Operands, Result, Saved, gradient_dtype
from attnbench.kernels.devices import describe
from attnbench.problem.dtypes import TO_TORCH


def visible(spec: AttentionSpec) -> Tensor:
    """The same as dense.visible, computed row by row instead of pair by pair."""
    sees = torch.zeros(spec.seqlen_q, spec.seqlen_kv, dtype=torch.bool)
    for row in range(spec.seqlen_q):
        start, stop = spec.mask.span(row, spec.seqlen_q, spec.seqlen_kv)
        sees[row, start:stop] = True
    return sees


@dataclass(frozen=True)
class Truth:
    """Tensors of one spec on the device, and their exact attention."""

    spec: AttentionSpec
    inputs: tuple[Tensor, ...]
    out: Tensor
    lse: Tensor
    gradients: tuple[Tensor, ...]
    sizes: tuple[float, ...]

    @classmethod
    def of(cls, spec: AttentionSpec, index: int, device: torch.device) -> Truth:
        """Memory layouts rotate with ``index``; every fourth gradient is the same for all tokens, with the stride 0."""
        generator = torch.Generator(device).manual_seed(index)

        def normal(heads: int, length: int, size: int) -> Tensor:
            shape = (spec.batch, length, heads, size) if index % 2 else (spec.batch, heads, length, size)
            x = torch.randn(shape, generator=generator, device=device).to(TO_TORCH[spec.dtype])
            return x.transpose(1, 2) if index % 2 else x

        q = normal(spec.heads, spec.seqlen_q, spec.head_dim)
        k = normal(spec.kv_heads, spec.seqlen_kv, spec.head_dim)
        v = normal(spec.kv_heads, spec.seqlen_kv, spec.head_dim_v)
        grad = normal(spec.heads, spec.seqlen_q, spec.head_dim_v)
        if index % 4 == 3:
            grad = grad[:, :, :1].expand_as(grad)
        out, lse = dense.dense_attention(q, k, v, spec)
        gradients = dense.dense_gradients(q, k, v, grad, spec) if spec.training else ()
        sizes = dense.gradient_sizes(q, k, v, grad, spec) if spec.training else ()
        return cls(spec, (q, k, v, grad), out, lse, gradients, sizes)


@dataclass
class Sweep:
    """Counts, worst errors and faults by kernel."""

    device: torch.device
    served: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    faults: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def forward(
        self, kernel: ForwardKernel, truth: Truth, error: float | None = None
    ) -> tuple[Operands, Result] | None:
        """Runs the kernel unless it refuses; compares out and log-sum-exp within ``error`` or its declared error."""
        spec, (q, k, v, _) = truth.spec, truth.inputs
        allowed = kernel.declared_error if error is None else error
        if not self._serves(kernel, spec, f"{kernel.name} fwd"):
            return None
        try:
            operands = kernel.prepare(Inputs(q, k, v), spec)
            result = kernel.run(operands)
            self._compare(f"{kernel.name} fwd", spec, "out", result.out, truth.out, allowed,
                          0.1 * v.double().norm().item())  # fmt: skip
            if result.out.dtype != gradient_dtype(spec):
                self.faults[f"{kernel.name} fwd"].append(f"{spec}: out is {result.out.dtype}")
            if kernel.rows[self.device.type].lse:
                seen = truth.lse > -math.inf
                if result.lse is None or not torch.equal(result.lse > -math.inf, seen):
                    self.faults[f"{kernel.name} fwd"].append(f"{spec}: lse of rows without a key")
                else:
                    self._compare(f"{kernel.name} fwd", spec, "lse", result.lse[seen], truth.lse[seen],
                                  allowed, 10.0)  # fmt: skip
        except Exception as error:  # collected, so that one run shows them all
            self.faults[f"{kernel.name} fwd"].append(f"{spec}: {_short(error)}")
            return None
        return operands, result

    def floor(self, kernel: ForwardKernel, truth: Truth, operands: Operands, error: float) -> None:
        """Compares with exact attention on the kernel's quantised operands, within a smaller error."""
        out, lse = dense.dense_attention(*operands.tensors(torch.float64), truth.spec)
        self.forward(kernel, replace(truth, out=out, lse=lse), error)

    def backward(self, kernel: BackwardKernel, truth: Truth, saved: Saved, factor: float = 2.0) -> None:
        """Runs the kernel unless it refuses, and compares the gradients."""
        spec, grad, name = truth.spec, truth.inputs[3], f"{kernel.name} bwd"
        if not self._serves(kernel, spec, name):
            return
        try:
            found = kernel.run(saved, grad)
            for what, each, wanted, size in zip(("dq", "dk", "dv"), found, truth.gradients, truth.sizes, strict=True):
                self._compare(name, spec, what, each, wanted, factor * kernel.declared_error, size)
        except Exception as error:  # collected, so that one run shows them all
            self.faults[name].append(f"{spec}: {_short(error)}")

    def exact(self, truth: Truth) -> Saved:
        """The saved tensors of an exact forward."""
        spec, (q, k, v, _) = truth.spec, truth.inputs
        wide = torch.float64 if spec.dtype == "fp64" else torch.float32
        return Saved(Operands(spec, q, k, v), truth.out.to(TO_TORCH[spec.dtype]), truth.lse.to(wide))

    def report(self, most: int = 12) -> str:
        """A line for each kernel, and the first of its faults."""
        lines = []
        for name in sorted({*self.served, *self.refused, *self.faults}):
            faults = self.faults[name]
            lines.append(
                f"{name:24} served {self.served[name]:4} refused {self.refused[name]:4} "
                f"faults {len(faults):4} worst error/allowed {self.worst[name]:.3f}"
            )
            lines += [f"    {fault}" for fault in faults[:most]]
            if len(faults) > most:
                lines.append(f"    … and {len(faults) - most} more")
        return "\n".join(lines)

    def _serves(self, kernel: ForwardKernel | BackwardKernel, spec: AttentionSpec, name: str) -> bool:
        refused = bool(kernel.refusals(spec, describe(self.device)))
        (self.refused if refused else self.served)[name] += 1
        return not refused

    def _compare(
        self, name: str, spec: AttentionSpec, what: str, found: Tensor, truth: Tensor, allowed: float, size: float
    ) -> None:
        if found.shape != truth.shape:
            self.faults[name].append(f"{spec}: {what} has the shape {tuple(found.shape)}, not {tuple(truth.shape)}")
            return
        ratio = dense.distance(found, truth, size) / allowed
        self.worst[name] = max(self.worst[name], ratio)
        if not ratio <= 1:
            self.faults[name].append(f"{spec}: {what} is off by {ratio * allowed:.3g}, allowed {allowed:.3g}")


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {(lines[0] if lines else '')[:160]}"
