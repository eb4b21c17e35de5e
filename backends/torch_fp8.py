"""``torch-fp8``: torch's own quantised attention, FP8 forward on Hopper.

torch 2.11 declares ``aten::_flash_attention_forward.quantized``
(``torch.nn.attention.experimental._scaled_dot_product_attention_quantized``) without a kernel:
``torch.nn.attention._fa3`` calls FlashAttention-3's ``flash_attn_interface``, which must be installed.  Compared with
``fa3`` this measures torch's overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import torch

from attnbench.kernels.capabilities import Capabilities, Device
from attnbench.kernels.contract import Availability, Backend, ForwardKernel, Inputs, Operands, Result, gradient_dtype
from attnbench.problem.spec import AttentionSpec

from .common.declared_errors import SHORT_ACCUMULATOR
from .common.installed import without_cuda
from .flash_attention.fa3 import HOPPER, PROFILED, needs
from .flash_attention.fa3_operands import Native, prepared, refuse_spec
from .flash_attention.fa3_origins import INSTALL, interface

__all__ = ["BACKEND", "TorchFp8Forward"]

_INSTALL_TORCH = "pip install 'torch>=2.11'"
_MODULE = "torch.nn.attention._fa3"
_ENTRY, _LOAD = "_fa3_flash_attention_forward_impl", "_fa3_import_module"
_OMITTED = {"FP8": "was built without FP8", "LOCAL": "was built without windows"}
_ERROR = 0.08  # that of fa3: the same kernel on the same operands


def _availability() -> Availability:
    if missing := without_cuda(origin="torch"):
        return missing
    if not _declared():
        reason = f"torch {torch.__version__} has no quantised attention"
        return Availability(reason=reason, origin="torch", install=_INSTALL_TORCH)
    build = interface()
    if build is None:
        reason = "torch declares it, and its kernel comes with flash_attn_interface, which is not installed"
        return Availability(reason=reason, origin="torch", install=INSTALL)
    return Availability(version=torch.__version__, origin=f"FlashAttention-3 {build.version} ({build.name})")


def _declared() -> bool:
    """Whether this torch has the operator, and the functions of ``torch.nn.attention._fa3`` that are called here."""
    try:
        module = import_module(_MODULE)
    except ImportError:
        return False
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    return hasattr(operator, "quantized") and hasattr(module, _ENTRY) and hasattr(module, _LOAD)


@cache
def _forward() -> Callable[..., Any]:
    """The function that torch registers as ``aten::_flash_attention_forward.quantized``, loaded once.

    Not registered: ``activate_flash_attention_impl("FA3")`` would replace the kernel behind every
    ``scaled_dot_product_attention`` of the process.  Raises ImportError, OSError or RuntimeError if
    ``flash_attn_interface`` does not fit this torch.
    """
    module = import_module(_MODULE)
    getattr(module, _LOAD)("flash_attn_interface")
    entry: Callable[..., Any] = getattr(module, _ENTRY)
    return entry


class TorchFp8Forward(ForwardKernel):
    """``aten::_flash_attention_forward.quantized``."""

    name = "torch-fp8:fp8"
    leaves = "e4m3"
    preference = 15
    declared_error = _ERROR
    error_growth = SHORT_ACCUMULATOR
    rows: Mapping[str, Capabilities] = {
        "cuda": Capabilities(dtypes=("bf16", "fp16", "e4m3"), descales=("tensor", "head"), softcap=False, **HOPPER)
    }
    evidence: Mapping[str, str] = {"cuda": PROFILED["fp8"]}

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Windows that cannot be moved bottom-right, and what the installed build was made without."""
        build = interface()
        missing = needs(spec, "fp8") & build.omissions() if build is not None else set()
        return refuse_spec(spec) + [f"flash_attn_interface {_OMITTED[part]}" for part in sorted(missing)]

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """As ``fa3:fp8`` does."""
        return prepared(inputs, spec, "fp8")

    def run(self, operands: Operands) -> Result:
        """The kernel; out comes as bf16 and is rounded to fp16 where that came in, the log-sum-exp is natural."""
        given: Native = operands.native
        spec, span = operands.spec, given.window
        out, lse, *_ = _forward()(
            given.q, given.k, given.v, None, None, spec.seqlen_q, span.keys, 0.0, span.causal, False,
            *given.descales, scale=spec.scale, window_size_left=span.left, window_size_right=span.right,
        )  # fmt: skip
        return Result(out[..., : spec.head_dim_v].transpose(1, 2).to(gradient_dtype(spec)), lse)


BACKEND = Backend(
    name="torch-fp8",
    summary="torch's own quantised attention (FlashAttention-3 behind it), FP8 forward",
    availability=_availability,
    kernels=(TorchFp8Forward(),),
)
