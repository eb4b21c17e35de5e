"""``sage``: SageAttention, QK in INT8 with K's mean subtracted, PV in FP16 or FP8, forward only.

Zhang et al., "SageAttention" (arXiv 2410.02367) and "SageAttention2" (arXiv 2411.10958).  Two libraries have the name
``sageattention``:

============  ====================  ==========================================  =================
version       kernel here           what it is                                  comes as
============  ====================  ==========================================  =================
1.0.6         ``sage:int8``         Triton; P and V in FP16                     a wheel, no build
2.2 and on    ``sage:int8-fp8``     CUDA for 9.0; P and V in e4m3               source
============  ====================  ==========================================  =================

Their top-level functions quantise and compute in one call; here the parts are called, so that both costs are known and
K is not changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.errors import InputError
from attnbench.graph_pools import recording
from attnbench.kernels.capabilities import Capabilities, Device
from attnbench.kernels.contract import Availability, Backend, ForwardKernel, Inputs, Operands, Result
from attnbench.problem.spec import AttentionSpec

from .common.cuda_limits import cuda_refusals
from .common.installed import has_file, installed, release, without_cuda
from .common.layout import aligned, near, padded, rounded_up
from .sage_operands import BY_THREAD_K, BY_THREAD_Q, Channels, Rows, row_scales

__all__ = ["BACKEND", "SageFp8Forward", "SageInt8Forward"]

_INSTALL = "pip install sageattention==1.0.6"
_BUILD = "pip install --no-build-isolation 'git+https://github.com/thu-ml/SageAttention.git'"
_TRITON, _BUILT = "1.0.6", (2, 2)
_TRITON_SIZES, _BUILT_SIZES = (64, 96, 128), (64, 128)
_INT32 = 2**31 - 1  # both count elements within a tensor in 32 bits
_LOG2_E = 1.44269504  # as the library writes it: its scores are powers of 2
_HND = 1  # the library's number for (B, H, S, D)
_PER_THREAD = 3  # its number for scales shared by the rows that one thread holds
_SHARED: Mapping[str, Any] = {
    "dtypes": ("bf16", "fp16"),
    "head_dims": (1, 128, 1),
    "masks": ("none", "causal"),
    "alignments": (),
    "softcap": False,
}


def _availability() -> Availability:
    if missing := without_cuda(_INSTALL):
        return missing
    version = installed("sageattention", "sageattention")
    if version is None:
        reason = "sageattention is not installed; 1.0.6 brings sage:int8, a build of 2.2 from source sage:int8-fp8"
        return Availability(reason=reason, install=_INSTALL)
    if not (_is_triton(version) or _is_built(version)):
        reason = f"sageattention {version} is neither {_TRITON} nor 2.2 or a later 2.x"
        return Availability(reason=reason, origin="sageattention", install=_INSTALL)
    if _is_built(version) and not has_file("sageattention", "_qattn_sm90*"):
        reason = f"sageattention {version} was built without its kernel for compute capability 9.0"
        return Availability(reason=reason, origin="sageattention", install=_BUILD)
    return Availability(version=version, origin="sageattention")


def _is_triton(version: str) -> bool:
    return version == _TRITON


def _is_built(version: str) -> bool:
    found = release(version)
    return found is not None and _BUILT <= found < (3, 0)


@cache
def _version() -> str | None:
    return installed("sageattention", "sageattention")


@cache
def _function(module: str, name: str) -> Callable[..., Any]:
    """A function of the library, loaded once.  Raises ImportError or AttributeError where it is another one."""
    function: Callable[..., Any] = getattr(import_module(f"sageattention.{module}"), name)
    return function


@cache
def _hopper_kernel() -> Callable[..., Any]:
    """The kernel for compute capability 9.0: the registered operator, or the function of builds that register none.

    Builds from October to December 2025 give the function's name to the stand-in for tracing, which computes nothing
    (thu-ml/SageAttention, pull request 307).
    """
    name = "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf"
    function = _function("sm90_compile", name)  # importing the module registers the operator
    operator: Callable[..., Any] = getattr(torch.ops.sageattention_sm90, name, function)
    return operator


def _size(spec: AttentionSpec, sizes: tuple[int, ...]) -> int:
    """The head dimension that Q, K and V are padded to: the smallest one that the kernel was written for."""
    return next(size for size in sizes if max(spec.head_dim, spec.head_dim_v) <= size)


def _refusals(spec: AttentionSpec, device: Device, sizes: tuple[int, ...]) -> list[str]:
    """What neither kernel can do beyond its row."""
    reasons = cuda_refusals(spec, device)
    rows = spec.batch * max(spec.heads * spec.seqlen_q, spec.kv_heads * rounded_up(spec.seqlen_kv, 128))
    if rows * _size(spec, sizes) > _INT32:
        reasons.append(f"indexes at most {_INT32} elements, the largest tensor has {rows * _size(spec, sizes)}")
    return reasons


class SageInt8Forward(ForwardKernel):
    """``sageattention`` 1.0.6: ``_attn_fwd`` in Triton."""

    name = "sage:int8"
    preference = 40
    declared_error = 0.03
    rows: Mapping[str, Capabilities] = {"cuda": Capabilities(capability=(8, 0), lse=False, **_SHARED)}
    evidence: Mapping[str, str] = {"cuda": r"^_attn_fwd$"}

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Another library of that name, and keys behind the last whole block, which it does not hide."""
        reasons = _refusals(spec, device, _TRITON_SIZES)
        version = _version()
        if version is not None and not _is_triton(version):
            reasons.append(f"is a kernel of sageattention {_TRITON}, and {version} is installed")
        if spec.mask.kind == "none" and spec.seqlen_kv % 64:
            reasons.append(f"counts keys beyond the last in blocks of 64 without a mask, and has {spec.seqlen_kv}")
        return reasons

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """Q and K in INT8, a scale for 128 queries and one for 64 keys; V in fp16, in which P·V is computed."""
        q, k, v = inputs.unquantised()
        size = _size(spec, _TRITON_SIZES)
        q, k, v = (near(padded(x, size), whole=True) for x in (q, k, v))
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        mean = k.mean(dim=2, keepdim=True)
        suffix = "_hd96" if size == 96 else ""
        quantise = _function(f"quant_per_block{suffix}", f"per_block_int8{suffix}")
        with _device(q):
            q8, q_scale, k8, k_scale = quantise(q, k - mean, sm_scale=spec.scale, tensor_layout="HND")
        d = spec.head_dim
        seen = (
            Rows(q8[..., :d], q_scale[..., 0], "block", order=(0,) * 128, folded=spec.scale * _LOG2_E),
            Rows(k8[..., :d], k_scale[..., 0], "block", mean=mean[..., :d], order=(0,) * 64),
            v[..., : spec.head_dim_v],
        )
        # Under a causal mask the last block of 128 queries reads one scale of 64 keys too many: it must be a number.
        scales = q_scale, F.pad(k_scale.flatten(), (0, 1))
        return Operands(spec, *seen, (q8, k8, v.to(torch.float16), *scales))

    def run(self, operands: Operands) -> Result:
        """The kernel; it returns no log-sum-exp."""
        spec = operands.spec
        q8, k8, v, q_scale, k_scale = operands.native
        module = "attn_qk_int8_per_block" + ("_h96" if q8.shape[-1] == 96 else "")
        forward = _function(module + ("_causal" if spec.mask.kind == "causal" else ""), "forward")
        dtype = torch.bfloat16 if spec.dtype == "bf16" else torch.float16
        with _device(q8):
            out = forward(q8, k8, v, q_scale, k_scale, tensor_layout="HND", output_dtype=dtype)
        return Result(out[..., : spec.head_dim_v], None)


class SageFp8Forward(ForwardKernel):
    """``sageattention`` 2.2: ``qk_int8_sv_f8_attn_kernel`` for compute capability 9.0, PV added up in two levels."""

    name = "sage:int8-fp8"
    preference = 35
    declared_error = 0.06
    rows: Mapping[str, Capabilities] = {
        "cuda": Capabilities(capability=(9, 0), capability_below=(10, 0), **_SHARED),
    }
    evidence: Mapping[str, str] = {"cuda": r"qk_int8_sv_f8_attn_kernel"}

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Another library of that name."""
        reasons = _refusals(spec, device, _BUILT_SIZES)
        version = _version()
        if version is not None and not _is_built(version):
            reasons.append(f"is a kernel of sageattention 2.2, and {version} is installed")
        if spec.scale <= 0:  # the row's maximum is taken before the scale is applied (update_mdo in attn_utils.cuh)
            reasons.append(f"needs a positive scale, not {spec.scale}")
        return reasons

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """Q and K in INT8, a scale for the rows of each thread; V transposed in e4m3; K's mean's part of the
        log-sum-exp.
        """
        q, k, v = inputs.unquantised()
        size = _size(spec, _BUILT_SIZES)
        q, k, v = (near(aligned(padded(x, size)), whole=True) for x in (q, k, v))
        mean = k.mean(dim=2, keepdim=True)
        with _device(q):
            q8, q_scale, k8, k_scale = _function("triton.quant_per_thread", "per_thread_int8")(
                q, k, mean, BLKQ=64, WARPQ=16, BLKK=128, WARPK=128, tensor_layout="HND"
            )
            v = F.pad(v, (0, 0, 0, rounded_up(spec.seqlen_kv, 128) - spec.seqlen_kv))
            with _default_stream(v):
                v8, v_scale, _ = _function("quant", "per_channel_fp8")(v, tensor_layout="HND", smooth_v=False)
            # A channel of zeros comes out as 0 · inf with the scale 0; it stands for zeros.
            v8.view(torch.uint8).masked_fill_((v_scale == 0).unsqueeze(-1), 0)
        grouped = q8.reshape(spec.batch, spec.kv_heads, -1, size)  # (B, Hkv, group · Sq, D)
        taken = (grouped.float() @ mean.float().mT).reshape(spec.batch, spec.heads, spec.seqlen_q)
        shift = taken * row_scales(q_scale, BY_THREAD_Q, spec.seqlen_q)[..., 0] * spec.scale
        d = spec.head_dim
        seen = (
            Rows(q8[..., :d], q_scale, "token", order=BY_THREAD_Q),
            Rows(k8[..., :d], k_scale, "token", mean=mean[..., :d], order=BY_THREAD_K),
            Channels(v8, v_scale, "head", shape=(spec.seqlen_kv, spec.head_dim_v)),
        )
        return Operands(spec, *seen, (q8, k8, v8, q_scale, k_scale, v_scale, shift))

    def run(self, operands: Operands) -> Result:
        """The kernel; its log-sum-exp is a power of 2 and that of K without its mean."""
        spec = operands.spec
        q8, k8, v8, q_scale, k_scale, v_scale, shift = operands.native
        out = torch.empty(q8.shape, dtype=torch.bfloat16 if spec.dtype == "bf16" else torch.float16, device=q8.device)
        with _device(q8), _default_stream(q8):
            lse = _hopper_kernel()(
                q8, k8, v8, out, q_scale, k_scale, v_scale,
                _HND, int(spec.mask.kind == "causal"), _PER_THREAD, spec.scale, 1,
            )  # fmt: skip
        return Result(out[..., : spec.head_dim_v], lse / _LOG2_E + shift)


def _device(x: Tensor) -> AbstractContextManager[object]:
    """Both libraries launch on the current device, whatever their tensors are on."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


@contextmanager
def _default_stream(x: Tensor) -> Iterator[None]:
    """Orders the current stream around kernels on the default one.  Raises InputError in a graph capture."""
    if recording():
        raise InputError("sageattention 2.2 launches on the default stream, which a CUDA graph cannot record")
    if x.device.type != "cuda" or torch.cuda.current_stream(x.device) == torch.cuda.default_stream(x.device):
        yield
        return
    current, default = torch.cuda.current_stream(x.device), torch.cuda.default_stream(x.device)
    default.wait_stream(current)
    try:
        yield
    finally:
        current.wait_stream(default)


BACKEND = Backend(
    name="sage",
    summary="SageAttention: INT8 QK, FP16 or FP8 PV, forward",
    availability=_availability,
    kernels=(SageInt8Forward(), SageFp8Forward()),
    built_on=("triton",),
)
