"""torch's memory-efficient attention: xformers' CUTLASS kernels, on CUDA."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.kernels.capabilities import Capabilities, Device
from attnbench.kernels.contract import Backend, BackwardKernel, ForwardKernel, Inputs, Operands, Result, Saved, Whole
from attnbench.problem.lengths_kind import BATCHES
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

from ..common.cuda_limits import cuda_refusals, entry_refusals
from ..common.declared_errors import DECLARED_GRADIENT_ERROR
from ..common.each_sequence import answer_each, derive_each, prepare_each
from ..common.installed import cuda_availability
from ..common.layout import aligned, near
from ..common.typed_kernel import TypedKernel

__all__ = ["BACKEND", "Band", "causal_band"]

_PRECISIONS = ("bf16", "fp16", "fp32")
_NO_MASK, _TOP_LEFT, _BOTTOM_RIGHT = 0, 1, 2  # CustomMaskType in torch's kernel_forward.h
_LSE_BLOCK = 32  # kAlignLSE in torch's kernel_forward.h


class Band(NamedTuple):
    """A mask as the kernels take it: which diagonal bounds it, and how many keys up to there are seen, None for all."""

    diagonal: int
    width: int | None


@lru_cache(maxsize=1024)
def causal_band(mask: Mask, seqlen_q: int, seqlen_kv: int) -> Band | str:
    """The diagonal and width that make the kernels compute ``mask``, or why there are none."""
    if mask.kind == "none":
        return Band(_NO_MASK, None)
    if mask.right is None:
        return "its windows are limited to the right"
    last = mask.offset(seqlen_q, seqlen_kv) + mask.right  # the last key that the first query sees
    width = None if mask.left is None else mask.left + mask.right + 1
    if last == 0:
        return Band(_TOP_LEFT, width)
    if last == seqlen_kv - seqlen_q:
        return Band(_BOTTOM_RIGHT, width)
    return "its windows end at one of the two diagonals"


class _Efficient(TypedKernel):
    backend = "sdpa-efficient"

    def rows_of(self, precision: str) -> dict[str, Capabilities]:
        # Where a block of queries sees no key at all the forward writes no output, so empty rows are undefined.
        vector = 4 if precision == "fp32" else 8
        row = Capabilities(
            dtypes=(precision,), capability=(8, 0), head_dims=(vector, 65536, vector), softcap=False, empty_rows=False,
            # One sequence after the other, which waits for the device: torch's varlen kernel serves 16 bits.
            lengths=BATCHES if precision == "fp32" else (),
        )  # fmt: skip
        return {"cuda": row}

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        band = causal_band(spec.mask, spec.seqlen_q, spec.seqlen_kv)
        refusals = [*cuda_refusals(spec, device), *entry_refusals(spec, device, spec.heads)]  # keys are repeated
        return refusals + ([band] if isinstance(band, str) else [])


def _inputs(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor, Band]:
    band = causal_band(spec.mask, spec.seqlen_q, spec.seqlen_kv)
    if isinstance(band, str):
        raise ValueError(band)
    if spec.group > 1:
        k, v = (x.repeat_interleave(spec.group, dim=1) for x in (k, v))
    q, k, v = (near(aligned(x)).transpose(1, 2) for x in (q, k, v))
    return q, k, v, band


class EfficientForward(_Efficient, ForwardKernel):
    """``aten::_efficient_attention_forward``."""

    preference = 30
    evidence: Mapping[str, str] = {"cuda": r"fmha_cutlassF"}

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """Views where the strides allow it; K and V are repeated for the heads of a group, which cannot share them.

        Sequences of unequal length come one after the other.
        """
        if inputs.lengths is not None:
            return prepare_each(self, inputs, spec)
        q, k, v = inputs.unquantised()
        return Operands(spec, q, k, v, _inputs(q, k, v, spec))

    def run(self, operands: Operands) -> Result:
        """The operator; the rows that pad its log-sum-exp are cut off."""
        if operands.lengths is not None:
            return answer_each(self, operands)
        q, k, v, band = operands.native
        spec = operands.spec
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            q, k, v, None, None, None, None, None, 0.0, band.diagonal, True, scale=spec.scale, window_size=band.width
        )
        return Result(out.transpose(1, 2), lse[..., : spec.seqlen_q])

    def whole(self, spec: AttentionSpec, device_type: str) -> Whole | None:
        """torch's operator around the same kernels: no groups, and no mask but the top-left causal one."""
        band = causal_band(spec.mask, spec.seqlen_q, spec.seqlen_kv)
        if spec.group > 1 or band not in (Band(_NO_MASK, None), Band(_TOP_LEFT, None)):
            return None
        causal, scale, queries = band.diagonal == _TOP_LEFT, spec.scale, spec.seqlen_q
        with_lse = spec.return_lse or spec.direction == "training"

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
            found = torch._scaled_dot_product_efficient_attention(
                near(aligned(q)), near(aligned(k)), near(aligned(v)), None, with_lse, 0.0, causal, scale=scale
            )
            return found[0], found[1][..., :queries] if with_lse else None

        return attend


class EfficientBackward(_Efficient, BackwardKernel):
    """``aten::_efficient_attention_backward``."""

    from_lse = True
    errors: Mapping[str, float] = {**DECLARED_GRADIENT_ERROR, "fp32": 2.5e-6}  # dq of one key: 4.8e-6 on an H200
    preference = 30
    evidence: Mapping[str, str] = {"cuda": r"fmha_cutlassB"}

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Those of the forward, and windows aligned bottom-right."""
        reasons = super().further_refusals(spec, device)
        band = causal_band(spec.mask, spec.seqlen_q, spec.seqlen_kv)
        if isinstance(band, Band) and band.diagonal == _BOTTOM_RIGHT and band.width is not None:
            # kernel_backward.h leaves the alignment out where it masks the window's left side
            reasons.append("its window's left side is aligned top-left only")
        return reasons

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The operator, with the log-sum-exp padded as it reads it and the gradients of a group's keys added up."""
        if saved.operands.lengths is not None:
            return derive_each(self, saved, grad_out)
        spec, lse = saved.spec, saved.lse
        assert lse is not None
        q, k, v, band = _inputs(*saved.operands.tensors(), spec)
        padded = F.pad(lse, (0, -spec.seqlen_q % _LSE_BLOCK), value=math.inf).contiguous()
        unused = torch.empty((), dtype=torch.int64)  # the dropout's random state
        dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
            near(aligned(grad_out)).transpose(1, 2), q, k, v, None, saved.out.transpose(1, 2).contiguous(), None, None,
            spec.seqlen_q, spec.seqlen_kv, padded, 0.0, unused, unused, band.diagonal, False,
            scale=spec.scale, window_size=band.width,
        )  # fmt: skip
        if spec.group > 1:
            dk, dv = (x.unflatten(2, (spec.kv_heads, spec.group)).sum(dim=3) for x in (dk, dv))
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


BACKEND = Backend(
    name="sdpa-efficient",
    summary="torch's memory-efficient attention (CUTLASS)",
    availability=cuda_availability,
    kernels=tuple(kernel(precision) for precision in _PRECISIONS for kernel in (EfficientForward, EfficientBackward)),
    sdpa_order=2,  # see ``sdpa/cudnn.py``
)
