"""``fa2``: FlashAttention-2 from the package ``flash-attn`` 2.8, both passes in 16 bits, with softcap.

Dao, "FlashAttention-2" (arXiv 2307.08691); ``flash_attn/flash_attn_interface.py``.  torch's copy is ``sdpa-flash``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from attnbench.errors import InputError
from attnbench.kernels.capabilities import Capabilities, Device
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
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.spec import AttentionSpec

from ..common.cuda_limits import cuda_refusals
from ..common.declared_errors import DECLARED_GRADIENT_ERROR
from ..common.installed import installed, release, without_cuda
from ..common.layout import aligned, padded, rounded_up, whole_gradients
from ..common.typed_kernel import TypedKernel
from ..common.windows import Window, flash2_window

__all__ = ["BACKEND", "Fa2Backward", "Fa2Forward"]

_PRECISIONS = ("bf16", "fp16")
_KNOWN = (2, 8)  # the first version with this interface that was read; 3 would be another library
_INSTALL = "pip install --no-build-isolation 'flash-attn>=2.8,<3'"


def _availability() -> Availability:
    if missing := without_cuda(_INSTALL):
        return missing
    version = installed("flash_attn_2_cuda", "flash-attn")
    if version is None:
        return Availability(reason="flash-attn is not installed", install=_INSTALL)
    found = release(version)
    if found is None or not _KNOWN <= found < (3, 0):
        return Availability(reason=f"flash-attn {version} is not 2.8 or a later 2.x", install=_INSTALL)
    return Availability(version=version, origin="flash-attn")


@cache
def _interface() -> Any:
    """The module, loaded once.  Raises ImportError where its extension does not fit this torch."""
    return import_module("flash_attn.flash_attn_interface")


class _Fa2(TypedKernel):
    backend = "fa2"

    def rows_of(self, precision: str) -> dict[str, Capabilities]:
        return {"cuda": Capabilities(dtypes=(precision,), capability=(8, 0), head_dims=(1, 256, 1))}

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        reasons = cuda_refusals(spec, device)
        window = flash2_window(spec.mask, spec.seqlen_q, spec.seqlen_kv)
        if isinstance(window, str):
            reasons.append(window)
        if spec.scale <= 0:  # the row's maximum is taken before the scale is applied (csrc/flash_attn/src/softmax.h)
            reasons.append(f"needs a positive scale, not {spec.scale}")
        return reasons


def _native(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor, Window]:
    """(B, S, H, D) views with one head dimension for all, a multiple of 8; keys that no query sees cut off."""
    window = flash2_window(spec.mask, spec.seqlen_q, spec.seqlen_kv)
    if isinstance(window, str):
        raise InputError(window)
    size = rounded_up(max(spec.head_dim, spec.head_dim_v), 8)
    q, k, v = (aligned(padded(x, size)).transpose(1, 2) for x in (q, k, v))
    return q, k[:, : window.keys], v[:, : window.keys], window


class Fa2Forward(_Fa2, ForwardKernel):
    """``flash_attn::_flash_attn_forward``."""

    preference = 25
    evidence: Mapping[str, str] = {"cuda": r"(?<!pytorch_)flash::flash_fwd"}

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """Views where the strides and the head dimensions allow it, else padded copies."""
        q, k, v = inputs.unquantised()
        return Operands(spec, q, k, v, _native(q, k, v, spec))

    def run(self, operands: Operands) -> Result:
        """The operator; rows without a key get the log-sum-exp minus infinity, where it has plus infinity."""
        spec = operands.spec
        q, k, v, window = operands.native
        out, lse, *_ = _interface()._flash_attn_forward(
            q, k, v, 0.0, spec.scale, causal=False, window_size_left=window.left, window_size_right=window.right,
            softcap=spec.softcap, alibi_slopes=None, return_softmax=False,
        )  # fmt: skip
        if spec.has_empty_rows:
            lse = lse.masked_fill(lse == math.inf, -math.inf)
        return Result(out[..., : spec.head_dim_v].transpose(1, 2), lse)


class Fa2Backward(_Fa2, BackwardKernel):
    """``flash_attn::_flash_attn_backward``, on this or another forward's output and log-sum-exp."""

    from_lse = True
    errors = DECLARED_GRADIENT_ERROR
    preference = 16
    evidence: Mapping[str, str] = {"cuda": r"(?<!pytorch_)flash::flash_bwd"}

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK, dV of what the forward saw; keys that no query sees get zeros."""
        spec, lse = saved.spec, saved.lse
        assert lse is not None
        q, k, v, window = _native(*saved.operands.tensors(TO_TORCH[self.precision]), spec)
        if spec.has_empty_rows:
            lse = lse.masked_fill(lse == -math.inf, math.inf)  # the kernel wants exp(S - LSE) to be 0 there
        dout, out = (aligned(padded(x, q.shape[-1])).transpose(1, 2) for x in (grad_out, saved.out))
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        _interface()._flash_attn_backward(
            dout, q, k, v, out, lse.contiguous(), dq, dk, dv, 0.0, spec.scale, causal=False,
            window_size_left=window.left, window_size_right=window.right, softcap=spec.softcap,
            alibi_slopes=None, deterministic=False, rng_state=None,
        )  # fmt: skip
        return whole_gradients((dq, dk, dv), spec)


BACKEND = Backend(
    name="fa2",
    summary="FlashAttention-2 from flash-attn 2.8, 16 bits",
    availability=_availability,
    kernels=tuple(kernel(precision) for precision in _PRECISIONS for kernel in (Fa2Forward, Fa2Backward)),
)
