"""``fa3-vllm``: vLLM's FlashAttention-3, which adds up FP8 products in two levels, forward only.

Its short FP8 accumulator is promoted into fp32 (vllm-project/flash-attention), so that the error does not grow with the
number of keys.  Varlen only: the batch is packed into one row of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import Availability, Backend, Inputs, Operands, Result, Whole, gradient_dtype
from attnbench.problem.spec import AttentionSpec

from ..common.installed import has_file, installed, without_cuda
from .fa3 import Fa3Forward
from .fa3_operands import Native, refuse_spec
from .fa3_operator import FORWARD, bound

__all__ = ["BACKEND", "VllmForward"]

_INSTALL = "pip install vllm"


class _Packed(NamedTuple):
    """Operands in varlen layout: q (B·Sq, H, D), k and v (B·keys, Hkv, ·), and where each sequence starts."""

    q: Tensor
    k: Tensor
    v: Tensor
    starts_q: Tensor
    starts_k: Tensor
    given: Native


def _availability() -> Availability:
    if missing := without_cuda(_INSTALL):
        return missing
    version = installed("vllm", "vllm")
    if version is None:
        return Availability(reason="vllm is not installed", install=_INSTALL)
    if not has_file("vllm", "vllm_flash_attn/_vllm_fa3_C*"):
        return Availability(reason=f"vllm {version} was built without FlashAttention-3", origin="vllm")
    return Availability(version=version, origin="vllm")


@cache
def _forward() -> Callable[..., Any]:
    """The operator, loaded once.  Raises ImportError, OSError or OperatorError."""
    import_module("vllm.vllm_flash_attn._vllm_fa3_C")
    return bound(torch.ops._vllm_fa3_C.fwd.default, FORWARD)


class VllmForward(Fa3Forward):
    """The operator ``_vllm_fa3_C::fwd`` on packed sequences of one length."""

    backend = "fa3-vllm"
    preference = 30
    batches = ()
    fp8_growth = None  # two levels should not grow; not measured at 128k keys

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Windows that cannot be moved bottom-right, and more tokens than its 32-bit offsets count."""
        reasons = refuse_spec(spec)
        tokens = spec.batch * max(spec.seqlen_q, spec.seqlen_kv)
        if tokens >= 2**31:
            reasons.append(f"counts at most {2**31 - 1} tokens in a batch, this has {tokens}")
        return reasons

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """As ``fa3`` does; then packed, which copies (B, H, S, D) for B > 1."""
        operands = super().prepare(inputs, spec)
        operands.native = _packed(operands.native)
        return operands

    def whole(self, spec: AttentionSpec, device_type: str) -> Whole | None:
        """None: its operator takes packed tensors alone."""
        return None

    def run(self, operands: Operands) -> Result:
        """The kernel; its log-sum-exp comes as (H, B·Sq)."""
        packed: _Packed = operands.native
        spec, span = operands.spec, packed.given.window
        out, lse, *_ = _forward()(
            packed.q, packed.k, packed.v, *packed.given.descales, spec.scale,
            span.causal, span.left, span.right, spec.softcap,
            packed.starts_q, packed.starts_k, spec.seqlen_q, span.keys,
        )  # fmt: skip
        out = out.view(spec.batch, spec.seqlen_q, spec.heads, -1)[..., : spec.head_dim_v].transpose(1, 2)
        lse = lse.view(spec.heads, spec.batch, spec.seqlen_q).transpose(0, 1)
        return Result(out.to(gradient_dtype(spec)), lse)


def _packed(given: Native) -> _Packed:
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (given.q, given.k, given.v))
    starts_q, starts_k = (
        torch.arange(0, (x.shape[0] + 1) * x.shape[1], x.shape[1], dtype=torch.int32, device=x.device)
        for x in (given.q, given.k)
    )
    return _Packed(q, k, v, starts_q, starts_k, given)


BACKEND = Backend(
    name="fa3-vllm",
    summary="vLLM's FlashAttention-3: FP8 products added in two levels, varlen",
    availability=_availability,
    kernels=tuple(VllmForward(precision) for precision in ("fp8", "bf16", "fp16")),
)
