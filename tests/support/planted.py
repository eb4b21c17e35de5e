"""A registry of small backends for the harness's tests: an exact one, and ones with planted faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnbench.backends.reference import BACKEND as REFERENCE
from attnbench.capabilities import Capabilities
from attnbench.fp8 import Recipe, quantise
from attnbench.kernel import Availability, Backend, BackwardKernel, ForwardKernel, Operands, Result, Saved
from attnbench.registry import Registry
from attnbench.spec import AttentionSpec

ROW = Capabilities(dtypes=("bf16", "fp16", "fp32", "fp64"))
Change = Callable[[Any], Any]


def same(value: Any) -> Any:
    return value


class FakeForward(ForwardKernel):
    """The exact answer, changed; quantised beforehand where its precision is fp8."""

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

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Operands:
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


def fail(error: Exception) -> Change:
    def change(_: Any) -> Any:
        raise error

    return change


def slowly(seconds: float, value: Any) -> Any:
    time.sleep(seconds)
    return value


def one_nan(out: Tensor) -> Tensor:
    out = out.clone()
    out[0, 0, 0, 0] = torch.nan
    return out


def healthy(delay: float = 0.0) -> Registry:
    """Two kernels that serve, one that refuses, one that is missing."""
    change = partial(slowly, delay) if delay else same
    narrow = Capabilities(dtypes=("fp32",))
    return Registry(
        [
            REFERENCE,
            backend(FakeForward("wide:bf16", change), FakeBackward("wide:bf16")),
            backend(FakeForward("small:fp8", change)),
            backend(FakeForward("picky:fp32", row=narrow)),
            backend(FakeForward("absent:fp8"), reason="the package is not installed"),
        ]
    )


FAULTS: dict[str, tuple[ForwardKernel, str, str]] = {
    "raises": (
        FakeForward("bad:bf16", fail(RuntimeError("no such tile\nand a long traceback"))),
        "error",
        "no such tile",
    ),
    "memory": (FakeForward("bad:bf16", fail(torch.OutOfMemoryError("tried to allocate 1 TiB"))), "oom", "1 TiB"),
    "cpu memory": (
        FakeForward("bad:bf16", fail(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))),
        "oom",
        "allocate",
    ),
    "nan": (FakeForward("bad:bf16", one_nan), "inaccurate", "infinite"),
    "zeros": (FakeForward("bad:fp8", torch.zeros_like), "inaccurate", "out on"),
    "scaled": (FakeForward("bad:fp8", lambda out: out * 2), "inaccurate", "out on"),
    "wrong base": (FakeForward("bad:bf16", change_lse=lambda lse: lse / 0.6931), "inaccurate", "lse on"),
    "wrong shape": (FakeForward("bad:bf16", lambda out: out[:, :, 1:]), "error", "shape"),
    "another kernel": (FakeForward("bad:bf16", evidence={"cpu": "flash_attention"}), "error", "did not run"),
    "nothing": (FakeForward("bad:bf16", lambda out: None), "error", "Attribute"),
}
