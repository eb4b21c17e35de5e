"""The error of an answer: its distance from exact attention in FP64.

One relative L2 over a whole tensor hides one wrong head among many, one wrong row, and a factor of 1.05 among the noise
of FP8, so each of these has a number of its own.  The floor is exact attention on the operands that the kernel used:
its error tells a bad kernel from a hard input, and the kernel's distance from it is the kernel's own error.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer
from torch import Tensor

from attnbench.errors import AttnbenchError
from attnbench.kernels.contract import Inputs, Operands, Saved
from attnbench.kernels.registry import Registry
from attnbench.problem.fp8 import Quantised
from attnbench.problem.spec import AttentionSpec

from ..cases.inputs import Drawn

__all__ = [
    "LARGEST_ERROR",
    "LARGEST_TRUTH",
    "Detail",
    "Floor",
    "Judgement",
    "Judgements",
    "NonNegative",
    "Number",
    "TensorName",
    "Truth",
    "judge_tensor",
    "relative_l2",
]

TensorName = Literal["out", "lse", "dq", "dk", "dv"]
Precision = Literal["fp64", "fp32"]
_GRADIENTS: tuple[TensorName, ...] = ("dq", "dk", "dv")
_EXACT = {"fp64": "reference:fp64", "fp32": "reference:fp32"}
_WIDE = {"fp64": torch.float64, "fp32": torch.float32}
# The compute capabilities whose FP64 rate is at least half of the FP32 rate; elsewhere it is 1/32 or 1/64.
_FAST_FP64 = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))
# Operations that one truth or floor may cost.  In FP64 the reference does about 8e12 a second on an
# H200 and 10e9 on a CPU core, and every backend's process computes a truth and a floor for each family.
LARGEST_TRUTH = {"cpu": 6e9, "cuda": 1e11}
# Rows and heads much shorter than the others are sums that nearly cancel (the gradients of a query
# with two keys, one of which has all of its attention): an error relative to their length says nothing.
_LEAST_SHARE = 0.5
# A larger finite error becomes infinite: ratios of such numbers leave the range of floats.
LARGEST_ERROR = 1e100


def _number(value: object) -> object:
    """JSON has no infinity, so it is written as text."""
    if isinstance(value, float) and math.isnan(value):
        raise ValueError("expected a number, not NaN")
    beyond = isinstance(value, (int, float)) and abs(value) > LARGEST_ERROR
    return math.inf if value == "Infinity" or beyond else value


def _written(value: float) -> float | str:
    return value if math.isfinite(value) else "Infinity"


Number = Annotated[float, BeforeValidator(_number), PlainSerializer(_written, when_used="json")]
NonNegative = Annotated[Number, Field(ge=0)]


@dataclass(frozen=True)
class Detail:
    """The parts of a tensor's error that one relative L2 hides; a row is one token of one head.

    ``sqnr_db`` is -20·log10 of the relative L2, None if that is 0 or infinite.  ``worst_head`` is the largest relative
    L2 of one (batch, head), ``worst_row`` that of one row.  They are relative to at least half of the root mean square
    over all heads, or over the rows of the head (of an LSE: to at least one nat).  ``bias`` is signed: the gain ⟨value,
    truth⟩ / ⟨truth, truth⟩ − 1, or the mean of value − truth in nats for the LSE.  ``nonfinite`` counts the values that
    are not finite where the truth is; they make the other numbers infinite.
    """

    sqnr_db: Number | None
    worst_head: NonNegative
    worst_row: NonNegative
    bias: Number
    nonfinite: Annotated[int, Field(ge=0)]

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class Judgement:
    """``error`` is the relative L2 of a tensor, ``detail`` its parts, ``rows`` the number of rows compared."""

    error: float
    detail: Detail
    rows: int


Judgements = Mapping[TensorName, Judgement]


def relative_l2(value: Tensor, truth: Tensor) -> float:
    """‖value − truth‖ / ‖truth‖ in FP64, 0 if both are zero.

    Where the truth is minus infinity (the LSE of a row without keys), the value must be exactly that and does not count
    further; any other value that is not finite makes the error infinite.
    """
    absent = truth == -torch.inf
    if bool(absent.any()):
        if not bool((value[absent] == -torch.inf).all()):
            return math.inf
        value, truth = value[~absent], truth[~absent]
    wide, exact = value.to(torch.float64), truth.to(torch.float64)
    difference = float(torch.linalg.vector_norm(wide - exact))
    size = float(torch.linalg.vector_norm(exact))
    if difference == 0.0:
        return 0.0
    error = difference / size if size else math.inf
    return error if math.isfinite(error) else math.inf


def judge_tensor(name: TensorName, value: Tensor, truth: Tensor, unit: float = 0.0) -> Judgement:
    """Compare a value (groups, heads, S, D), or an LSE (groups, heads, S), with its FP64 truth.

    An LSE's error is absolute, in nats: it is the relative error of the sum of exponentials.  To make it relative it is
    divided by at least one nat.  Where the truth is 0 throughout, each row counts as ``unit`` long; with a ``unit`` of
    0 any difference is an infinite error.
    """
    # FP64 by type promotion; the only tensor of that size made here.
    difference = torch.sub(value, truth)
    finite = torch.isfinite(value)
    if name == "lse":
        absent = truth == -torch.inf
        right = absent & (value == -torch.inf)
        finite |= right
        difference.masked_fill_(right, 0.0)
        error, size = difference.abs(), truth.abs().clamp_(min=1.0).masked_fill_(absent, 0.0)
        least_row = size
        bias = difference.sum() / (~absent).sum().clamp_(min=1)
    else:
        error, size = (torch.linalg.vector_norm(x, dim=-1) for x in (difference, truth))
        energy = size.square().sum()
        bias = torch.where(energy > 0, difference.mul_(truth).sum() / energy, 0.0)
        size = torch.where(energy > 0, size, unit)
        least_row = _LEAST_SHARE * _rms(size)
    error.nan_to_num_(nan=math.inf, posinf=math.inf)
    rows = _ratio(error, torch.maximum(size, least_row))
    error, size = (torch.linalg.vector_norm(x, dim=-1).flatten() for x in (error, size))
    heads = _ratio(error, torch.maximum(size, _LEAST_SHARE * _rms(size)))
    whole = _ratio(*(torch.linalg.vector_norm(x) for x in (error, size)))
    # One wait for the device: processes that share a GPU each wait for their turn.
    said = torch.stack([whole, heads.amax(), rows.amax(), bias, (~finite).sum().to(torch.float64)])
    relative, worst_head, worst_row, gain, nonfinite = said.tolist()
    return Judgement(
        relative,
        Detail(
            sqnr_db=-20 * math.log10(relative) if 0 < relative < math.inf else None,
            worst_head=worst_head,
            worst_row=worst_row,
            bias=gain if math.isfinite(relative) else math.inf,
            nonfinite=int(nonfinite),
        ),
        rows.numel(),
    )


def _rms(size: Tensor) -> Tensor:
    """Root mean square along the last dimension, which is kept."""
    return size.square().mean(-1, keepdim=True).sqrt_()


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    """error / size, 0 where there is no error, whatever the size."""
    return torch.where(error == 0, 0.0, error / size)


@dataclass(frozen=True)
class Truth:
    """Exact out, lse (and dq, dk, dv) of a spec on some inputs, or of some of its heads if all cost too much.

    A group is one (batch, key head) with the query heads that read it: the smallest part whose outputs and gradients
    depend on nothing else.  ``groups`` lists those computed, as indices into batch × kv_heads; ``values`` holds FP64
    tensors (groups, heads per group, S, D).  ``units`` are the row lengths to assume for dq and dk that are all 0.
    """

    spec: AttentionSpec
    groups: tuple[int, ...]
    values: Mapping[TensorName, Tensor]
    grad_out: Tensor | None
    units: Mapping[TensorName, float]
    registry: Registry
    precision: Precision = "fp64"

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        inputs: Drawn,
        registry: Registry,
        largest: float | None = None,
        precision: Precision | None = None,
    ) -> Truth:
        """Compute the truth with at most ``largest`` operations, by default the device's LARGEST_TRUTH.

        It is computed in FP64; in FP32 without TF32 for 16-bit tensors if the device's FP64 is slow.  If not all groups
        fit, at least one is taken, spread evenly over batch and heads.  The first group depends on the spec, so that a
        sweep covers every head.
        """
        limit = LARGEST_TRUTH[inputs.q.device.type] if largest is None else largest
        count = spec.batch * spec.kv_heads
        afford = min(count, max(1, int(limit * count / max(spec.flops, 1.0))))
        first = zlib.crc32(str(spec).encode())
        groups = tuple(sorted((first + index * count // afford) % count for index in range(afford)))
        parts = [_part(x, spec, groups) for x in (inputs.q, inputs.k, inputs.v)]
        # A copy: exact_on needs it later, when the input buffers may hold other numbers.
        grad_out = None if inputs.grad_out is None else _part(inputs.grad_out, spec, groups).clone()
        units = {} if grad_out is None else _units(spec, parts, grad_out)
        precision = precision or _precision(spec, inputs.q.device)
        values = _exact(spec, parts, grad_out, registry, precision)
        return cls(spec, groups, values, grad_out, units, registry, precision)

    @property
    def note(self) -> str:
        """How the truth was computed and on which part, for the record."""
        count = self.spec.batch * self.spec.kv_heads
        return f"exact attention in {self.precision.upper()} on {len(self.groups)} of {count} (batch, key head) groups"

    def judge(self, values: Mapping[TensorName, Tensor]) -> dict[TensorName, Judgement]:
        """Judge each named tensor as the kernel returned it.  Raises AttnbenchError on a wrong shape."""
        return _judge(self.spec, self.groups, values, self.values, self.units)

    def exact_on(self, operands: Operands) -> Floor | None:
        """Exact attention, forward and backward, on the quantised operands; None if none is quantised.

        Raises AttnbenchError if operands have another shape than the inputs.
        """
        if not any(isinstance(x, Quantised) for x in (operands.q, operands.k, operands.v)):
            return None
        spec = self.spec
        keys = (spec.batch, spec.kv_heads, spec.seqlen_kv)
        shapes = (
            (spec.batch, spec.heads, spec.seqlen_q, spec.head_dim),
            (*keys, spec.head_dim),
            (*keys, spec.head_dim_v),
        )
        used = operands.tensors(torch.float64)
        for name, x, shape in zip("qkv", used, shapes, strict=True):
            if x.shape != shape:
                raise AttnbenchError(f"the operand {name} has the shape {tuple(x.shape)}, not {shape}")
        parts = [_part(x, spec, self.groups) for x in used]
        exact = _exact(spec, parts, self.grad_out, self.registry, self.precision)
        judgements = {
            name: judge_tensor(name, exact[name], truth, self.units.get(name, 0.0))
            for name, truth in self.values.items()
        }
        return Floor(spec, self.groups, exact, self.units, judgements)


@dataclass(frozen=True)
class Floor:
    """Exact out, lse (and dq, dk, dv) on the operands that a kernel quantised, for the groups of the truth.

    ``judgements`` compares these ``values`` with the truth: the error of quantising alone.
    """

    spec: AttentionSpec
    groups: tuple[int, ...]
    values: Mapping[TensorName, Tensor]
    units: Mapping[TensorName, float]
    judgements: Mapping[TensorName, Judgement]

    def judge(self, values: Mapping[TensorName, Tensor]) -> dict[TensorName, Judgement]:
        """Compare the kernel with exact attention on its own operands.  Raises AttnbenchError on a wrong shape.

        What is left is the rounding of P, of the sums and of the output.
        """
        return _judge(self.spec, self.groups, values, self.values, self.units)


def _judge(
    spec: AttentionSpec,
    groups: tuple[int, ...],
    values: Mapping[TensorName, Tensor],
    exact: Mapping[TensorName, Tensor],
    units: Mapping[TensorName, float],
) -> dict[TensorName, Judgement]:
    found: dict[TensorName, Judgement] = {}
    for name, value in values.items():
        truth = exact[name]
        expected = (spec.batch, spec.kv_heads if name in ("dk", "dv") else spec.heads, *truth.shape[2:])
        if value.shape != expected:
            raise AttnbenchError(f"{name} has the shape {tuple(value.shape)}, not {expected}")
        judgement = judge_tensor(name, _part(value, spec, groups), truth, units.get(name, 0.0))
        # The truth may cover few heads, but all heads can be checked for non-finite values, except in the LSE, which
        # is infinite for a row without keys.
        lost = int((~torch.isfinite(value)).sum()) if name != "lse" else 0
        if lost > judgement.detail.nonfinite:
            detail = replace(judgement.detail, sqnr_db=None, worst_head=math.inf, bias=math.inf, nonfinite=lost)
            judgement = replace(judgement, error=math.inf, detail=detail)
        found[name] = judgement
    return found


def _units(spec: AttentionSpec, qkv: list[Tensor], grad_out: Tensor) -> dict[TensorName, float]:
    """The usual length of rows of dq and dk, for specs in which they cancel to 0 (a query with one key).

    Only the order of magnitude matters: scale · |dO·v| · |k| with random directions, and the same with |q|.
    """
    q_row, k_row, v_row, do_row = (
        float(torch.linalg.vector_norm(x, dtype=torch.float64)) / math.sqrt(x.numel() // x.shape[-1])
        for x in (*qkv, grad_out)
    )
    slope = abs(spec.scale) * do_row * v_row / math.sqrt(spec.head_dim_v)
    return {"dq": slope * k_row, "dk": slope * q_row}


def _part(x: Tensor, spec: AttentionSpec, groups: tuple[int, ...]) -> Tensor:
    """(B, H, ...) to (groups, H / kv_heads, ...), copying only the groups that are needed."""
    grouped = x.reshape(spec.batch, spec.kv_heads, -1, *x.shape[2:])
    if len(groups) == spec.batch * spec.kv_heads:
        return grouped.flatten(0, 1)
    index = torch.tensor(groups, device=x.device)
    return grouped[index // spec.kv_heads, index % spec.kv_heads]


def _precision(spec: AttentionSpec, device: torch.device) -> Precision:
    if device.type != "cuda" or spec.dtype in ("fp32", "fp64"):
        return "fp64"
    return "fp64" if torch.cuda.get_device_capability(device) in _FAST_FP64 else "fp32"


def _exact(
    spec: AttentionSpec, qkv: list[Tensor], grad_out: Tensor | None, registry: Registry, precision: Precision
) -> dict[TensorName, Tensor]:
    """Out, LSE and gradients as FP64 tensors, computed in ``precision``."""
    wide, name = _WIDE[precision], _EXACT[precision]
    q, k, v = (x.to(wide) for x in qkv)
    part = spec.replace(batch=q.shape[0], heads=spec.group, kv_heads=1, dtype=precision)
    with torch.no_grad():
        operands = registry.forward(name).prepare(Inputs(q, k, v), part)
        out, lse, state = registry.forward(name).run(operands)
        if lse is None:
            raise AttnbenchError(f"{name} returned no log-sum-exp")
        values: dict[TensorName, Tensor] = {"out": out, "lse": lse}
        if grad_out is not None:
            saved = Saved(operands.kept(), out, lse, state)
            gradients = registry.backward(name).run(saved, grad_out.to(wide))
            values.update(zip(_GRADIENTS, gradients, strict=True))
    return {name: value.to(torch.float64) for name, value in values.items()}
