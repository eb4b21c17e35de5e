"""Small backends for tests: kernels whose every property is chosen by the test."""

from __future__ import annotations

import torch
from torch import Tensor

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
from attnbench.problem.spec import DTYPES, GRANULARITIES
from attnbench.tables.environment import Environment

ROW = Capabilities(dtypes=DTYPES, descales=GRANULARITIES)


class FakeForward(ForwardKernel):
    def __init__(
        self, name: str, *, row: Capabilities = ROW, preference: int | None = 50, declared: float = 0.001,
        leaves: str | None = None, error_growth: float | None = None,
    ) -> None:  # fmt: skip
        self.name, self.rows, self.preference, self.declared_error = name, {"cpu": row}, preference, declared
        self.leaves, self.error_growth = leaves, error_growth

    def prepare(self, inputs: Inputs, spec) -> Operands:
        q, k, v = inputs.unquantised()
        return Operands(spec, q, k, v)

    def run(self, operands: Operands) -> Result:
        q, v = operands.q, operands.v
        return Result(torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype), torch.zeros(q.shape[:3]))


class FakeBackward(BackwardKernel):
    def __init__(self, name: str, *, row: Capabilities = ROW, follows=None, needs_lse: bool = True) -> None:
        self.name, self.rows, self.follows, self.needs_lse = name, {"cpu": row}, follows, needs_lse
        self.declared_error = 0.001

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(torch.zeros_like(x) for x in saved.operands.tensors())


def fake_backend(name: str, *kernels, reason: str | None = None, **declared) -> Backend:
    availability = Availability(version="1.0", reason=reason)
    return Backend(name, f"a fake called {name}", lambda: availability, kernels, **declared)


def fake_registry(*backends: Backend) -> Registry:
    return Registry(backends)


def an_environment(**changes) -> Environment:
    facts = {
        "device_type": "cpu", "device_name": "A CPU", "torch": "2.9.0", "python": "3.11.0", "platform": "Linux",
        "cpu": "A CPU", "threads": 2, "attnbench": "0.1.0", "backends": {"fast": "1.0", "slow": "1.0"},
    }  # fmt: skip
    return Environment(**{**facts, **changes})
