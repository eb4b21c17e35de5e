"""torch's own FlashAttention: FlashAttention-2 on CUDA, and the tiled kernel of the same name on the CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

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
    rounding_error,
)
from attnbench.problem.lengths_kind import BATCHES
from attnbench.problem.spec import AttentionSpec

from ..common.cuda_limits import cuda_refusals
from ..common.declared_errors import DECLARED_GRADIENT_ERROR
from ..common.each_sequence import answer_each, derive_each, prepare_each
from ..common.full_fp32 import full_fp32, shortened
from ..common.installed import torch_availability
from ..common.layout import aligned, whole_gradients
from ..common.mask_tensor import MAX_SCORES, dense_mask
from ..common.typed_kernel import TypedKernel
from ..common.unpadding import unpads_backward, unpads_forward
from ..common.windows import Window, flash2_window_of

__all__ = ["BACKEND"]

_PRECISIONS = ("bf16", "fp16", "fp32", "fp64")
_ON_CUDA = ("bf16", "fp16")
_NOTHING: AbstractContextManager[None] = nullcontext()


class _Flash(TypedKernel):
    backend = "sdpa-flash"

    def rows_of(self, precision: str) -> dict[str, Capabilities]:
        cpu = Capabilities(dtypes=(precision,), head_dim_v=False, softcap=False, lengths=BATCHES)
        if precision not in _ON_CUDA:
            return {"cpu": cpu}
        return {"cpu": cpu, "cuda": replace(cpu, capability=(8, 0), head_dims=(8, 256, 8))}

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        if device.type == "cuda":
            window = flash2_window_of(spec)
            # softmax.h of FlashAttention-2 multiplies minus infinity, its hidden keys, by the scale.
            reasons = cuda_refusals(spec, device)
            if spec.scale <= 0:
                reasons.append(f"hides keys before it scales, which needs a scale above 0, not {spec.scale}")
            return reasons + ([window] if isinstance(window, str) else [])
        pairs = spec.seqlen_q * spec.seqlen_kv
        if not _cpu_causal(spec) and spec.mask.kind != "none" and pairs > MAX_SCORES:
            return [f"needs this mask as a tensor, of {MAX_SCORES} elements at most; this one has {pairs}"]
        return []


def _cpu_causal(spec: AttentionSpec) -> bool:
    """Whether the operator's own causal mask serves; it hides keys before scaling, so the scale must be positive."""
    return spec.mask.kind == "causal" and spec.mask.alignment == "top-left" and spec.scale > 0


def _whole_on_cuda(causal: bool, scale: float) -> Whole:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found = torch._scaled_dot_product_flash_attention(
            aligned(q), aligned(k), aligned(v), 0.0, causal, False, scale=scale
        )
        return found[0], found[1]

    return attend


def _whole_on_cpu(causal: bool, spec: AttentionSpec) -> Whole:
    single, scale = spec.dtype == "fp32", spec.scale

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if single and shortened():
            with full_fp32(q):
                return operate(q, k, v)
        return operate(q, k, v)

    def operate(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = torch._scaled_dot_product_flash_attention_for_cpu(
            _readable(q), _readable(k), _readable(v), 0.0, causal, scale=scale
        )
        return found

    return attend


def _cpu_mask(spec: AttentionSpec, q: Tensor) -> Tensor | None:
    return dense_mask(spec.mask, spec.seqlen_q, spec.seqlen_kv, q.dtype, q.device)


def _readable(x: Tensor) -> Tensor:
    """x (B, H, S, D) as the CPU's operator reads it: rows are contiguous."""
    return x if x.stride()[3] == 1 else aligned(x, x.element_size())


@lru_cache(maxsize=16)
def _empty_rows(spec: AttentionSpec) -> Tensor:
    """Which queries see no key, (Sq,), on the CPU."""
    sizes = (spec.seqlen_q, spec.seqlen_kv)
    spans = (spec.mask.span(row, *sizes) for row in range(spec.seqlen_q))
    return torch.tensor([start == stop for start, stop in spans])


@unpads_forward("cpu")
class FlashForward(_Flash, ForwardKernel):
    """``aten::_flash_attention_forward`` on CUDA, ``aten::_scaled_dot_product_flash_attention_for_cpu`` on the CPU."""

    preference = 20
    evidence: Mapping[str, str] = {
        "cpu": r"aten::_scaled_dot_product_flash_attention_for_cpu$",
        "cuda": r"pytorch_flash::flash_fwd",
    }

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """Views where the strides allow it, and the mask as the device's operator takes it."""
        q, k, v = inputs.unquantised()
        if q.is_cuda:
            return Operands(spec, q, k, v, _cuda_inputs(q, k, v, spec), inputs.lengths)
        if inputs.lengths is not None:
            return prepare_each(self, inputs, spec)
        causal = _cpu_causal(spec)
        empty = _empty_rows(spec) if spec.has_empty_rows else None
        native = _readable(q), _readable(k), _readable(v), causal, None if causal else _cpu_mask(spec, q), empty
        return Operands(spec, q, k, v, native)

    def run(self, operands: Operands) -> Result:
        """The operator; rows without a key get the log-sum-exp minus infinity, which neither operator gives them."""
        spec, native = operands.spec, operands.native
        if isinstance(native, list):  # a part for each sequence, on the CPU
            return answer_each(self, operands)
        if native[0].is_cuda:
            q, k, v, window = native
            out, lse, *_ = torch.ops.aten._flash_attention_forward(
                q, k, v, *_starts(operands, window), 0.0, False, False,
                scale=spec.scale, window_size_left=window.left, window_size_right=window.right,
            )  # fmt: skip
            if operands.lengths is not None:
                out, lse = out[None], lse[None]
            if spec.has_empty_rows:
                lse = lse.masked_fill(lse == math.inf, -math.inf)
            return Result(out.transpose(1, 2), lse)
        q, k, v, causal, mask, empty = native
        with full_fp32(q) if spec.dtype == "fp32" else _NOTHING:
            out, lse = torch._scaled_dot_product_flash_attention_for_cpu(  # torch.ops takes 3 µs more
                q, k, v, 0.0, causal, attn_mask=mask, scale=spec.scale
            )
        if empty is not None:
            lse = lse.masked_fill(empty, -math.inf)
        return Result(out, lse)

    def whole(self, spec: AttentionSpec, device_type: str) -> Whole | None:
        """torch's operators, where their own causal mask or none is what is asked: every query sees a key."""
        if spec.mask.kind not in ("none", "causal"):
            return None
        causal = spec.mask.kind == "causal"
        if device_type == "cuda":
            return None if causal and spec.seqlen_q != spec.seqlen_kv else _whole_on_cuda(causal, spec.scale)
        if (causal and not _cpu_causal(spec)) or (spec.dtype == "fp32" and spec.direction == "training"):
            return None  # the precision of FP32 products is held around each pass
        return _whole_on_cpu(causal, spec)


@unpads_backward("cpu")
class FlashBackward(_Flash, BackwardKernel):
    """``aten::_flash_attention_backward`` on CUDA, ``…_flash_attention_for_cpu_backward`` on the CPU."""

    from_lse = True
    errors = DECLARED_GRADIENT_ERROR
    preference = 20
    evidence: Mapping[str, str] = {
        "cpu": r"aten::_scaled_dot_product_flash_attention_for_cpu_backward$",
        "cuda": r"pytorch_flash::flash_bwd",
    }

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Those of the forward, and head dimensions whose backward needs more shared memory than small GPUs have."""
        reasons = super().further_refusals(spec, device)
        # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120 in torch's sdp_utils.cpp
        small = (8, 6) <= device.capability < (9, 0) or device.capability >= (12, 0)
        if device.type == "cuda" and small and 192 < spec.head_dim <= 224:
            reasons.append(f"has no backward for head_dim {spec.head_dim} on {device.name}")
        return reasons

    def error_on(self, spec: AttentionSpec, device: Device) -> float:
        """On the CPU more with every tile and head: the operator adds gradients up in the type of the tensors."""
        declared = super().error_on(spec, device)
        return declared if device.type == "cuda" else math.hypot(declared, rounding_error(spec) * _roundings(spec))

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The operator, on this or another forward's output and log-sum-exp."""
        if grad_out.is_cuda:
            return _backward_cuda(saved, grad_out)
        return _backward_cpu(saved, grad_out) if saved.operands.lengths is None else derive_each(self, saved, grad_out)


def _roundings(spec: AttentionSpec) -> float:
    """The number of roundings of a whole gradient that the CPU's sums amount to: half their number, in quadrature.

    dk and dv are rounded after each tile of queries of each head of a group, dq after each tile of keys
    (cpu_flash_attention_backward in torch's FlashAttentionKernel.cpp).
    """
    rows = 256 if spec.seqlen_q >= 768 else 64 if spec.seqlen_q >= 192 else 32
    sums = max(spec.group * -(-spec.seqlen_q // rows), -(-spec.seqlen_kv // 512))
    return math.sqrt(sums / 2)


def _cuda_inputs(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor, Window]:
    window = flash2_window_of(spec)
    if isinstance(window, str):
        raise ValueError(window)
    q, k, v = aligned(q).transpose(1, 2), aligned(k).transpose(1, 2), aligned(v).transpose(1, 2)
    if spec.lengths is not None:
        return q[0], k[0], v[0], window
    if window.keys < spec.seqlen_kv:
        k, v = k[:, : window.keys], v[:, : window.keys]
    return q, k, v, window


def _starts(operands: Operands, window: Window) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Where sequences start, None where they have one length, and the largest numbers of queries and keys."""
    if operands.lengths is None:
        return None, None, operands.spec.seqlen_q, window.keys
    return *operands.lengths.starts, operands.lengths.longest_q, operands.lengths.longest_kv


def _backward_cuda(saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    spec, lse = saved.spec, saved.lse
    assert lse is not None
    q, k, v, window = _cuda_inputs(*saved.operands.tensors(), spec)
    if spec.has_empty_rows:
        lse = lse.masked_fill(lse == -math.inf, math.inf)  # the kernel wants exp(S - LSE) to be 0 there
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the dropout's random state
    grad_out, out = aligned(grad_out).transpose(1, 2), aligned(saved.out).transpose(1, 2)
    if spec.lengths is not None:
        grad_out, out, lse = grad_out[0], out[0], lse[0]
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad_out, q, k, v, out, lse.contiguous(), *_starts(saved.operands, window), 0.0, False, unused, unused,
        scale=spec.scale, window_size_left=window.left, window_size_right=window.right,
    )  # fmt: skip
    return whole_gradients((dq, dk, dv), spec)


def _backward_cpu(saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    spec, lse = saved.spec, saved.lse
    assert lse is not None
    inputs = [_readable(x) for x in (grad_out, *saved.operands.tensors(), saved.out)]
    causal = _cpu_causal(spec)
    lse = lse.to(torch.float64 if spec.dtype == "fp64" else torch.float32)
    if spec.has_empty_rows:
        lse = lse.masked_fill(lse == -math.inf, 0.0)  # as the operator's forward has it; infinity would become NaN
    with full_fp32(lse) if spec.dtype == "fp32" else _NOTHING:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, lse, 0.0, causal, attn_mask=None if causal else _cpu_mask(spec, inputs[1]), scale=spec.scale
        )
    return dq, dk, dv


BACKEND = Backend(
    name="sdpa-flash",
    summary="torch's own FlashAttention (FlashAttention-2 on CUDA)",
    availability=torch_availability,
    kernels=tuple(kernel(precision) for precision in _PRECISIONS for kernel in (FlashForward, FlashBackward)),
    sdpa_order=1,  # see ``sdpa/cudnn.py``
)
