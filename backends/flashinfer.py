"""``flashinfer``: FlashInfer's FP8 prefill on Hopper, made from FlashAttention-3's template; forward only.

Ye et al., "FlashInfer" (arXiv 2501.01005); ``flashinfer.single_prefill_with_kv_cache`` of 0.7, whose kernel is compiled
at the first call (``include/flashinfer/attention/hopper/quantization/``).  The batch is folded into the heads, because
a request is one sequence.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnbench.errors import InputError
from attnbench.graph_pools import permanent
from attnbench.kernels.capabilities import Capabilities, Device
from attnbench.kernels.contract import Availability, Backend, ForwardKernel, Inputs, Operands, Result, gradient_dtype
from attnbench.problem.fp8 import Quantised, Recipe, quantise
from attnbench.problem.spec import AttentionSpec

from .common.declared_errors import SHORT_ACCUMULATOR
from .common.installed import has_file, installed, release, without_cuda
from .common.layout import padded
from .common.windows import bottom_right
from .flash_attention.fa3 import HOPPER
from .flash_attention.fa3_operands import check_plain

__all__ = ["BACKEND", "FlashInferForward"]

_INSTALL = "pip install 'flashinfer-python>=0.7,<1'"
_KNOWN = (0, 7)  # before, hidden keys got the score -5e4, and products of FP8 numbers are larger than that
_SIZES = (64, 128, 256)  # the static_assert of SingleFP8PrefillWithKVCacheDispatched
_MAX_GRID = 65535  # CUDA's limit for the grid dimension that the heads are spread over
_RECIPE = Recipe("head", "e4m3")


class _Native(NamedTuple):
    """q (Sq, B·H, D), k and v (keys, B·Hkv, D) in e4m3, and a scale in fp32 for each of those heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: tuple[Tensor, Tensor, Tensor]
    causal: bool


def _availability() -> Availability:
    if missing := without_cuda(_INSTALL):
        return missing
    version = installed("flashinfer", "flashinfer-python")
    if version is None:
        return Availability(reason="flashinfer is not installed", install=_INSTALL)
    found = release(version)
    if found is None or not _KNOWN <= found < (1, 0):
        reason = f"flashinfer {version} is not 0.7 or a later 0.x: older ones do not hide keys from FP8 queries"
        return Availability(reason=reason, origin="flashinfer-python", install=_INSTALL)
    if not _compiled() and not _compiler():
        reason = f"flashinfer {version} compiles its kernels, and there is no nvcc on the PATH or in CUDA_HOME"
        return Availability(reason=reason, origin="flashinfer-python", install="install the CUDA toolkit")
    return Availability(version=version, origin="flashinfer-python")


def _compiled() -> bool:
    """Whether kernels compiled beforehand are there, in a package of their own or in this one."""
    return find_spec("flashinfer_jit_cache") is not None or has_file("flashinfer", "data/aot")


def _compiler() -> bool:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return shutil.which("nvcc") is not None or any(Path(home, "bin", "nvcc").is_file() for home in homes)


@cache
def _prefill() -> Callable[..., Any]:
    """The library's function, loaded once.  Raises ImportError where something that it needs is missing."""
    function: Callable[..., Any] = import_module("flashinfer.prefill").single_prefill_with_kv_cache
    return function


@permanent
def _buffer(device: torch.device) -> None:
    """Has the library make the memory that it keeps for a device (``_get_cache_buf`` in flashinfer/utils.py)."""
    x = torch.zeros(1, 1, _SIZES[0], dtype=torch.float8_e4m3fn, device=device)
    one = torch.ones(1, dtype=torch.float32, device=device)
    _prefill()(
        x, x, x, one, one, one, o_dtype=torch.bfloat16, kv_layout="NHD", sm_scale=1.0, backend="fa3",
        return_lse=True,
    )  # fmt: skip


class FlashInferForward(ForwardKernel):
    """``FP8PrefillWithKVCacheKernel``."""

    name = "flashinfer:fp8"
    leaves = "e4m3"
    preference = 32
    declared_error = 0.08  # that of fa3: the same products, sums and roundings
    error_growth = SHORT_ACCUMULATOR
    rows: Mapping[str, Capabilities] = {
        "cuda": Capabilities(
            dtypes=("bf16", "fp16", "e4m3"),
            descales=("tensor", "head"),
            masks=("none", "causal"),
            softcap=False,
            **HOPPER,
        )
    }
    evidence: Mapping[str, str] = {"cuda": r"FP8PrefillWithKVCacheKernel"}

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Causal masks that are a window bottom-right, scales that are not positive, too many heads for a grid."""
        reasons = []
        found = bottom_right(spec.mask, spec.seqlen_q, spec.seqlen_kv)
        if isinstance(found, str) or found.right > 0:
            reasons.append(f"has no top-left alignment for {spec.seqlen_q} queries on {spec.seqlen_kv} keys")
        if spec.scale <= 0:  # the row's maximum is taken before the scale is applied (attention_updater.cuh)
            reasons.append(f"needs a positive scale, not {spec.scale}")
        if spec.batch * spec.heads > _MAX_GRID:
            reasons.append(f"takes at most {_MAX_GRID} heads of all batches, this has {spec.batch * spec.heads}")
        return reasons

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """e4m3 with a scale for each (batch, head), the batch folded into the heads.  Raises InputError if not plain
        e4m3.
        """
        q, k, v = inputs.quantised() or (quantise(x, _RECIPE) for x in inputs.unquantised())
        found = bottom_right(spec.mask, spec.seqlen_q, spec.seqlen_kv)
        if isinstance(found, str):
            raise InputError(found)
        check_plain("FlashInfer", q, k, v)
        size = next(size for size in _SIZES if max(spec.head_dim, spec.head_dim_v) <= size)
        cut = (q.data, k.data[:, :, : found.keys], v.data[:, :, : found.keys])
        q_, k_, v_ = (_folded(padded(x, size)) for x in cut)
        scales = (_by_head(q, spec.heads, spec), _by_head(k, spec.kv_heads, spec), _by_head(v, spec.kv_heads, spec))
        return Operands(spec, q, k, v, _Native(q_, k_, v_, scales, found.causal))

    def run(self, operands: Operands) -> Result:
        """The kernel; its log-sum-exp is to the base 2, and out comes as bf16 for inputs of either type."""
        given: _Native = operands.native
        spec = operands.spec
        _buffer(given.q.device)
        out, lse = _prefill()(
            given.q, given.k, given.v, *given.scales, o_dtype=torch.bfloat16, causal=given.causal, kv_layout="NHD",
            sm_scale=spec.scale, backend="fa3", return_lse=True,
        )  # fmt: skip
        out = out[..., : spec.head_dim_v].unflatten(1, (spec.batch, spec.heads)).permute(1, 2, 0, 3)
        lse = (lse * math.log(2)).unflatten(1, (spec.batch, spec.heads)).permute(1, 2, 0)
        return Result(out.to(gradient_dtype(spec)), lse)


def _folded(x: Tensor) -> Tensor:
    """x (B, H, S, D) as (S, B·H, D) that TMA can load: a view if the strides allow it, else a copy.

    Rows must be contiguous, other strides and the address multiples of 16 bytes (cuTensorMapEncodeTiled).
    """
    uniform = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    loads = x.stride(-1) == 1 and all(stride > 0 and stride % 16 == 0 for stride in x.stride()[:-1])
    if not uniform or not loads or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def _by_head(x: Quantised, heads: int, spec: AttentionSpec) -> Tensor:
    """Its descales, one for each of the folded heads."""
    return x.descale.to(torch.float32).reshape(-1, 1 if x.granularity == "tensor" else heads).expand(
        spec.batch, heads
    ).flatten().contiguous()  # fmt: skip


BACKEND = Backend(
    name="flashinfer",
    summary="FlashInfer's FP8 prefill on Hopper (FlashAttention-3's template)",
    availability=_availability,
    kernels=(FlashInferForward(),),
    compiles=True,
)
