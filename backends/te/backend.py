"""TransformerEngine's fused attention: 16 bits and FP8 with delayed scaling, both passes, on Hopper."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.kernels.contract import Availability, Backend, Inputs, Operands, Result, Saved, gradient_dtype
from attnbench.problem.fp8 import LARGEST, Quantised
from attnbench.problem.spec import AttentionSpec

from ..common.cudnn_attention import (
    BACKWARD_SIZE,
    PEAK,
    PRECISIONS,
    CudnnBackward,
    CudnnForward,
    CudnnFp8Backward,
    CudnnFp8Forward,
    cudnn_version,
    scalar,
    too_old,
)
from ..common.installed import release, versions_of
from ..common.layout import tokens
from ..common.unpadding import unpads_forward
from . import library as te_library
from .history import Histories
from .library import Narrow, bshd, delayed, seqlens_of, widened

__all__ = ["BACKEND"]

_DISTRIBUTIONS = ("transformer-engine", "transformer-engine-torch")
_INSTALL = "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.20'"
_LEAST = (2, 20)  # the first whose two calls take the arguments that te_library gives them
_FP8_MASKS = ("none", "causal")

_gradients = Histories(roles=2)  # of what cuDNN calls dP (our dS), and of dQ, dK and dV, which share a scale


def _availability() -> Availability:
    """From the metadata alone: importing TransformerEngine loads CUDA libraries."""
    versions = versions_of(_INSTALL, *_DISTRIBUTIONS)
    if isinstance(versions, Availability):
        return versions
    found = release(versions[0])
    if found is None or found < _LEAST:
        least = ".".join(map(str, _LEAST))
        return Availability(reason=f"needs {_DISTRIBUTIONS[0]} {least} or newer, found {versions[0]}", install=_INSTALL)
    if found != release(versions[1]):
        differ = f"{_DISTRIBUTIONS[0]} {versions[0]} and {_DISTRIBUTIONS[1]} {versions[1]} do not belong together"
        return Availability(reason=differ, install=_INSTALL)
    if reason := too_old():
        return Availability(reason=reason)
    return Availability(version=versions[0], origin=f"{_DISTRIBUTIONS[0]} {versions[0]} on cuDNN {cudnn_version()}")


@unpads_forward()
class TeForward(CudnnForward):
    """``fused_attn_fwd`` on 16-bit tensors."""

    backend = "te"
    left_open = False  # nvte_get_fused_attn_backend for cuDNN 9.7 and newer
    packs = True
    widest_packed = 128  # an LSE of wider heads was wrong on an H200

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """Dense (B, S, H, D) tensors; the operands are views of them."""
        q, k, v = inputs.unquantised()
        if inputs.lengths is not None:
            q, k, v = (tokens(x).transpose(0, 1)[None] for x in (q, k, v))
            return Operands(spec, q, k, v, inputs.lengths.starts, inputs.lengths)
        q, k, v = (bshd(x).transpose(1, 2) for x in (q, k, v))
        return Operands(spec, q, k, v, seqlens_of(spec, q.device))

    def run(self, operands: Operands) -> Result:
        """The kernel; its statistics are the natural log-sum-exp."""
        packed = operands.lengths is not None
        q, k, v = (x[0].transpose(0, 1) if packed else x.transpose(1, 2) for x in operands.tensors())
        out, lse = te_library.forward(operands.spec, q, k, v, operands.native, {})
        return Result(out.transpose(0, 1)[None] if packed else out.transpose(1, 2), lse)


class TeBackward(CudnnBackward):
    """``fused_attn_bwd`` in 16 bits, after any forward that returns out and its log-sum-exp."""

    backend = "te"
    left_open = False
    preference = 12

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """On the Q, K, V that the forward computed with."""
        spec, lse = saved.spec, saved.lse
        assert lse is not None
        q, k, v, out, grad = (bshd(x) for x in (*saved.operands.tensors(), saved.out, grad_out))
        seqlens = seqlens_of(spec, grad_out.device)
        dq, dk, dv = te_library.backward(spec, q, k, v, out, grad, lse, seqlens, {})
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class _Native(NamedTuple):
    """What the FP8 forward reads besides Q, K, V: scales of P and O (1,), and where their maxima go, (2,), all fp32."""

    seqlens: tuple[Tensor, Tensor]
    scale_s: Tensor
    scale_o: Tensor
    amax: Tensor


class _State(NamedTuple):
    """The forward's output as the kernel rounded it, and what else both kernels are given."""

    out: Narrow
    scale_s: Tensor
    seqlens: tuple[Tensor, Tensor]


class TeFp8Forward(CudnnFp8Forward):
    """``fused_attn_fwd`` in e4m3 as under ``DelayedScaling(fp8_dpa=True)``, but with V's scale for O."""

    backend = "te"
    masks = _FP8_MASKS

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """e4m3 by TransformerEngine's cast, each tensor on its own largest magnitude, or as the caller quantised it."""
        given = inputs.quantised()
        if given is None:
            q, k, v = (Narrow.quantised(bshd(x)) for x in inputs.unquantised())
        else:
            q, k, v = (Narrow(bshd(x.data), scalar(x.descale, 1)) for x in given)
        return _prepared(spec, q, k, v)

    def run(self, operands: Operands) -> Result:
        """The kernel, and its output in the dtype that was asked for, by TransformerEngine's own cast."""
        spec, native = operands.spec, operands.native
        dtype = gradient_dtype(spec)
        q, k, v = (x.storage(dtype) for x in _narrow(operands))
        quantizers = {
            "s_quantizer": delayed(native.scale_s, native.amax[:1]),
            "o_quantizer": delayed(native.scale_o, native.amax[1:]),
        }
        out, lse = te_library.forward(spec, q, k, v, native.seqlens, quantizers)
        state = _State(Narrow.of(out), native.scale_s, native.seqlens) if spec.training else None
        return Result(widened(out, dtype), lse, state)


class TeFp8Backward(CudnnFp8Backward):
    """``fused_attn_bwd`` on the operands and the rounded output of ``te:fp8``; dO and the gradients are e5m2.

    The kernel rounds dS, dQ, dK and dV itself, on scales from earlier steps: see ``te/history.py``.
    """

    backend = "te"
    masks = _FP8_MASKS
    # 0.106 was measured on an H200, causal.  Few or equal keys need more: there dO·V all but cancels against
    # dO·O, and O has three bits behind the point.
    declared_error = 0.2

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first call of a spec runs the kernel twice, because it has no history yet."""
        spec, state, lse = saved.spec, saved.state, saved.lse
        assert lse is not None
        dtype = gradient_dtype(spec)
        grad = Narrow.quantised(bshd(grad_out), e5m2=True)
        narrow = _narrow(saved.operands)
        amax_q, amax_k, amax_v = (x.descale * LARGEST["e4m3"] for x in narrow)
        bounds = _bounds(spec, amax_q, amax_k, amax_v, grad.descale * LARGEST["e5m2"])
        q, k, v, out, do = (x.padded(BACKWARD_SIZE).storage(dtype) for x in (*narrow, state.out, grad))
        history = _gradients.of(spec, grad_out.device)
        for _ in range(2 if history.cold else 1):
            scales, amax = history.scales(bounds, LARGEST["e5m2"]), torch.zeros_like(bounds)
            quantizers = {
                "s_quantizer": delayed(state.scale_s, torch.zeros_like(state.scale_s)),
                "dp_quantizer": delayed(scales[:1], amax[:1], e5m2=True),
                "dqkv_quantizer": delayed(scales[1:], amax[1:], e5m2=True),
            }
            gradients = te_library.backward(spec, q, k, v, out, do, lse, state.seqlens, quantizers)
            history.note(amax, bounds)
        dq, dk, dv = (widened(x, dtype) for x in gradients)
        return dq[..., : spec.head_dim], dk[..., : spec.head_dim], dv[..., : spec.head_dim_v]


def _prepared(spec: AttentionSpec, q: Narrow, k: Narrow, v: Narrow) -> Operands:
    device = q.data.device
    native = _Native(
        seqlens_of(spec, device),
        torch.full((1,), PEAK, dtype=torch.float32, device=device),
        v.descale.reciprocal(),
        torch.zeros(2, dtype=torch.float32, device=device),
    )
    return Operands(spec, _logical(q), _logical(k), _logical(v), native)


def _logical(x: Narrow) -> Quantised:
    return Quantised(x.data.transpose(1, 2), x.descale.view(1, 1, 1, 1), "tensor")


def _narrow(operands: Operands) -> list[Narrow]:
    narrow = []
    for x in (operands.q, operands.k, operands.v):
        assert isinstance(x, Quantised)
        narrow.append(Narrow(x.data.transpose(1, 2), x.descale.view(1)))
    return narrow


def _bounds(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Tensor:
    """Magnitudes (2,) that dS and the gradients cannot exceed, from the largest ones of Q, K, V and dO, each (1,).

    With r = Dv · max|dO| · max|V|, both dOᵢ·Vⱼ and dOᵢ·Oᵢ are at most r, so |dSᵢⱼ| = Pᵢⱼ |dPᵢⱼ − Dᵢ| ≤ r / 2, because a
    row of P sums to one; a scale above 1 counts too, since cuDNN may apply it after rounding.  Over the n queries of a
    key, |dV| ≤ n · max|dO| and |dK| ≤ n · scale · (r / 2) · max|Q|; |dQ| ≤ scale · 2r · max|K|.
    """
    queries, scale = spec.seqlen_q * spec.group, abs(spec.scale)
    reach = v * spec.head_dim_v
    ds = reach * (0.5 * max(1.0, scale))
    gradients = (reach * torch.maximum(q, k) * (scale * max(2.0, 0.5 * queries))).clamp_min(queries)
    return torch.cat([ds, gradients]) * grad


BACKEND = Backend(
    name="te",
    summary="TransformerEngine's fused attention: 16 bits and FP8 with delayed scaling, both passes",
    availability=_availability,
    kernels=(
        *(kernel(precision) for precision in PRECISIONS for kernel in (TeForward, TeBackward)),
        TeFp8Forward(),
        TeFp8Backward(),
    ),
    built_on=("cudnn",),
)
