"""torch's unfused SDPA: two matrix products around a softmax, with the whole score matrix in memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attnbench.kernels.capabilities import Capabilities, Device
from attnbench.kernels.contract import Backend, BackwardKernel, ForwardKernel, Inputs, Operands, Result, Saved
from attnbench.problem.lengths_kind import BATCHES
from attnbench.problem.spec import AttentionSpec

from ..common.declared_errors import DECLARED_ERROR, DECLARED_GRADIENT_ERROR
from ..common.each_sequence import answer_each, derive_each, prepare_each
from ..common.full_fp32 import full_fp32
from ..common.installed import torch_availability
from ..common.mask_tensor import MAX_SCORES, dense_mask
from ..common.typed_kernel import TypedKernel

__all__ = ["BACKEND"]

_PRECISIONS = ("bf16", "fp16", "fp32", "fp64")
# 16-bit tensors are widened to FP32 and results rounded once: 0.0017 was seen in bf16, 0.00021 in fp16.
_ROUNDED_ONCE = {"bf16": 0.002, "fp16": 0.00025}


class _Math(TypedKernel):
    backend = "sdpa-math"
    errors: Mapping[str, float] = {**DECLARED_ERROR, **_ROUNDED_ONCE}

    def rows_of(self, precision: str) -> dict[str, Capabilities]:
        row = Capabilities(dtypes=(precision,), softcap=False, lse=isinstance(self, BackwardKernel), lengths=BATCHES)
        return {"cpu": row, "cuda": row}

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        batch = spec.batch if spec.lengths is None else 1  # a sequence at a time
        scores = batch * spec.heads * spec.seqlen_q * spec.seqlen_kv
        if scores > MAX_SCORES:
            return [f"keeps the score matrix in memory, of {MAX_SCORES} elements at most; this one has {scores}"]
        return []


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    out: Tensor = torch._scaled_dot_product_attention_math(  # torch.ops takes 3 µs more
        q, k, v, mask, 0.0, False, scale=spec.scale, enable_gqa=spec.group > 1
    )[0]
    return out


class MathForward(_Math, ForwardKernel):
    """``aten::_scaled_dot_product_attention_math``, which returns no log-sum-exp."""

    preference = 40
    evidence: Mapping[str, str] = {
        "cpu": r"aten::_scaled_dot_product_attention_math$",
        "cuda": r"(?i)soft_?max\w*forward",
    }

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """The tensors as they are, and the mask; of sequences of unequal length one after the other."""
        q, k, v = inputs.unquantised()
        if inputs.lengths is not None:
            return prepare_each(self, inputs, spec)
        mask = dense_mask(spec.mask, spec.seqlen_q, spec.seqlen_kv, q.dtype, q.device)
        return Operands(spec, q, k, v, (q, k, v, mask))

    def run(self, operands: Operands) -> Result:
        """The operator itself, without a graph."""
        if operands.lengths is not None:
            return answer_each(self, operands)
        q, k, v, mask = operands.native
        with torch.no_grad(), full_fp32(q):
            return Result(_attend(q, k, v, mask, operands.spec), None)


class MathBackward(_Math, BackwardKernel):
    """autograd through the same operator, run again: it reads neither the forward's output nor its log-sum-exp."""

    errors: Mapping[str, float] = {**DECLARED_GRADIENT_ERROR, **_ROUNDED_ONCE}
    preference = 40
    needs_lse = False
    evidence: Mapping[str, str] = {
        "cpu": r"aten::_softmax_backward_data$",
        "cuda": r"(?i)soft_?max\w*backward",
    }

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The forward again on detached leaves, then its gradients."""
        spec = saved.spec
        if saved.operands.lengths is not None:
            return derive_each(self, saved, grad_out)
        q, k, v = (x.detach().requires_grad_() for x in saved.operands.tensors())
        mask = dense_mask(spec.mask, spec.seqlen_q, spec.seqlen_kv, q.dtype, q.device)
        with full_fp32(q):
            with torch.enable_grad():
                out = _attend(q, k, v, mask, spec)
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad_out)
        return dq, dk, dv


BACKEND = Backend(
    name="sdpa-math",
    summary="torch's unfused attention: matrix products and a softmax",
    availability=torch_availability,
    kernels=tuple(kernel(precision) for precision in _PRECISIONS for kernel in (MathForward, MathBackward)),
    sdpa_order=3,  # see ``sdpa/cudnn.py``
)
