"""Registries of small backends for the harness's tests: exact ones, and ones with injected faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from patience import PATIENCE
from torch import Tensor

from attnbench.backends.reference import BACKEND as REFERENCE
from attnbench.harness.measure.setup import DeviceSetup, registry_of
from attnbench.harness.measure.timing import Timer
from attnbench.kernels.capabilities import Capabilities
from attnbench.kernels.contract import (
    Availability,
    Backend,
    BackwardKernel,
    ForwardKernel,
    Inputs,
    Operands,
    Result,
    Saved,
)
from attnbench.kernels.registry import Registry
from attnbench.problem.fp8 import Recipe, quantise
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.environment import Environment

CPU = torch.device("cpu")
ROW = Capabilities(dtypes=("bf16", "fp16", "fp32", "fp64"))
Change = Callable[[Any], Any]


def same(value: Any) -> Any:
    return value


class FakeForward(ForwardKernel):
    """Exact attention with a change; quantises its inputs first if its precision is fp8."""

    def __init__(
        self,
        name: str,
        change: Change = same,
        row: Capabilities = ROW,
        evidence: Mapping[str, str] | None = None,
        change_lse: Change = same,
    ) -> None:
        self.name, self.rows, self.declared_error = name, {"cpu": row}, 0.06
        self.evidence = evidence or {}
        self.change, self.change_lse = change, change_lse

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        q, k, v = inputs.unquantised()
        if self.name.endswith(":fp8"):
            q8, k8, v8 = (quantise(x, Recipe()) for x in (q, k, v))
            return Operands(spec, q8, k8, v8)
        return Operands(spec, q, k, v)

    def run(self, operands: Operands) -> Result:
        out, lse, _ = EXACT.run(operands)
        return Result(self.change(out), self.change_lse(lse))


class FakeBackward(BackwardKernel):
    def __init__(self, name: str, change: Change = same) -> None:
        self.name, self.rows, self.declared_error, self.change = name, {"cpu": ROW}, 0.06, change

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = EXACT_BACKWARD.run(saved, grad_out)
        return self.change(dq), dk, dv


EXACT = next(kernel for kernel in REFERENCE.kernels if isinstance(kernel, ForwardKernel))
EXACT_BACKWARD = next(kernel for kernel in REFERENCE.kernels if isinstance(kernel, BackwardKernel))


def backend(*kernels: ForwardKernel | BackwardKernel, reason: str | None = None, resolve: Any = None) -> Backend:
    name = kernels[0].name.partition(":")[0]
    found = Availability(version=None if reason else "1.0", reason=reason)
    return Backend(name, "a fake", lambda: found, kernels, resolve)


def fail(error: BaseException) -> Change:
    def change(_: Any) -> Any:
        raise error

    return change


def slowly(seconds: float, value: Any) -> Any:
    time.sleep(seconds)
    return value


def healthy(delay: float = 0.0) -> Registry:
    """Two usable kernels, one that refuses, and one that is unavailable."""
    change = partial(slowly, delay) if delay else same
    narrow = Capabilities(dtypes=("fp32",))
    return Registry(
        [
            REFERENCE,
            backend(FakeForward("wide:bf16", change), FakeBackward("wide:bf16")),
            backend(FakeForward("small:fp8", change, evidence={"cpu": r"aten::(bmm|matmul)$"})),
            backend(FakeForward("picky:fp32", row=narrow)),
            backend(FakeForward("absent:fp8"), reason="the package is not installed"),
        ]
    )


REPORTED = "emulated-at-length:fp8-long"


def reported() -> Registry:
    """Kernels that cause every kind of row of a report."""
    narrow = Capabilities(dtypes=("fp32",))
    raises = fail(RuntimeError("no such tile\nand a long traceback"))
    return Registry(
        [
            REFERENCE,
            backend(FakeForward("bad:fp8-scaled", lambda out: out * 2), FakeForward("bad:bf16-raises", raises)),
            backend(FakeForward(REPORTED), FakeBackward(REPORTED)),
            *(backend(FakeForward(f"picky{number}:fp8", row=narrow)) for number in range(20)),
            backend(FakeForward("absent:fp8"), reason="its package | `is` not\x1b[31m installed"),
        ]
    )


def slow() -> Registry:
    """``healthy`` with a delay in each call."""
    return healthy(delay=0.01)


def in_haste(device: torch.device) -> Timer:
    """A timer that takes the fewest samples for a row."""
    return Timer(device, visit=0.0, limit=0.05, patience=1.0)


def setup(source: str = "planted:healthy", **changes: Any) -> DeviceSetup:
    """The setup of a CPU with few samples per row."""
    here = Environment.detect(CPU, registry_of(source))
    return DeviceSetup(CPU, here, in_haste(CPU), source=source, **{"seconds": PATIENCE, **changes})
