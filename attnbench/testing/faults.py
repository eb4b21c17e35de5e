"""Kernels with a fault planted on purpose, each with the name under which the harness must find it.

Every fault is planted in a correct kernel, FP8 emulated with a scale for each token, whose own row must be ``ok``.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

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
)  # fmt: skip
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry
from attnbench.kernels.registry import registry as installed
from attnbench.problem.fp8 import Quantised
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

__all__ = ["BACKEND", "FAULTS", "GPU_FAULTS", "HONEST", "Fault", "registry"]

Flag = Literal["leak", "deterministic"]
_HONEST = "fp8-honest"
_BASE = "emulated:fp8-token"
_EXACT = "reference:fp32"
_ROW = Capabilities(dtypes=("bf16", "fp16", "fp32"))
_ROWS = {"cpu": _ROW, "cuda": _ROW}
_DROPPED_KEYS = 20
_LATE_SECONDS = 0.015
_GOOD_STEPS = 3
_CAUSAL = Mask(right=0)

_PLAIN = AttentionSpec.make(batch=1, heads=4, kv_heads=2, seqlen_q=192, head_dim=64, mask=_CAUSAL)
_TRAINING = AttentionSpec.make(batch=1, heads=2, seqlen_q=128, head_dim=64, mask=_CAUSAL, direction="training")
_MANY_HEADS = AttentionSpec.make(batch=2, heads=96, seqlen_q=48, head_dim=32)
_MANY_KEYS = AttentionSpec.make(batch=1, heads=2, seqlen_q=64, seqlen_kv=4096, head_dim=128)
_APPENDED = AttentionSpec.make(
    batch=1, heads=2, seqlen_q=64, seqlen_kv=160, head_dim=64, mask=Mask(right=0, alignment="bottom-right")
)


class Planted(ForwardKernel):
    """A correct FP8 forward; faults change ``prepare`` or ``run``."""

    rows: Mapping[str, Capabilities] = _ROWS
    declared_error = 0.08
    mixes = False
    base = _BASE

    def __init__(self, name: str) -> None:
        self.name = f"planted:{name}"
        self.calls = 0

    @cached_property
    def honest(self) -> ForwardKernel:
        """What would be right."""
        return installed().forward(self.base)

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """As the correct kernel does."""
        return self.honest.prepare(inputs, spec)

    def run(self, operands: Operands) -> Result:
        """As the correct kernel does; calls are counted."""
        self.calls += 1
        return self.honest.run(operands)


class Changed(Planted):
    """The correct result, changed: ``change(result, number of the call)``."""

    def __init__(self, name: str, change: Callable[[Result, int], Result]) -> None:
        super().__init__(name)
        self.change = change

    def run(self, operands: Operands) -> Result:
        """The correct result, changed."""
        result = super().run(operands)
        return self.change(result, self.calls)


class Misled(Planted):
    """The correct computation on other operands: ``mislead(operands)``."""

    def __init__(self, name: str, mislead: Callable[[Operands], Operands]) -> None:
        super().__init__(name)
        self.mislead = mislead

    def run(self, operands: Operands) -> Result:
        """The right answer to another question."""
        return super().run(self.mislead(operands))


class Previous(Planted):
    """Returns what the call before computed, as a buffer that is swapped too early does."""

    before: Result | None = None

    def run(self, operands: Operands) -> Result:
        """The previous answer; the first call's own."""
        now = super().run(operands)
        before, self.before = self.before, now
        return now if before is None or before.out.shape != now.out.shape else before


class Unwritten(Planted):
    """Writes all but the last row of its output, into memory that its caller has released."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.free: list[Tensor] = []

    def run(self, operands: Operands) -> Result:
        """The correct result, except for the last row, which keeps what its memory held."""
        result = super().run(operands)
        memory = self.free.pop() if self.free else None
        if memory is None or memory.shape != result.out.shape:
            memory = result.out.clone()
        memory[:, :, :-1] = result.out[:, :, :-1]
        out = memory[:]
        weakref.finalize(out, self.free.append, memory)
        return result._replace(out=out)


class Remembering(Planted):
    """Quantises the tensor at an address once, even if its values change later."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.seen: dict[tuple[int, AttentionSpec], Operands] = {}

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """What was prepared for this address."""
        return self.seen.setdefault((inputs.unquantised()[0].data_ptr(), spec), super().prepare(inputs, spec))


class Wide(Planted):
    """Shows FP8 operands and computes with the tensors from before: a bf16 kernel under an FP8 name."""

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """FP8 operands for show."""
        return replace(super().prepare(inputs, spec), native=inputs)

    def run(self, operands: Operands) -> Result:
        """Exact attention on the originals."""
        exact = installed().forward(_EXACT)
        return exact.run(exact.prepare(operands.native, operands.spec))


class Masquerading(Planted):
    """Declares evidence of a kernel that never runs."""

    evidence: Mapping[str, str] = {"cpu": "no_such_kernel", "cuda": "no_such_kernel"}


class Leaking(Planted):
    """One scale for a whole head: a later token changes the rounding of every earlier one."""

    base = "emulated:fp8"


class Late(Planted):
    """Returns before its result is there: on a GPU from another stream, on a CPU from another thread."""

    def run(self, operands: Operands) -> Result:
        """A result that will be right some time later."""
        result = super().run(operands)
        out = torch.zeros_like(result.out)
        if out.is_cuda:
            stream = torch.cuda.Stream(out.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(out.device))
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
                out.copy_(result.out)
            result.out.record_stream(stream)
            out.record_stream(stream)
        else:
            timer = threading.Timer(_LATE_SECONDS, out.copy_, (result.out,))
            timer.daemon = True
            timer.start()
        return result._replace(out=out)


class Spoiling(Planted):
    """Works in place on what belongs to the caller."""

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """Honest operands, of inputs that are scaled on the way."""
        operands = super().prepare(inputs, spec)
        inputs.unquantised()[1].mul_(0.5)
        return operands


class Dying(Planted):
    """Takes its process with it, or keeps it: ``act``."""

    def __init__(self, name: str, act: Callable[[Operands], object]) -> None:
        super().__init__(name)
        self.act = act

    def run(self, operands: Operands) -> Result:
        """No result at all."""
        self.act(operands)
        return super().run(operands)


class PlantedBackward(BackwardKernel):
    """Exact gradients of what the forward computed with, times a factor."""

    rows: Mapping[str, Capabilities] = _ROWS
    declared_error = 0.08

    def __init__(self, name: str, factor: float = 1.0) -> None:
        self.name, self.factor = f"planted:{name}", factor
        self.follows = (f"planted:{_HONEST}",)

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients, dQ changed."""
        spec = saved.spec
        exact = installed().forward(_EXACT)
        operands = exact.prepare(Inputs.of(saved.operands.tensors()), spec)
        out, lse, state = exact.run(operands)
        dq, dk, dv = installed().backward(_EXACT).run(Saved(operands, out, lse, state), grad_out)
        return dq * self.factor, dk, dv


@dataclass(frozen=True)
class Fault:
    """A planted kernel, the spec that shows the fault, and what its row must say.

    ``check`` is the check that must find it, ``reason`` part of the row's reason, ``flag`` the column that shows it if
    the row stays ``ok``.
    """

    name: str
    spec: AttentionSpec
    status: str
    kernel: ForwardKernel | BackwardKernel
    check: str | None = None
    reason: str = ""
    flag: Flag | None = None

    @property
    def plan(self) -> Plan:
        """The plan with the fault."""
        if isinstance(self.kernel, BackwardKernel):
            return Plan(HONEST.name, self.kernel.name)
        return Plan(self.kernel.name, HONEST_BACKWARD.name if self.spec.training else None)


HONEST = Planted(_HONEST)
HONEST_BACKWARD = PlantedBackward(_HONEST)


def _changed(name: str, change: Callable[[Result, int], Result]) -> Changed:
    return Changed(f"fp8-{name}", change)


def _nothing(result: Result, _: int) -> Result:
    return result._replace(out=torch.zeros_like(result.out))


def _one_nan(result: Result, _: int) -> Result:
    out = result.out.clone()
    out[0, -1, out.shape[2] // 2, 0] = torch.nan
    return result._replace(out=out)


def _one_head(result: Result, _: int) -> Result:
    out = result.out.clone()
    out[0, out.shape[1] // 2] = 0
    return result._replace(out=out)


def _one_row(result: Result, _: int) -> Result:
    out = result.out.clone()
    out[0, 0, -1] = 0
    return result._replace(out=out)


def _coarse(result: Result, _: int) -> Result:
    """As if P had too few bits: a relative error of about 0.1, spread over all elements."""
    out = result.out
    generator = torch.Generator(out.device).manual_seed(0)
    noise = torch.randn(out.shape, generator=generator, device=out.device)
    return result._replace(out=(out * (1 + 0.09 * noise)).to(out.dtype))


def _drifting(result: Result, calls: int) -> Result:
    return result._replace(out=result.out * (1 + 0.2 * max(0, calls - _GOOD_STEPS)))


def _restless(result: Result, calls: int) -> Result:
    return result._replace(out=result.out * (1 + 0.01 * (calls % 2)))


def _twice_the_scale(operands: Operands) -> Operands:
    return replace(operands, spec=operands.spec.replace(scale=2 * operands.spec.scale))


def _without_descale(operands: Operands) -> Operands:
    assert isinstance(operands.k, Quantised)
    return replace(operands, k=replace(operands.k, descale=torch.ones_like(operands.k.descale)))


def _top_left(operands: Operands) -> Operands:
    return replace(operands, spec=operands.spec.replace(mask=_CAUSAL))


def _without_last_keys(operands: Operands) -> Operands:
    def shorter(x: Tensor | Quantised) -> Quantised:
        assert isinstance(x, Quantised)
        kept = x.data.shape[2] - _DROPPED_KEYS
        return replace(x, data=x.data[:, :, :kept], descale=x.descale[:, :, :kept])

    k, v = shorter(operands.k), shorter(operands.v)
    return replace(operands, k=k, v=v, spec=operands.spec.replace(seqlen_kv=k.data.shape[2]))


def _crash(_: Operands) -> object:
    return ctypes.string_at(0)


def _spoil_device(operands: Operands) -> object:
    """On a GPU an index out of bounds, after which the process can use the device no more."""
    x = operands.tensors()[0].flatten()
    return x[torch.full((1,), x.numel(), device=x.device)].clone()


def _leave(_: Operands) -> object:
    print("the library gives up", flush=True)
    os._exit(3)


def _hang(_: Operands) -> object:
    time.sleep(3600)
    return None


def _take_all_memory(operands: Operands) -> object:
    return torch.empty(2**50, dtype=torch.uint8, device=operands.tensors()[0].device)


FAULTS = (
    Fault("zeros", _PLAIN, "inaccurate", _changed("zeros", _nothing), "error"),
    Fault("previous output", _PLAIN, "inaccurate", Previous("fp8-previous"), "stale"),
    Fault("a row left unwritten", _PLAIN, "inaccurate", Unwritten("fp8-unwritten"), "error"),
    Fault("twice the scale", _PLAIN, "inaccurate", Misled("fp8-scale", _twice_the_scale), "error"),
    Fault("ignored descale", _PLAIN, "inaccurate", Misled("fp8-descale", _without_descale), "error"),
    Fault("wrong causal alignment", _APPENDED, "inaccurate", Misled("fp8-alignment", _top_left), "error"),
    Fault("one wrong head", _MANY_HEADS, "inaccurate", _changed("head", _one_head), "head"),
    Fault("one wrong row", _PLAIN, "inaccurate", _changed("row", _one_row), "row"),
    Fault("too few bits", _PLAIN, "inaccurate", _changed("coarse", _coarse), "own"),
    Fault("NaN in one row", _PLAIN, "inaccurate", _changed("nan", _one_nan), "error"),
    Fault("dropped last key block", _MANY_KEYS, "inaccurate", Misled("fp8-dropped", _without_last_keys), "lse"),
    Fault("bf16 kernel in an FP8 name", _PLAIN, "inaccurate", Wide("fp8-wide"), "too good"),
    Fault("another kernel answers", _PLAIN, "error", Masquerading("fp8-masquerade"), reason="did not run"),
    Fault("work left running on another stream", _PLAIN, "inaccurate", Late("fp8-late"), "settled"),
    Fault("cache keyed by data pointer", _PLAIN, "inaccurate", Remembering("fp8-pointer"), "error"),
    Fault("gradient scaled by 1.05", _TRAINING, "inaccurate", PlantedBackward("fp8-gradient", 1.05), "bias"),
    Fault("future tokens leak through a scale", _PLAIN, "ok", Leaking("fp8-leak"), flag="leak"),
    Fault("drift after the third step", _PLAIN, "inaccurate", _changed("drift", _drifting), "error"),
    Fault("another answer every time", _PLAIN, "ok", _changed("restless", _restless), flag="deterministic"),
    Fault("inputs are changed", _PLAIN, "inaccurate", Spoiling("fp8-spoils"), "inputs"),
    Fault("crash", _PLAIN, "crashed", Dying("fp8-crash", _crash), reason="SIGSEGV"),
    Fault("exit", _PLAIN, "crashed", Dying("fp8-exit", _leave),
          reason="exit code 3; its last output: the library gives up"),
    Fault("hang", _PLAIN, "timeout", Dying("fp8-hang", _hang), reason="no answer within"),
    Fault("out of memory", _PLAIN, "oom", Dying("fp8-memory", _take_all_memory), reason="memory"),
)  # fmt: skip
# What only a GPU shows.
GPU_FAULTS = (Fault("illegal access", _PLAIN, "crashed", Dying("fp8-access", _spoil_device), reason="CUDA error"),)
_KERNELS = HONEST, HONEST_BACKWARD, *(fault.kernel for fault in (*FAULTS, *GPU_FAULTS))
BACKEND = Backend("planted", "kernels with planted faults", lambda: Availability(version="1"), _KERNELS)


def registry() -> Registry:
    """What is installed, and the planted backend."""
    return Registry([*installed().backends.values(), BACKEND])
