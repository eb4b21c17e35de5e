"""cuDNN's attention on Hopper: what it serves and gets wrong, as seen on an H200 with cuDNN 9.19."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnbench.kernels.capabilities import Capabilities, Device
from attnbench.kernels.contract import BackwardKernel, ForwardKernel
from attnbench.problem.lengths_kind import BATCHES
from attnbench.problem.spec import AttentionSpec

from .declared_errors import DECLARED_ERROR, DECLARED_GRADIENT_ERROR, FIXED_SCALE, SHORT_ACCUMULATOR

__all__ = [
    "BACKWARD_EVIDENCE",
    "BACKWARD_SIZE",
    "FORWARD_EVIDENCE",
    "LEAST",
    "PEAK",
    "PRECISIONS",
    "CudnnBackward",
    "CudnnForward",
    "CudnnFp8Backward",
    "CudnnFp8Forward",
    "cudnn_version",
    "scalar",
    "too_old",
]

PRECISIONS = ("bf16", "fp16")
LEAST = 91501  # cuDNN 9.15.1, the first that is right on lengths that are no multiple of 128 (pytorch#169849)
# sdpa_fp8_bwd.h, "hidden_dim shoud be equal to 128" below compute capability 10.0; so nvte_get_fused_attn_backend
BACKWARD_SIZE = 128
PEAK = 256.0  # P is at most 1; a power of two, so that scaling by it is exact
FORWARD_EVIDENCE = r"cudnn\w*sdpa(?!\w*bprop)"
BACKWARD_EVIDENCE = r"cudnn\w*sdpa\w*bprop"
_HOPPER = (9, 0)
_INT32 = 2**31 - 1
_UNLIMITED = 2**31  # the 16-bit forward was right on an H200 at every head dimension tried, up to 32768
_GROUP = 16  # queries
# The last tile of a sequence reads the tokens of the next one; whether NaN stays there was not seen.
_PACKS: dict[str, Any] = {"lengths": BATCHES, "isolates": False}


def cudnn_version() -> int | None:
    """The cuDNN that torch has loaded, 91900 for 9.19.0; None where it finds none."""
    found: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return found


def too_old() -> str | None:
    """Why the cuDNN that torch has loaded cannot be used, or None."""
    found = cudnn_version()
    return f"needs cuDNN {LEAST} or newer, torch finds {found}" if found is None or found < LEAST else None


def scalar(descale: Tensor, *shape: int) -> Tensor:
    """A descale of a whole tensor in fp32, dense in this shape of one element."""
    return descale.detach().to(torch.float32).reshape(shape).contiguous()


class CudnnForward(ForwardKernel):
    """A 16-bit forward of ``backend``.

    ``left_open``: windows without a left side may have more queries than keys.  ``packs``: packed batches are served,
    of sequences with as many keys as queries, of heads up to ``widest_packed``, where `attnbench check` has shown it on
    a GPU.
    """

    backend: str
    left_open: bool = True
    packs: bool = False
    widest_packed: int = 256
    evidence: Mapping[str, str] = {"cuda": FORWARD_EVIDENCE}

    def __init__(self, precision: str) -> None:
        self.name = f"{self.backend}:{precision}"
        self.rows = _row((precision,), (8, _UNLIMITED, 8), **_PACKS if self.packs else {})
        self.declared_error = DECLARED_ERROR[precision]

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Other GPU generations, scales that are not positive, masks that need more keys, wide packed heads."""
        reasons = _refusals(spec, device, self.left_open)
        if spec.lengths is not None and max(spec.head_dim, spec.head_dim_v) > self.widest_packed:
            reasons.append(f"is known on packed batches for head dimensions up to {self.widest_packed} only")
        return reasons


class CudnnBackward(BackwardKernel):
    """A backward in 16 bits, after any forward that returns out and its log-sum-exp."""

    from_lse = True
    backend: str
    left_open: bool = True
    packs: bool = False
    evidence: Mapping[str, str] = {"cuda": BACKWARD_EVIDENCE}

    def __init__(self, precision: str) -> None:
        self.name = f"{self.backend}:{precision}"
        self.rows = _row((precision,), (8, 256, 8), **_PACKS if self.packs else {})
        self.declared_error = DECLARED_GRADIENT_ERROR[precision]

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Those of the forward, and a single query on a single key."""
        one = spec.seqlen_q == spec.seqlen_kv == 1
        reasons = ["has no backward for one query on one key"] if one else []
        return _refusals(spec, device, self.left_open) + reasons


class CudnnFp8Forward(ForwardKernel):
    """A forward in e4m3 with one scale a tensor.

    On Hopper its output is e4m3, with a scale known beforehand.  A row of the output is a mean of V's rows, hence |O| ≤
    max |V|: V's scale serves.
    """

    backend: str
    masks: tuple[str, ...] = ("none", "causal", "window")
    leaves = "e4m3"
    # Relative L2 on normal inputs; 0.060 and, causal, 0.055 were measured on an H200.  Few keys need more.
    declared_error = 0.08
    error_growth = SHORT_ACCUMULATOR
    evidence: Mapping[str, str] = {"cuda": FORWARD_EVIDENCE}

    def __init__(self) -> None:
        self.name = f"{self.backend}:fp8"
        self.rows = _fp8_row((*PRECISIONS, "e4m3"), 256, self.masks, descales=("tensor",))

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Those of 16 bits, a single query, and a V that is wider than Q."""
        reasons = _refusals(spec, device)
        if spec.seqlen_q == 1:
            reasons.append("has no FP8 kernel for a single query")
        if spec.head_dim_v > spec.head_dim:
            reasons.append("reads memory that is not its own where head_dim_v is larger than head_dim")
        return reasons


class CudnnFp8Backward(BackwardKernel):
    """A backward on the e4m3 forward's operands and rounded output, padded to the head dimension 128; dO is e5m2."""

    backend: str
    masks: tuple[str, ...] = ("none", "causal", "window")
    error_growth = FIXED_SCALE
    evidence: Mapping[str, str] = {"cuda": BACKWARD_EVIDENCE}

    def __init__(self) -> None:
        self.name = f"{self.backend}:fp8"
        self.follows = (self.name,)
        self.rows = _fp8_row(PRECISIONS, BACKWARD_SIZE, self.masks)

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Those of 16 bits, and a last group of queries that is not whole.

        Its rows of dQ were 0.75 off, whatever the number of keys: among 1000 queries that is 0.07 of the whole, below
        the declared error of the tensor.
        """
        reasons = _refusals(spec, device)
        if spec.seqlen_q % _GROUP:
            reasons.append(f"gets dQ wrong for the last queries where they are no multiple of {_GROUP}")
        return reasons


def _row(dtypes: tuple[str, ...], head_dims: tuple[int, int, int], **more: Any) -> dict[str, Capabilities]:
    limits = {"capability": _HOPPER, "softcap": False, "empty_rows": False, "max_elements": _INT32, **more}
    return {"cuda": Capabilities(dtypes=dtypes, head_dims=head_dims, **limits)}


def _fp8_row(dtypes: tuple[str, ...], largest: int, masks: tuple[str, ...], **more: Any) -> dict[str, Capabilities]:
    return _row(dtypes, (16, largest, 16), masks=masks, alignments=("top-left",), **more)


def _refusals(spec: AttentionSpec, device: Device, left_open: bool = True) -> list[str]:
    """Limits of all kernels; those of masks are in sdpa_support_surface.h."""
    reasons = []
    if device.capability[0] != _HOPPER[0]:
        reasons.append(f"is known here on compute capability 9.x only, {device.name} has another")
    if spec.scale <= 0:
        # Keys that fill up a tile are hidden before the scale is applied, so this holds without a mask, too.
        reasons.append(f"hides keys before it scales, which needs a scale above 0, not {spec.scale}")
    if spec.seqlen_q > spec.seqlen_kv:
        if spec.mask.left is not None or (spec.mask.kind == "window" and not left_open):
            reasons.append("a window needs at least as many keys as queries")
        elif spec.mask.kind != "none" and spec.mask.alignment == "bottom-right":
            reasons.append("the bottom-right alignment needs at least as many keys as queries")
    return reasons
