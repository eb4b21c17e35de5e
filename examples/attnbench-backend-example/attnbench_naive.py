"""The smallest backend that attnbench can measure and choose: attention by its definition, in plain torch.

Copy this file, replace `_scores` and the two products by your kernel, and declare its limits in
`Capabilities`.  attnbench then measures it beside every other backend, and
`attention(..., backend="naive")` runs it.

Import nothing here that is slow or may be missing: `attnbench backends` imports this file
also on machines without your library.  Import the library in `_availability` and `run`.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
from attnbench.problem.spec import AttentionSpec

__all__ = ["BACKEND"]

# A kernel's name is its backend and the precision that it computes in.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Bound on the relative L2 error of each precision, against exact attention on normal inputs.
# attnbench measures the error and marks the kernel `inaccurate` if it exceeds the bound.
DECLARED_ERROR = {"fp32": 1e-5, "bf16": 1e-2}

LARGEST_SCORES = 2**30


def _row(precision: str) -> Capabilities:
    """Every limit of the kernel that a row can express.  What is not mentioned has no limit."""
    return Capabilities(
        dtypes=("fp32",) if precision == "fp32" else ("bf16",),
        masks=("none", "causal"),  # no sliding window: attnbench refuses it with a reason
        softcap=False,
        empty_rows=False,  # here a softmax over no key is NaN, but attnbench requires 0
    )


def _refuse_large(spec: AttentionSpec) -> list[str]:
    """A limit that a row cannot express: a list of sentences, one for each reason."""
    scores = spec.batch * spec.heads * spec.seqlen_q * spec.seqlen_kv
    return [f"would hold {scores} scores at once, more than {LARGEST_SCORES}"] if scores > LARGEST_SCORES else []


def _scores(q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    """Scaled and masked scores in FP32, (B, Hkv, H // Hkv, Sq, Skv); q and k as `_grouped` returns them."""
    scores = (q @ k.mT).float() * spec.scale
    if spec.mask.kind == "causal":
        # The offset distinguishes the two causal alignments when Sq and Skv differ.
        query = torch.arange(spec.seqlen_q, device=q.device)[:, None] + spec.mask.offset(spec.seqlen_q, spec.seqlen_kv)
        key = torch.arange(spec.seqlen_kv, device=q.device)
        scores = scores.masked_fill(key > query, -torch.inf)
    return scores


def _grouped(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q as (B, Hkv, group, Sq, D), so that k and v (B, Hkv, 1, Skv, D) broadcast over the heads that share them."""
    return _by_group(q, spec), k.unsqueeze(2), v.unsqueeze(2)


def _by_group(x: Tensor, spec: AttentionSpec) -> Tensor:
    """Query head h belongs to key head h // group."""
    return x.reshape(spec.batch, spec.kv_heads, spec.group, *x.shape[2:])


class NaiveForward(ForwardKernel):
    """out = softmax(scale · q kᵀ) v, all scores at once."""

    # None: never chosen unless it was measured as the fastest, or named by the caller.
    preference = None

    def __init__(self, precision: str) -> None:
        self.name = f"naive:{precision}"
        # The same limits on both types of device; a kernel only for GPUs has only the "cuda" row.
        self.rows = {"cpu": _row(precision), "cuda": _row(precision)}
        self.declared_error = DECLARED_ERROR[precision]
        self.dtype = PRECISIONS[precision]

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        return _refuse_large(spec)

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        # Quantise, transpose or pad here: attnbench times it separately from the kernel.  An FP8
        # kernel returns `attnbench.problem.fp8.Quantised` operands, so that the backward receives
        # what the forward computed with.  The tensors arrive as (B, H, S, D), with any strides.
        return Operands(spec, *inputs.unquantised())

    def run(self, operands: Operands) -> Result:
        spec = operands.spec
        q, k, v = _grouped(spec, *(x.to(self.dtype) for x in operands.tensors()))
        scores = _scores(q, k, spec)
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - lse[..., None]).to(self.dtype)
        out = (p @ v).flatten(1, 2)
        # out in the input's dtype, the log-sum-exp in natural logarithm and FP32: (B, H, Sq).
        return Result(out.to(operands.tensors()[0].dtype), lse.flatten(1, 2))


class NaiveBackward(BackwardKernel):
    """dq, dk, dv after any forward: recomputes the probabilities from the scores and the forward's LSE."""

    def __init__(self, precision: str) -> None:
        self.name = f"naive:{precision}"
        self.rows = {"cpu": _row(precision), "cuda": _row(precision)}
        self.declared_error = DECLARED_ERROR[precision]
        self.dtype = PRECISIONS[precision]

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        return _refuse_large(spec)

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert saved.lse is not None  # needs_lse is True, so attnbench pairs it only with forwards that return one
        spec = saved.spec
        originals = saved.operands.tensors()
        q, k, v = _grouped(spec, *(x.to(self.dtype) for x in originals))
        do, out, lse = (_by_group(x, spec) for x in (grad_out, saved.out, saved.lse))
        do = do.to(self.dtype)
        p = torch.exp(_scores(q, k, spec) - lse.float()[..., None])
        dp = (do @ v.mT).float()
        # rowsum(dO ∘ O) = rowsum(P ∘ dP), which the softmax's derivative subtracts (FlashAttention-2, section 2.3.2).
        delta = (do.float() * out.float()).sum(-1, keepdim=True)
        ds = (p * (dp - delta) * spec.scale).to(self.dtype)
        dq = (ds @ k).flatten(1, 2)
        dk = (ds.mT @ q).sum(2)  # every query head of a group adds to its key head
        dv = (p.to(self.dtype).mT @ do).sum(2)
        dq, dk, dv = (grad.to(x.dtype) for grad, x in zip((dq, dk, dv), originals, strict=True))
        return dq, dk, dv


def _availability() -> Availability:
    """Called once per process.  A backend that needs a library imports it here.

    If the library is missing, return `Availability(reason="...", install="pip install ...")`.
    """
    return Availability(version="0.1.0", origin="attnbench-backend-example")


BACKEND = Backend(
    name="naive",
    summary="attention by its definition, an example of a third party's backend",
    availability=_availability,
    kernels=tuple(kernel for precision in PRECISIONS for kernel in (NaiveForward(precision), NaiveBackward(precision))),
)
