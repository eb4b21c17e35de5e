"""FlashAttention-4 (``flash_attn.cute``): 16 bits in both passes on Hopper, FP8 forward on Blackwell alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from platformdirs import user_cache_path
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
    Whole,
)
from attnbench.kernels.devices import bind
from attnbench.problem.lengths import Lengths
from attnbench.problem.lengths_kind import BATCHES
from attnbench.problem.spec import AttentionSpec

from ..common.declared_errors import DECLARED_GRADIENT_ERROR
from ..common.installed import versions_of
from ..common.layout import aligned, padded, rounded_up, whole_gradients
from ..common.typed_kernel import TypedKernel
from ..common.unpadding import unpads_backward, unpads_forward
from ..common.windows import Window, window_of
from .fa3_operands import quantise_by_key_head

__all__ = ["BACKEND"]

_PRECISIONS = ("bf16", "fp16")
_DISTRIBUTIONS = ("flash-attn-4", "nvidia-cutlass-dsl")
_INSTALL = "pip install --pre flash-attn-4"
_HOPPER = (9, 0)
# Of the head dimensions, seen with 4.0.0b36 on an H200: the forward does not compile at 40 with 24, the backward is
# right at 64, 96, 128, 192 and 256, and its dQ wrong at 80.
_FORWARD_STEP, _BACKWARD_STEP = 16, 32
# Those of Q and V that may differ; D = 16 with Dv = 128 read memory that was not its own.
_UNEQUAL = (192, 128)
_INT32 = 2**31 - 1  # the kernels address elements within a tensor in 32 bits
_EVIDENCE_FORWARD = r"FlashAttentionForward"
_EVIDENCE_BACKWARD = r"FlashAttentionBackwardSm"


class _Library(NamedTuple):
    forward: Callable[..., Any]
    backward: Callable[..., Any]


@cache
def _library() -> _Library:
    """The two passes below the autograd function; compiled kernels are cached on the disk.

    The library reads both variables on import.  Its default folder is shared by all users, and its content is loaded as
    code.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(user_cache_path("attnbench") / "fa4"))
    from flash_attn.cute import interface

    return _Library(interface._flash_attn_fwd, interface._flash_attn_bwd)


def _availability() -> Availability:
    """From the metadata alone: importing the library loads the CUTLASS compiler."""
    versions = versions_of(_INSTALL, *_DISTRIBUTIONS)
    if isinstance(versions, Availability):
        return versions
    origin = " with ".join(f"{name} {number}" for name, number in zip(_DISTRIBUTIONS, versions, strict=True))
    return Availability(version=versions[0], origin=origin)


class _Fa4(TypedKernel):
    backend = "fa4"

    def rows_of(self, precision: str) -> dict[str, Capabilities]:
        # interface.py, _validate_head_dims: 16-byte rows of 8 to 256 elements on compute capability 9.x
        sizes: dict[str, Any] = {"head_dims": (8, 256, 8), "max_elements": _INT32}
        # The last tile of a sequence reads the next one's V and multiplies it by 0, which leaves NaN (4.0.0b36, H200).
        packs: dict[str, Any] = {"lengths": BATCHES, "isolates": False}
        return {"cuda": Capabilities(dtypes=(precision,), capability=_HOPPER, **packs, **sizes)}

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        reasons = []
        if device.capability[0] != _HOPPER[0]:
            reasons.append(f"is known here on compute capability 9.x only, {device.name} has another")
        return reasons + _common_refusals(spec)


def _common_refusals(spec: AttentionSpec) -> list[str]:
    window = window_of(spec)
    reasons = [window] if isinstance(window, str) else []
    if spec.scale <= 0:
        reasons.append("takes the largest score of a row before it scales, so the scale must be positive")
    return reasons


@unpads_forward()
class Fa4Forward(_Fa4, ForwardKernel):
    """``flash_attn.cute.interface._flash_attn_fwd`` on 16-bit tensors."""

    evidence: Mapping[str, str] = {"cuda": _EVIDENCE_FORWARD}

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """Views (B, S, H, D), or (T, H, D) of a packed batch, where strides and head dimensions allow it."""
        q, k, v = inputs.unquantised()
        return Operands(spec, q, k, v, _native(q, k, v, spec, _FORWARD_STEP), inputs.lengths)

    def run(self, operands: Operands) -> Result:
        """The first call of a shape class (dtype, head dimensions, group, kind of mask, softcap) compiles."""
        return _forward(operands.spec, *operands.native, **_starts(operands.lengths))

    def whole(self, spec: AttentionSpec, device_type: str) -> Whole | None:
        """The library's function without gradients, where nothing is padded or cut off."""
        window, *dimensions = _shared(spec, _FORWARD_STEP)
        if spec.training or dimensions != [spec.head_dim, spec.head_dim_v] or window.keys < spec.seqlen_kv:
            return None
        forward = partial(
            _library().forward, softmax_scale=spec.scale, softcap=spec.softcap, **_sides(window), return_lse=True
        )

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            bind(q.device)
            out, lse, *_ = forward(_bshd(q), _bshd(k), _bshd(v))
            return out.transpose(1, 2), lse

        return attend


class Fa4Fp8Forward(ForwardKernel):
    """The same on e4m3 tensors, forward only: ``_flash_attn_fwd`` asserts compute capability 10.x (Blackwell)."""

    name = "fa4:fp8"
    declared_error = 0.07
    evidence: Mapping[str, str] = {"cuda": _EVIDENCE_FORWARD}
    rows: Mapping[str, Capabilities] = {
        "cuda": Capabilities(
            dtypes=("bf16", "fp16"),
            capability=(10, 0),
            capability_below=(11, 0),
            head_dims=(16, 128, 16),
            max_elements=_INT32,
        )
    }

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Windows that it cannot express, scales that are not positive."""
        return _common_refusals(spec)

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """e4m3 and descales (B, Hkv), those of Q too: the query heads of a group share one."""
        q_, k_, v_ = (x.detach() for x in inputs.unquantised())
        q, k, v = quantise_by_key_head(q_, k_, v_, spec)
        scales = (q.descale[:, :: spec.group], k.descale, v.descale)
        descales = (x.reshape(spec.batch, spec.kv_heads).contiguous() for x in scales)
        return Operands(spec, q, k, v, (*_native(q.data, k.data, v.data, spec, _FORWARD_STEP), *descales))

    def run(self, operands: Operands) -> Result:
        """Out in bf16 from the kernel, in the input's dtype from here."""
        result = _forward(operands.spec, *operands.native)
        dtype = torch.float16 if operands.spec.dtype == "fp16" else torch.bfloat16
        return Result(result.out.to(dtype), result.lse)


@unpads_backward()
class Fa4Backward(_Fa4, BackwardKernel):
    """``flash_attn.cute.interface._flash_attn_bwd``, after any forward that returns out and its log-sum-exp."""

    from_lse = True
    errors = DECLARED_GRADIENT_ERROR
    preference = 5
    evidence: Mapping[str, str] = {"cuda": _EVIDENCE_BACKWARD}

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """On the Q, K, V that the forward computed with; rows without a key are known by their log-sum-exp."""
        spec, lse = saved.spec, saved.lse
        assert lse is not None
        q, k, v = saved.operands.tensors()
        q, k, v, window = _native(q, k, v, spec, _BACKWARD_STEP)
        out, grad_out = (_bshd(padded(x.detach(), v.shape[-1])) for x in (saved.out, grad_out))
        lse = lse.to(torch.float32).contiguous()
        if spec.lengths is not None:
            out, grad_out, lse = out[0], grad_out[0], lse[0]
        dq, dk, dv, *_ = _library().backward(
            q, k, v, out, grad_out, lse, softmax_scale=spec.scale, softcap=spec.softcap, **_sides(window),
            **_starts(saved.operands.lengths),
        )  # fmt: skip
        return whole_gradients((dq, dk, dv), spec)


def _dimensions(spec: AttentionSpec, step: int) -> tuple[int, int]:
    """The head dimensions that q, k and v are padded to: multiples of ``step``, and equal but for the known pair."""
    d, dv = rounded_up(spec.head_dim, step), rounded_up(spec.head_dim_v, step)
    return (d, dv) if (d, dv) == _UNEQUAL else (max(d, dv), max(d, dv))


def _bshd(x: Tensor) -> Tensor:
    # A stride of 0, as in the gradient of a sum, is another kernel to compile; a copy is cheaper.
    return aligned(x.contiguous() if 0 in x.stride() else x).detach().transpose(1, 2)


def _sides(window: Window) -> dict[str, Any]:
    """As FlashAttention-4 takes it: None for an unlimited side, and no side beside the causal mask."""
    left, right = (None if window.causal or side < 0 else side for side in (window.left, window.right))
    return {"causal": window.causal, "window_size_left": left, "window_size_right": right}


def _native(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, step: int) -> tuple[Tensor, Tensor, Tensor, Window]:
    """(B, S, H, D), or (T, H, D), and the window: views where strides and head dimensions allow it."""
    window, d, dv = _shared(spec, step)
    if d != spec.head_dim or dv != spec.head_dim_v:
        q, k, v = padded(q, d), padded(k, d), padded(v, dv)
    q, k, v = _bshd(q), _bshd(k), _bshd(v)
    if spec.lengths is not None:
        return q[0], k[0], v[0], window
    if window.keys < spec.seqlen_kv:
        k, v = k[:, : window.keys], v[:, : window.keys]
    return q, k, v, window


@lru_cache(maxsize=1024)
def _shared(spec: AttentionSpec, step: int) -> tuple[Window, int, int]:
    """What calls share: the window and the head dimensions of Q and K, and of V."""
    window = window_of(spec)
    if isinstance(window, str):
        raise ValueError(window)
    return window, *_dimensions(spec, step)


def _starts(lengths: Lengths | None) -> dict[str, Any]:
    """The arguments that say where sequences start."""
    if lengths is None:
        return {}
    queries, keys = lengths.starts
    return {
        "cu_seqlens_q": queries, "cu_seqlens_k": keys,
        "max_seqlen_q": lengths.longest_q, "max_seqlen_k": lengths.longest_kv,
    }  # fmt: skip


def _forward(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **starts: Any,
) -> Result:
    out, lse, *_ = _library().forward(
        q, k, v, softmax_scale=spec.scale, softcap=spec.softcap, **_sides(window), return_lse=True,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, **starts,
    )  # fmt: skip
    if starts:
        out, lse = out[None], lse[None]
    if out.shape[-1] > spec.head_dim_v:
        out = out[..., : spec.head_dim_v]
    return Result(out.transpose(1, 2), lse)


BACKEND = Backend(
    name="fa4",
    summary="FlashAttention-4 in the CuTe DSL: 16 bits on Hopper, FP8 on Blackwell",
    availability=_availability,
    kernels=(*(kernel(precision) for precision in _PRECISIONS for kernel in (Fa4Forward, Fa4Backward)),
             Fa4Fp8Forward()),
    compiles=True,
)  # fmt: skip
