"""cuDNN's attention through its front end's graphs: 16 bits and per-tensor e4m3, both passes, on Hopper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.graph_pools import permanent
from attnbench.kernels.capabilities import Device
from attnbench.kernels.contract import Availability, Backend, Inputs, Operands, Result, Saved, gradient_dtype
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.fp8 import Quantised, Recipe, quantise
from attnbench.problem.lengths import Lengths
from attnbench.problem.spec import AttentionSpec

from ..common import cudnn_attention as common
from ..common.cudnn_attention import BACKWARD_SIZE, PEAK, PRECISIONS, cudnn_version, scalar, too_old
from ..common.installed import versions_of
from ..common.layout import aligned, padded, tokens
from ..common.unpadding import unpads_backward, unpads_forward
from .graphs import OUTPUTS, Band, Graph, Question, TensorLayout, graph_of, inputs_of, laid_out
from .packed import described, lengths_of, outputs_of
from .scales import descale_of, gradient_bounds, too_long

__all__ = ["BACKEND"]

_DISTRIBUTION = "nvidia-cudnn-frontend"
_INSTALL = "pip install nvidia-cudnn-frontend"
_RECIPE = Recipe("tensor", "e4m3")
_GRADIENT_RECIPE = Recipe("tensor", "e5m2")  # cuDNN rounds dS to the type of dO, whose bounds want a wide range


def _availability() -> Availability:
    """From the metadata alone: importing the front end loads cuDNN."""
    versions = versions_of(_INSTALL, _DISTRIBUTION)
    if isinstance(versions, Availability):
        return versions
    if reason := too_old():
        return Availability(reason=reason, origin=_DISTRIBUTION)
    return Availability(version=versions[0], origin=f"{_DISTRIBUTION} {versions[0]} on cuDNN {cudnn_version()}")


def _band(spec: AttentionSpec) -> Band:
    left, right = spec.mask.left, spec.mask.right
    return Band(None if left is None else left + 1, right, spec.mask.alignment == "bottom-right")


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


def _graph(node: str, inputs: Mapping[str, Tensor], outputs: tuple[TensorLayout, ...], spec: AttentionSpec) -> Graph:
    layouts = tuple(TensorLayout.of(x) for x in inputs.values())
    return graph_of(Question(node, layouts, outputs, spec.scale, _band(spec), inputs["q"].device))


def _packed_graph(node: str, spec: AttentionSpec, device: torch.device) -> Graph:
    """A graph of 16-bit tensors (T, H, D); sequences have as many keys as queries, so that alignments are one."""
    assert spec.lengths is not None, "asked for packed batches alone"
    assert spec.lengths.total_q is not None, "a packed batch counts its tokens"
    assert spec.lengths.total_kv is not None, "a packed batch counts its tokens"
    dtype, band = TO_TORCH[spec.dtype], replace(_band(spec), bottom_right=False)
    inputs, outputs = (
        tuple(described(name, spec, dtype) for name in names) for names in (inputs_of(node, packed=True), OUTPUTS[node])
    )
    totals = spec.lengths.total_q, spec.lengths.total_kv
    return graph_of(Question(node, inputs, outputs, spec.scale, band, device, totals))


def _forward_outputs(spec: AttentionSpec, dtype: torch.dtype) -> tuple[TensorLayout, TensorLayout]:
    sizes = (spec.batch, spec.heads, spec.seqlen_q)
    return TensorLayout.rows(*sizes, spec.head_dim_v, dtype), TensorLayout.dense(*sizes, 1)


def _gradient_outputs(
    spec: AttentionSpec, size: int, size_v: int, dtype: torch.dtype
) -> tuple[TensorLayout, TensorLayout, TensorLayout]:
    keys = (spec.batch, spec.kv_heads, spec.seqlen_kv)
    return (
        TensorLayout.rows(spec.batch, spec.heads, spec.seqlen_q, size, dtype),
        TensorLayout.rows(*keys, size, dtype),
        TensorLayout.rows(*keys, size_v, dtype),
    )


_ONE = TensorLayout.dense(1, 1, 1, 1)


@permanent
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.full((1, 1, 1, 1), value, dtype=torch.float32, device=device)


@unpads_forward()
class CudnnForward(common.CudnnForward):
    """The node ``sdpa`` on 16-bit tensors."""

    backend = "cudnn"
    packs = True

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """Views where the strides allow it, and the graph."""
        q, k, v = inputs.unquantised()
        if inputs.lengths is not None:
            ports = {"q": tokens(q), "k": tokens(k), "v": tokens(v), **lengths_of(inputs.lengths, spec)}
            return Operands(spec, q, k, v, _Native(_packed_graph("sdpa", spec, q.device), ports), inputs.lengths)
        ports = {"q": _readable(q), "k": _readable(k), "v": _readable(v)}
        graph = _graph("sdpa", ports, _forward_outputs(spec, TO_TORCH[spec.dtype]), spec)
        return Operands(spec, q, k, v, _Native(graph, ports))

    def run(self, operands: Operands) -> Result:
        """The graph; cuDNN's statistics are the natural log-sum-exp with an axis of one more."""
        graph, inputs = operands.native
        if operands.lengths is not None:
            found = graph.run(inputs, outputs_of(OUTPUTS["sdpa"], operands.spec, inputs["q"], inputs["k"]))
            return Result(found["o"].transpose(0, 1)[None], found["stats"].squeeze(-1).mT[None])
        found = graph.run(inputs)
        return Result(found["o"], found["stats"].squeeze(-1))


@unpads_backward()
class CudnnBackward(common.CudnnBackward):
    """The node ``sdpa_backward``, after any forward that returns out and its log-sum-exp."""

    backend = "cudnn"
    packs = True
    preference = 8

    def run(self, saved: Saved, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """On the Q, K, V that the forward computed with."""
        spec, lse = saved.spec, saved.lse
        assert lse is not None
        if saved.operands.lengths is not None:
            return _packed_gradients(saved, saved.operands.lengths, lse, grad_out)
        ports = zip("qkv", saved.operands.tensors(), strict=True)
        inputs = {name: _readable(x) for name, x in [*ports, ("o", saved.out), ("dO", grad_out)]}
        inputs["stats"] = lse.to(torch.float32).contiguous().unsqueeze(-1)
        outputs = _gradient_outputs(spec, spec.head_dim, spec.head_dim_v, inputs["q"].dtype)
        found = _graph("sdpa_backward", inputs, outputs, spec).run(inputs)
        return found["dQ"], found["dK"], found["dV"]


def _packed_gradients(saved: Saved, lengths: Lengths, lse: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    spec, node = saved.spec, "sdpa_backward"
    q, k, v = (tokens(x) for x in saved.operands.tensors())
    inputs = {"q": q, "k": k, "v": v, "o": tokens(saved.out), "dO": tokens(grad_out)}
    inputs["stats"] = lse.to(torch.float32)[0].mT.contiguous().unsqueeze(-1)
    found = _packed_graph(node, spec, q.device).run(
        {**inputs, **lengths_of(lengths, spec)}, outputs_of(OUTPUTS[node], spec, q, k)
    )
    dq, dk, dv = (found[name].transpose(0, 1)[None] for name in OUTPUTS[node])
    return dq, dk, dv


class CudnnFp8Forward(common.CudnnFp8Forward):
    """The node ``sdpa_fp8``; V's descale is the output's too."""

    backend = "cudnn"

    def prepare(self, inputs: Inputs, spec: AttentionSpec) -> Operands:
        """e4m3 with one scale a tensor, and the graph."""
        q, k, v = inputs.quantised() or (quantise(x.detach(), _RECIPE) for x in inputs.unquantised())
        ports = {name: _readable(x.data) for name, x in {"q": q, "k": k, "v": v}.items()}
        ports |= {f"descale_{name}": scalar(x.descale, 1, 1, 1, 1) for name, x in {"q": q, "k": k, "v": v}.items()}
        device = inputs.device
        ports |= {"descale_s": _constant(1 / PEAK, device), "scale_s": _constant(PEAK, device)}
        ports["scale_o"] = ports["descale_v"].reciprocal()
        outputs = (*_forward_outputs(spec, torch.float8_e4m3fn), _ONE, _ONE)
        return Operands(spec, q, k, v, _Native(_graph("sdpa_fp8", ports, outputs, spec), ports))

    def run(self, operands: Operands) -> Result:
        """The graph, and its output times V's descale in the dtype that was asked for."""
        from ..common.widening import widened  # Triton comes with torch for CUDA, where alone this runs

        graph, inputs = operands.native
        found = graph.run(inputs)
        out = widened(found["o"], inputs["descale_v"], gradient_dtype(operands.spec))
        state = _State(found["o"], inputs) if operands.spec.training else None
        return Result(out, found["stats"].squeeze(-1), state)


class CudnnFp8Backward(common.CudnnFp8Backward):
    """The node ``sdpa_fp8_backward``; all gradients have scales from bounds: see ``cudnn/scales.py``."""

    backend = "cudnn"
    declared_error = 0.15  # three roundings to e5m2 of 0.05 each, and the forward's

    def further_refusals(self, spec: AttentionSpec, device: Device) -> list[str]:
        """So many tokens that bounds leave nothing, too."""
        reason = too_long(spec)
        return super().further_refusals(spec, device) + ([reason] if reason else [])

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
        inputs = {name: _wide(forward[name]) for name in "qkv"}
        inputs |= {"o": _wide(saved.state.out), "dO": _wide(_readable(grad.data))}
        inputs["stats"] = lse.contiguous().unsqueeze(-1)
        inputs |= {f"descale_{name}": forward[f"descale_{name}"] for name in "qkv"}
        inputs |= {"descale_o": forward["descale_v"], "descale_dO": scalar(grad.descale, 1, 1, 1, 1)}
        inputs |= {"descale_s": forward["descale_s"], "descale_dP": descales["dP"], "scale_s": forward["scale_s"]}
        inputs |= {f"scale_{name}": descales[name].reciprocal() for name in ("dQ", "dK", "dV", "dP")}
        size = BACKWARD_SIZE
        outputs = (*_gradient_outputs(spec, size, size, torch.float8_e5m2), _ONE, _ONE, _ONE, _ONE)
        found = _graph("sdpa_fp8_backward", inputs, outputs, spec).run(inputs)
        dtype = gradient_dtype(spec)
        dq, dk, dv = (widened(found[name], descales[name], dtype) for name in ("dQ", "dK", "dV"))
        return dq[..., : spec.head_dim], dk[..., : spec.head_dim], dv[..., : spec.head_dim_v]


def _wide(x: Tensor) -> Tensor:
    """x (B, H, S, D), laid out (B, S, H, ·), with the one head dimension that the backward has."""
    return padded(x.transpose(1, 2), BACKWARD_SIZE).transpose(1, 2)


BACKEND = Backend(
    name="cudnn",
    summary="cuDNN's attention graphs: 16 bits and per-tensor FP8, both passes",
    availability=_availability,
    kernels=(
        *(kernel(precision) for precision in PRECISIONS for kernel in (CudnnForward, CudnnBackward)),
        CudnnFp8Forward(),
        CudnnFp8Backward(),
    ),
    built_on=("cudnn",),
)
