"""``fa3``: FlashAttention-3 on Hopper, forward in FP8 and 16 bits, backward in 16 bits where the build has one.

Shah et al., "FlashAttention-3" (arXiv 2407.08608); the source is ``hopper/`` of Dao-AILab/flash-attention.
``fa3_origins`` says which distribution answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnbench.errors import InputError
from attnbench.kernels.capabilities import Capabilities, Device
from attnbench.kernels.contract import (
    Backend,
    BackwardKernel,
    ForwardKernel,
    Inputs,
    Operands,
    Result,
    Saved,
    Whole,
    gradient_dtype,
)
from attnbench.kernels.devices import bind
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.lengths_kind import BATCHES, Batch
from attnbench.problem.spec import AttentionSpec

from ..common.declared_errors import DECLARED_ERROR, DECLARED_GRADIENT_ERROR, SHORT_ACCUMULATOR
from ..common.layout import padded, whole_gradients
from ..common.unpadding import unpads_forward
from ..common.windows import window_of
from .fa3_operands import Native, dimensions, prepared, readable, refuse_spec, shared
from .fa3_origins import availability, chosen, library

__all__ = ["BACKEND", "HOPPER", "PROFILED", "Fa3Backward", "Fa3Forward", "fp8_row", "needs"]

HOPPER: Mapping[str, Any] = {"capability": (9, 0), "capability_below": (10, 0), "head_dims": (1, 256, 1)}
# The device kernels as the profiler writes them.  The first type is the operands'; bf16 is other things' type, too.
_TYPES = {"fp8": "float_e4m3_t", "bf16": "bfloat16_t", "fp16": "half_t"}
PROFILED = {
    precision: rf"FlashAttnFwdSm90(?:(?!{'|'.join(_TYPES.values())}).)*{name}" for precision, name in _TYPES.items()
}
_FP8_ERROR = 0.08  # 0.052 to 0.054 was measured on normal inputs, D 64 to 256; few keys and small D need more
_OMITTED = {
    "BACKWARD": "the build from {origin} has no backward",
    "FP8": "the build from {origin} has no FP8",
    "FP16": "the build from {origin} has no fp16",
    "LOCAL": "the build from {origin} has no windows",
    "SOFTCAP": "the build from {origin} has no softcap",
}


def fp8_row() -> Capabilities:
    """The row of an FP8 forward: it quantises 16-bit tensors, and takes e4m3 with scales per tensor or head."""
    return Capabilities(dtypes=("bf16", "fp16", "e4m3"), descales=("tensor", "head"), **HOPPER)


def _omitted(needed: set[str]) -> list[str]:
    """The parts that are needed and that the build in use was made without."""
    build = chosen()
    if build is None:
        return []  # then nothing runs at all, and the availability says so
    return [_OMITTED[part].format(origin=build.name) for part in sorted(needed & build.omissions())]


def needs(spec: AttentionSpec, precision: str) -> set[str]:
    """The parts of FlashAttention-3 that a spec needs in a precision, by the names of ``Build.omissions``."""
    found = window_of(spec)
    local = not isinstance(found, str) and found.local
    asked = {"FP8": precision == "fp8", "FP16": precision == "fp16", "LOCAL": local, "SOFTCAP": spec.softcap > 0}
    return {part for part, needed in asked.items() if needed}


@unpads_forward()
class Fa3Forward(ForwardKernel):
    """The operator ``fwd`` of the origin in use."""

    backend = "fa3"
    preference: int | None = 8
    batches: tuple[Batch, ...] = BATCHES
    fp8_growth: float | None = SHORT_ACCUMULATOR

    def __init__(self, precision: str) -> None:
        self.name = f"{self.backend}:{precision}"
        self.precision = precision
        self.leaves = "e4m3" if precision == "fp8" else None
        row = fp8_row() if precision == "fp8" else Capabilities(dtypes=(precision,), **HOPPER)
        # The last tile of a sequence reads the next one's V and multiplies it by 0, which leaves NaN (H200).
        self.rows = {"cuda": replace(row, lengths=self.batches, isolates=not self.batches)}
        self.declared_error = _FP8_ERROR if precision == "fp8" else DECLARED_ERROR[precision]
        self.error_growth = self.fp8_growth if precision == "fp8" else None
        self.evidence = {"cuda": PROFILED[precision]}

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Windows that cannot be moved bottom-right, and what the build was made without."""
        return refuse_spec(spec) + _omitted(needs(spec, self.precision))

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """FP8: e4m3 with a scale for each (batch, key head).  16 bits: views where TMA can load them."""
        return prepared(inputs, spec, self.precision)

    def run(self, operands: Operands) -> Result:
        """The kernel on the current stream; out comes as bf16 from FP8 and is rounded to fp16 where that came in."""
        given: Native = operands.native
        spec, span = operands.spec, given.window
        out, lse, *_ = library().forward(
            given.q, given.k, given.v, *given.descales, spec.scale,
            span.causal, span.left, span.right, spec.softcap, *given.starts,
        )  # fmt: skip
        if operands.lengths is not None:
            out, lse = out[None], lse[None]
        if out.shape[-1] > spec.head_dim_v:
            out = out[..., : spec.head_dim_v]
        return Result(out.transpose(1, 2).to(gradient_dtype(spec)), lse)

    def whole(self, spec: AttentionSpec, device_type: str) -> Whole | None:
        """The operator in 16 bits, without gradients, where nothing is padded or cut off."""
        if self.precision == "fp8" or spec.training:
            return None
        window, *dimensions = shared(spec, fp8=False)
        if dimensions != [spec.head_dim, spec.head_dim_v] or window.keys < spec.seqlen_kv:
            return None
        forward, no_descales, one_length = library().forward, (None,) * 3, (None,) * 4
        described = spec.scale, window.causal, window.left, window.right, spec.softcap

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            bind(q.device)
            out, lse, *_ = forward(readable(q), readable(k), readable(v), *no_descales, *described, *one_length)
            return out.transpose(1, 2), lse

        return attend


class Fa3Backward(BackwardKernel):
    """The operator ``bwd``, on this or another forward's output and log-sum-exp."""

    from_lse = True
    preference = 14
    evidence: Mapping[str, str] = {"cuda": r"FlashAttnBwdSm90"}

    def __init__(self, precision: str) -> None:
        self.name = f"fa3:{precision}"
        self.precision = precision
        self.rows = {"cuda": Capabilities(dtypes=(precision,), **HOPPER)}
        self.declared_error = DECLARED_GRADIENT_ERROR[precision]

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Those of the forward, and builds without a backward."""
        return refuse_spec(spec) + _omitted({"BACKWARD", *needs(spec, self.precision)})

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK, dV of what the forward saw; keys that no query sees get zeros."""
        spec, lse = saved.spec, saved.lse
        assert lse is not None
        backward = library().backward
        span = window_of(spec)
        if backward is None or isinstance(span, str):
            raise InputError(f"{self.name} refuses this: {'; '.join(_omitted({'BACKWARD'})) or span}")
        size, _ = dimensions(spec.head_dim, spec.head_dim_v, fp8=False, backward=True)
        q, k, v = saved.operands.tensors(TO_TORCH[self.precision])
        dout, q, k, v, out = (
            readable(padded(x, size)) for x in (grad_out, q, k[:, :, : span.keys], v[:, :, : span.keys], saved.out)
        )
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        backward(
            dout, q, k, v, out, lse.contiguous(), dq, dk, dv, spec.scale,
            span.causal, span.left, span.right, spec.softcap,
        )  # fmt: skip
        return whole_gradients((dq, dk, dv), spec)


BACKEND = Backend(
    name="fa3",
    summary="FlashAttention-3 on Hopper, FP8 and 16 bits",
    availability=availability,
    kernels=(
        Fa3Forward("fp8"),
        *(kernel(precision) for precision in ("bf16", "fp16") for kernel in (Fa3Forward, Fa3Backward)),
    ),
)
