"""cuDNN's attention in 16 bits, as torch calls it, on CUDA."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from attnbench.graph_pools import permanent
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
    Whole,
)
from attnbench.problem.spec import AttentionSpec

from ..common.cuda_limits import cuda_refusals
from ..common.cudnn_attention import BACKWARD_EVIDENCE, FORWARD_EVIDENCE, LEAST, PRECISIONS, cudnn_version
from ..common.declared_errors import DECLARED_GRADIENT_ERROR
from ..common.installed import cuda_availability
from ..common.layout import aligned
from ..common.typed_kernel import TypedKernel

__all__ = ["BACKEND"]

_VECTOR = 16  # bytes that rows and storage start at multiples of
_OWN = 712  # unused elements between two outermost places of q


def _availability() -> Availability:
    found = cuda_availability()
    if found.ok and cudnn_version() is None:
        return Availability(reason=f"torch {torch.__version__} finds no cuDNN", origin="torch")
    return found


class _SdpaCudnn(TypedKernel):
    backend = "sdpa-cudnn"

    def rows_of(self, precision: str) -> dict[str, Capabilities]:
        row = Capabilities(
            dtypes=(precision,),
            capability=(8, 0),
            head_dims=(8, 256, 8),
            masks=("none", "causal"),
            alignments=("top-left",),
            softcap=False,
            empty_rows=False,
        )
        return {"cuda": row}

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        reasons = cuda_refusals(spec, device)
        if device.capability != (9, 0) and max(spec.head_dim, spec.head_dim_v) > 128:
            reasons.append(f"head dimensions above 128 need compute capability 9.0, {device.name} has another")
        if spec.scale <= 0:
            # Keys that fill up a tile are hidden before the scale is applied, so this holds without a mask, too.
            reasons.append(f"hides keys before it scales, which needs a scale above 0, not {spec.scale}")
        if spec.seqlen_kv == 1:
            reasons.append("takes no single key")  # check_cudnn_tensor_shapes in torch's sdp_utils.cpp
        version = cudnn_version()
        if version is not None and version < LEAST and (spec.seqlen_q % 128 or spec.seqlen_kv % 128):
            reasons.append(f"cuDNN {version} needs lengths that are multiples of 128")
        return reasons


class CudnnForward(_SdpaCudnn, ForwardKernel):
    """``aten::_scaled_dot_product_cudnn_attention``."""

    preference = 10
    evidence: Mapping[str, str] = {"cuda": FORWARD_EVIDENCE}

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """Views where the strides allow it; groups of heads are cuDNN's own."""
        q, k, v = inputs.unquantised()
        return Operands(spec, q, k, v, (aligned(q), aligned(k), aligned(v)))

    def run(self, operands: Operands) -> Result:
        """The operator; its log-sum-exp has an axis of one more."""
        spec = operands.spec
        q, k, v = operands.native
        found = torch._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, spec.mask.kind == "causal", False, scale=spec.scale
        )
        return Result(found[0], found[1].squeeze(3))

    def whole(self, spec: AttentionSpec, device_type: str) -> Whole | None:
        """The operator without gradients: torch's own way to them may run the wrong graph, see ``_laid_out_as``."""
        if spec.direction == "training":
            return None
        causal, scale, with_lse = spec.mask.kind == "causal", spec.scale, spec.return_lse

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
            found = torch._scaled_dot_product_cudnn_attention(
                aligned(q), aligned(k), aligned(v), None, with_lse, 0.0, causal, False, scale=scale
            )
            return found[0], found[1].squeeze(-1) if with_lse else None

        return attend


class CudnnBackward(_SdpaCudnn, BackwardKernel):
    """``aten::_scaled_dot_product_cudnn_attention_backward``."""

    from_lse = True
    errors = DECLARED_GRADIENT_ERROR
    preference = 10
    evidence: Mapping[str, str] = {"cuda": BACKWARD_EVIDENCE}

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The operator, on this or another forward's output and log-sum-exp."""
        spec, lse = saved.spec, saved.lse
        assert lse is not None
        q, k, v = (aligned(x) for x in saved.operands.tensors())
        q = _apart(q)
        out, grad_out = (_laid_out_as(q, x) for x in (saved.out, grad_out))
        unused = _unused(q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
            grad_out, q, k, v, out, lse.contiguous().unsqueeze(-1), unused, unused, None,
            None, None, spec.seqlen_q, spec.seqlen_kv, 0.0, spec.mask.kind == "causal", scale=spec.scale,
        )  # fmt: skip
        return dq, dk, dv


@permanent
def _unused(device: torch.device) -> Tensor:
    """The random state of a dropout that there is none of."""
    return torch.empty((), dtype=torch.int64, device=device)


def _laid_out_as(q: Tensor, x: Tensor) -> Tensor:
    """x (B, H, S, D) dense with q's order of axes, as torch's own forward returns it; else a copy.

    torch 2.11 caches backward graphs by the strides of q, k and v alone: another layout of the output or its gradient
    would silently run the wrong graph.
    """
    strides = _dense(x.shape, _order(q.shape, q.stride()))
    if x.stride() == strides and x.data_ptr() % _VECTOR == 0:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _apart(q: Tensor) -> Tensor:
    """q (B, H, S, D) with strides that no other caller of torch's operator has, in its order of axes.

    Graphs are shared in the process: one that ``F.scaled_dot_product_attention`` made for another layout would run
    here.  If the outermost axis has one element nothing is copied.
    """
    shape, strides, copied = _strides_apart(q.shape, q.stride())
    if copied is None:
        return q.as_strided(shape, strides)
    kept = torch.empty(copied, dtype=q.dtype, device=q.device)
    return kept.as_strided(shape, strides).copy_(q)


@lru_cache(maxsize=1024)
def _strides_apart(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], int | None]:
    """The shape and strides of ``_apart``, and how many elements are allocated for a copy; None for a view."""
    order = _order(shape, strides)
    outermost = order[0]
    alone = shape[outermost] == 1
    found = list(strides if alone else _dense(shape, order))
    found[outermost] += _OWN
    return shape, tuple(found), None if alone else shape[outermost] * found[outermost]


@lru_cache(maxsize=1024)
def _order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The axes as they lie in memory, outermost first; an axis of stride 0 is not innermost."""
    return tuple(sorted(range(len(shape)), key=lambda axis: strides[axis] or math.inf, reverse=True))


@lru_cache(maxsize=1024)
def _dense(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose axes lie in this order."""
    return torch.empty_permuted(shape, order, device="meta").stride()


BACKEND = Backend(
    name="sdpa-cudnn",
    summary="cuDNN's attention in 16 bits, as torch calls it",
    availability=_availability,
    kernels=tuple(kernel(precision) for precision in PRECISIONS for kernel in (CudnnForward, CudnnBackward)),
    built_on=("cudnn",),
    sdpa_order=0,  # priority_order in torch's sdp_utils.cpp (2.11) with cuDNN after 9.15
)
