"""A plan with switchable errors for the guard's tests; it is first in the order, so that auto runs it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnbench import api, attention
from attnbench.choosing.demotion import demotions
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
from attnbench.kernels.registry import registry

NAME = "planted:bf16"
PLAN = f"{NAME}>{NAME}"
BOUND = 0.01  # of bf16, which the planted plan is named after


class Planted(ForwardKernel):
    """Exact attention in FP32, then ``change``; ``state`` goes to the backward."""

    name, declared_error, preference = NAME, 1e-3, -1

    def __init__(self) -> None:
        self.inner = registry().forward("reference:fp32")
        self.rows = {"cpu": self.inner.rows["cpu"], "cuda": self.inner.rows["cuda"]}
        self.change: Callable[[Tensor], Tensor] = lambda out: out
        self.state: object = None

    def prepare(self, inputs: Inputs, spec) -> Operands:
        return self.inner.prepare(inputs, spec)

    def run(self, operands: Operands) -> Result:
        out, lse, _ = self.inner.run(operands)
        return Result(self.change(out), lse, self.state)


class PlantedBackward(BackwardKernel):
    """Exact gradients, each changed by its function in ``changes``."""

    name, declared_error, follows = NAME, 1e-3, (NAME,)

    def __init__(self, leader: Planted) -> None:
        self.leader = leader
        self.inner = registry().backward("reference:fp32")
        self.rows = {"cpu": self.inner.rows["cpu"], "cuda": self.inner.rows["cuda"]}
        self.changes: dict[str, Callable[[Tensor], Tensor]] = {}

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert saved.state is self.leader.state, "the forward's state did not reach the backward"
        named = zip(("dq", "dk", "dv"), self.inner.run(saved, grad_out), strict=True)
        dq, dk, dv = (self.changes.get(name, lambda x: x)(x) for name, x in named)
        return dq, dk, dv


def plant(patch: pytest.MonkeyPatch) -> tuple[Planted, PlantedBackward]:
    """Registers both until the patch ends, and clears cached choices and demotions."""
    forward = Planted()
    backward = PlantedBackward(forward)
    known = registry()
    backend = Backend("planted", "faults on demand", lambda: Availability(version="1.0"), (forward, backward))
    patch.setitem(known.backends, "planted", backend)
    patch.setitem(known._forwards, NAME, forward)
    patch.setitem(known._backwards, NAME, backward)
    patch.setattr(known, "_names", {*known._names, NAME})
    demotions.forget()
    api.forget_choices()
    return forward, backward


def noise(relative: float, seed: int = 0) -> Callable[[Tensor], Tensor]:
    """Adds a random error of this relative L2, different at every call."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def change(x: Tensor) -> Tensor:
        error = torch.randn(x.shape, generator=generator, device="cpu").to(x)
        return x + error * (relative * x.norm() / error.norm())

    return change


def spoil(kernels: tuple[Planted, PlantedBackward], name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Applies the change to out, or to a gradient, from now on."""
    forward, backward = kernels
    if name == "out":
        forward.change = change
    else:
        backward.changes[name] = change


def in_one_head(change: Callable[[Tensor], Tensor], head: int = 0) -> Callable[[Tensor], Tensor]:
    """Applies the change to that head only."""

    def changed(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, head] = change(x[:, head])
        return x

    return changed


def one_value(value: float) -> Callable[[Tensor], Tensor]:
    """Sets the last element to this value."""

    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[-1, -1, -1, -1] = value
        return x

    return change


def is_close(one: float, other: float, share: float) -> bool:
    """Whether two numbers differ by at most this share of the second."""
    return math.isclose(one, other, rel_tol=0, abs_tol=share * abs(other))


def step(x, function=attention, **arguments) -> list[Tensor]:
    out = function(*x, **arguments)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *torch.autograd.grad(out, x, grad_out)]


def calls_until_found(watch, x, most=60, **arguments) -> int:
    """The number of steps until the guard reports a breach."""
    for number in range(1, most + 1):
        (step if x[0].requires_grad else attention)(*([x] if x[0].requires_grad else x), **arguments)
        if watch.breaches:
            return number
    pytest.fail("no breach was reported")
