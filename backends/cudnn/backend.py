"""cuDNN's attention through its front end's graphs: 16 bits and per-tensor e4m3, both passes, on Hopper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbench.graph_pools import permanent
from attnbench.kernels.capabilities import Capabilities, Device
from attnbench.kernels.contract import (
    Availability,
    Backend,
    BackwardKernel,
    ForwardKernel,
    Operands,
    Result,
    Saved,
    gradient_dtype,
)
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.fp8 import Quantised, Recipe, quantise
from attnbench.problem.spec import AttentionSpec

from ..common.fused import DECLARED_ERROR, DECLARED_GRADIENT_ERROR, aligned, cuda_availability
from .graphs import Band, Graph, Layout, Question, graph_of, laid_out
from .limits import fp8_backward_refusals, fp8_refusals, refusals
from .scales import descale_of, gradient_bounds, too_long

__all__ = ["BACKEND"]

_PRECISIONS = ("bf16", "fp16")
_DISTRIBUTION = "nvidia-cudnn-frontend"
_INSTALL = "pip install nvidia-cudnn-frontend"
_LEAST_CUDNN = 91501  # cuDNN 9.15.1, the first that is right on lengths that are no multiple of 128 (pytorch#169849)
_HOPPER = (9, 0)
_INT32 = 2**31 - 1
_RECIPE = Recipe("tensor", "e4m3")
_GRADIENT_RECIPE = Recipe("tensor", "e5m2")  # cuDNN rounds dS to the type of dO, whose bounds want a wide range
_UNLIMITED = 2**31  # the 16-bit forward was right on an H200 at every head dimension tried, up to 32768
_BACKWARD_SIZE = 128  # sdpa_fp8_bwd.h: "hidden_dim shoud be equal to 128" below compute capability 10.0
_PEAK = 256.0  # P is at most 1; a power of two, so that scaling by it is exact
_FORWARD_EVIDENCE = r"cudnn\w*sdpa(?!\w*bprop)"
_BACKWARD_EVIDENCE = r"cudnn\w*sdpa\w*bprop"


_cudnn_version: Callable[[], int | None] = torch.backends.cudnn.version


def _availability() -> Availability:
    """From the metadata alone: importing the front end loads cuDNN."""
    found = cuda_availability()
    if not found.ok:
        return Availability(reason=found.reason, install=_INSTALL)
    try:
        front_end = version(_DISTRIBUTION)
    except PackageNotFoundError:
        return Availability(reason=f"{_DISTRIBUTION} is not installed", install=_INSTALL)
    cudnn = _cudnn_version()
    if cudnn is None or cudnn < _LEAST_CUDNN:
        return Availability(reason=f"needs cuDNN {_LEAST_CUDNN} or newer, torch finds {cudnn}", origin=_DISTRIBUTION)
    return Availability(version=front_end, origin=f"{_DISTRIBUTION} {front_end} on cuDNN {cudnn}")


def _band(spec: AttentionSpec) -> Band:
    left, right = spec.mask.left, spec.mask.right
    return Band(None if left is None else left + 1, right, spec.mask.alignment == "bottom-right")


def _refusals(spec: AttentionSpec, device: Device) -> list[str]:
    """What no node computes on this GPU."""
    reasons = refusals(spec, device)
    if spec.seqlen_q > spec.seqlen_kv:  # sdpa_support_surface.h
        if spec.mask.left is not None:
            reasons.append("a window needs at least as many keys as queries")
        elif spec.mask.kind != "none" and spec.mask.alignment == "bottom-right":
            reasons.append("the bottom-right alignment needs at least as many keys as queries")
    return reasons


def _row(precision: str, *, backward: bool = False) -> dict[str, Capabilities]:
    row = Capabilities(
        dtypes=(precision,),
        capability=_HOPPER,
        head_dims=(8, 256 if backward else _UNLIMITED, 8),
        softcap=False,
        empty_rows=False,
        max_elements=_INT32,
    )
    return {"cuda": row}


def _fp8_row(*, backward: bool = False) -> dict[str, Capabilities]:
    row = Capabilities(
        dtypes=_PRECISIONS if backward else (*_PRECISIONS, "e4m3"),
        capability=_HOPPER,
        head_dims=(16, _BACKWARD_SIZE if backward else 256, 16),
        alignments=("top-left",),
        softcap=False,
        empty_rows=False,
        max_elements=_INT32,
        descales=() if backward else ("tensor",),
    )
    return {"cuda": row}


class _Native(NamedTuple):
    """A graph and its inputs by port."""

    graph: Graph
    inputs: dict[str, Tensor]


class _State(NamedTuple):
    """The forward's output as cuDNN rounded it, and the inputs of its graph; V's descale is the output's too."""

    out: Tensor
    inputs: dict[str, Tensor]


def _readable(x: Tensor) -> Tensor:
    return aligned(laid_out(x))


def _graph(node: str, inputs: Mapping[str, Tensor], outputs: tuple[Layout, ...], spec: AttentionSpec) -> Graph:
    layouts = tuple(Layout.of(x) for x in inputs.values())
    return graph_of(Question(node, layouts, outputs, spec.scale, _band(spec), inputs["q"].device))


def _forward_outputs(spec: AttentionSpec, dtype: torch.dtype) -> tuple[Layout, Layout]:
    sizes = (spec.batch, spec.heads, spec.seqlen_q)
    return Layout.rows(*sizes, spec.head_dim_v, dtype), Layout.dense(*sizes, 1)


def _gradient_outputs(spec: AttentionSpec, size: int, size_v: int, dtype: torch.dtype) -> tuple[Layout, Layout, Layout]:
    keys = (spec.batch, spec.kv_heads, spec.seqlen_kv)
    return (
        Layout.rows(spec.batch, spec.heads, spec.seqlen_q, size, dtype),
        Layout.rows(*keys, size, dtype),
        Layout.rows(*keys, size_v, dtype),
    )


_ONE = Layout.dense(1, 1, 1, 1)


@permanent
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.full((1, 1, 1, 1), value, dtype=torch.float32, device=device)


class CudnnForward(ForwardKernel):
    """The node ``sdpa`` on 16-bit tensors."""

    evidence: Mapping[str, str] = {"cuda": _FORWARD_EVIDENCE}

    def __init__(self, precision: str) -> None:
        self.name = f"cudnn:{precision}"
        self.rows = _row(precision)
        self.declared_error = DECLARED_ERROR[precision]

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Other generations of GPU, scales that are not positive, masks that want more keys than there are."""
        return _refusals(spec, device)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Operands:
        """Views where the strides allow it, and the graph."""
        inputs = {"q": _readable(q), "k": _readable(k), "v": _readable(v)}
        graph = _graph("sdpa", inputs, _forward_outputs(spec, TO_TORCH[spec.dtype]), spec)
        return Operands(spec, q, k, v, _Native(graph, inputs))

    def run(self, operands: Operands) -> Result:
        """The graph; cuDNN's statistics are the natural log-sum-exp with an axis of one more."""
        graph, inputs = operands.native
        found = graph.run(inputs)
        return Result(found["o"], found["stats"].squeeze(-1))


class CudnnBackward(BackwardKernel):
    """The node ``sdpa_backward``, after any forward that returns out and its log-sum-exp."""

    preference = 8
    evidence: Mapping[str, str] = {"cuda": _BACKWARD_EVIDENCE}

    def __init__(self, precision: str) -> None:
        self.name = f"cudnn:{precision}"
        self.rows = _row(precision, backward=True)
        self.declared_error = DECLARED_GRADIENT_ERROR[precision]

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Those of the forward, and a single query on a single key."""
        reasons = _refusals(spec, device)
        if spec.seqlen_q == spec.seqlen_kv == 1:
            reasons.append("has no backward for one query on one key")
        return reasons

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """On the Q, K, V that the forward computed with."""
        spec, lse = saved.spec, saved.lse
        assert lse is not None
        ports = zip("qkv", saved.operands.tensors(), strict=True)
        inputs = {name: _readable(x) for name, x in [*ports, ("o", saved.out), ("dO", grad_out)]}
        inputs["stats"] = lse.to(torch.float32).contiguous().unsqueeze(-1)
        outputs = _gradient_outputs(spec, spec.head_dim, spec.head_dim_v, inputs["q"].dtype)
        found = _graph("sdpa_backward", inputs, outputs, spec).run(inputs)
        return found["dQ"], found["dK"], found["dV"]


class CudnnFp8Forward(ForwardKernel):
    """The node ``sdpa_fp8`` with one scale a tensor.

    On Hopper its output is e4m3, so its scale must be known beforehand.  A row of the output is a mean of V's rows,
    hence |O| ≤ max |V|: V's own descale serves, without a history.
    """

    name = "cudnn:fp8"
    leaves = "e4m3"
    rows: Mapping[str, Capabilities] = _fp8_row()
    # Relative L2 on normal inputs; 0.060 and, causal, 0.055 were measured on an H200.  Few keys need more.
    declared_error = 0.08
    evidence: Mapping[str, str] = {"cuda": _FORWARD_EVIDENCE}

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Those of 16 bits, a single query, and a V that is wider than Q."""
        return _refusals(spec, device) + fp8_refusals(spec)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Operands:
        """e4m3 with one scale a tensor, and the graph."""
        narrow_q, narrow_k, narrow_v = (quantise(x.detach(), _RECIPE) for x in (q, k, v))
        return self.prepare_quantised(narrow_q, narrow_k, narrow_v, spec)

    def prepare_quantised(self, q: Quantised, k: Quantised, v: Quantised, spec: AttentionSpec) -> Operands:
        """The tensors as they are, and the graph."""
        inputs = {name: _readable(x.data) for name, x in {"q": q, "k": k, "v": v}.items()}
        inputs |= {f"descale_{name}": _scalar(x.descale) for name, x in {"q": q, "k": k, "v": v}.items()}
        device = inputs["q"].device
        inputs |= {"descale_s": _constant(1 / _PEAK, device), "scale_s": _constant(_PEAK, device)}
        inputs["scale_o"] = inputs["descale_v"].reciprocal()
        outputs = (*_forward_outputs(spec, torch.float8_e4m3fn), _ONE, _ONE)
        return Operands(spec, q, k, v, _Native(_graph("sdpa_fp8", inputs, outputs, spec), inputs))

    def run(self, operands: Operands) -> Result:
        """The graph, and its output times V's descale in the dtype that was asked for."""
        from ..common.widening import widened  # Triton comes with torch for CUDA, where alone this runs

        graph, inputs = operands.native
        found = graph.run(inputs)
        out = widened(found["o"], inputs["descale_v"], gradient_dtype(operands.spec))
        state = _State(found["o"], inputs) if operands.spec.training else None
        return Result(out, found["stats"].squeeze(-1), state)


class CudnnFp8Backward(BackwardKernel):
    """The node ``sdpa_fp8_backward`` on the operands and the rounded output of ``cudnn:fp8``.

    Head dimensions below 128, the only one that cuDNN has, are padded with zeros here.  dO and all gradients
    are e5m2, on scales from bounds: see ``cudnn_scales``.
    """

    name = "cudnn:fp8"
    rows: Mapping[str, Capabilities] = _fp8_row(backward=True)
    follows = ("cudnn:fp8",)
    declared_error = 0.15  # three roundings to e5m2 of 0.05 each, and the forward's
    evidence: Mapping[str, str] = {"cuda": _BACKWARD_EVIDENCE}

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """Those of 16 bits, queries that make no whole groups, so many tokens that bounds leave nothing."""
        reason = too_long(spec)
        return _refusals(spec, device) + ([reason] if reason else []) + fp8_backward_refusals(spec)

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Every scale is computed on the device, none is read back."""
        from ..common.widening import widened

        spec, lse, operands = saved.spec, saved.lse, saved.operands
        q, k, v = operands.q, operands.k, operands.v
        assert isinstance(q, Quantised)
        assert isinstance(k, Quantised)
        assert isinstance(v, Quantised)
        assert lse is not None
        forward = saved.state.inputs
        grad_out = laid_out(grad_out)
        grad = quantise(grad_out, _GRADIENT_RECIPE)
        bounds = gradient_bounds(q, k, v, grad_out, spec)
        descales = {f"d{x}": descale_of(bound) for x, bound in zip("PQKV", bounds, strict=True)}
        inputs = {name: _padded(forward[name]) for name in "qkv"}
        inputs |= {"o": _padded(saved.state.out), "dO": _padded(_readable(grad.data))}
        inputs["stats"] = lse.contiguous().unsqueeze(-1)
        inputs |= {f"descale_{name}": forward[f"descale_{name}"] for name in "qkv"}
        inputs |= {"descale_o": forward["descale_v"], "descale_dO": _scalar(grad.descale)}
        inputs |= {"descale_s": forward["descale_s"], "descale_dP": descales["dP"], "scale_s": forward["scale_s"]}
        inputs |= {f"scale_{name}": descales[name].reciprocal() for name in ("dQ", "dK", "dV", "dP")}
        size = _BACKWARD_SIZE
        outputs = (*_gradient_outputs(spec, size, size, torch.float8_e5m2), _ONE, _ONE, _ONE, _ONE)
        found = _graph("sdpa_fp8_backward", inputs, outputs, spec).run(inputs)
        dtype = gradient_dtype(spec)
        dq, dk, dv = (widened(found[name], descales[name], dtype) for name in ("dQ", "dK", "dV"))
        return dq[..., : spec.head_dim], dk[..., : spec.head_dim], dv[..., : spec.head_dim_v]


def _scalar(descale: Tensor) -> Tensor:
    return descale.detach().to(torch.float32).reshape(1, 1, 1, 1).contiguous()


def _padded(x: Tensor) -> Tensor:
    """x (B, H, S, D) in FP8, with zeros up to the one head dimension that the backward has."""
    if x.shape[-1] == _BACKWARD_SIZE:
        return x
    padded = F.pad(x.transpose(1, 2).view(torch.uint8), (0, _BACKWARD_SIZE - x.shape[-1]))  # 0 is 0.0 in FP8
    return padded.view(x.dtype).transpose(1, 2)


BACKEND = Backend(
    name="cudnn",
    summary="cuDNN's attention graphs: 16 bits and per-tensor FP8, both passes",
    availability=_availability,
    kernels=(
        *(kernel(precision) for precision in _PRECISIONS for kernel in (CudnnForward, CudnnBackward)),
        CudnnFp8Forward(),
        CudnnFp8Backward(),
    ),
    built_on=("cudnn",),
)
