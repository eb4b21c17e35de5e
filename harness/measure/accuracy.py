"""How wrong an answer is: its distance from exact attention in FP64, in numbers that hide nothing.

One relative L2 over a whole tensor hides one wrong head among many, one wrong row among
more, and a factor of 1.05 among the noise of FP8: each has a number of its own here.
Beside each stands the floor: exact attention on the operands that the kernel really used.
Its own error tells a bad kernel from a hard input, and the kernel's error against *it* is
the kernel's alone.
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
    "judged",
    "relative_l2",
]

TensorName = Literal["out", "lse", "dq", "dk", "dv"]
Precision = Literal["fp64", "fp32"]
_GRADIENTS: tuple[TensorName, ...] = ("dq", "dk", "dv")
_EXACT = {"fp64": "reference:fp64", "fp32": "reference:fp32"}
_WIDE = {"fp64": torch.float64, "fp32": torch.float32}
# The compute capabilities whose FP64 is half as fast as FP32 or faster; elsewhere it is a 32nd or a 64th.
_FAST_FP64 = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))
# Operations that one truth or floor may cost.  In FP64 the reference does about 8e12 a second on an
# H200 and 10e9 on a CPU core, and every backend's process takes a truth and a floor of each family.
LARGEST_TRUTH = {"cpu": 6e9, "cuda": 1e11}
# Rows and heads much shorter than the others are sums that nearly cancel (the gradients of a query
# with two keys, one of which has all of its attention): their own length is no measure of an error.
_LEAST_SHARE = 0.5
# A finite error beyond it is infinite: its size tells nothing, and ratios of such numbers leave the range of floats.
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
    """What one relative L2 cannot say of a tensor; rows are along the head dimension, one for each token of a head.

    ``sqnr_db`` is -20·log10 of the relative L2, None where that is 0 or infinite.
    ``worst_head`` is the largest relative L2 of one (batch, head), ``worst_row`` that of one
    row.  A head counts as at least half as large as all heads are in root mean square, a
    row as at least half as long as the rows of its head (of an LSE: as one nat).
    ``bias`` is signed: the gain ⟨value, truth⟩ / ⟨truth, truth⟩ − 1; of the LSE the mean of
    value − truth in nats.  ``nonfinite`` counts the values that are not finite where the
    truth is; each of the other numbers is infinite where they meet one.
    """

    sqnr_db: Number | None
    worst_head: NonNegative
    worst_row: NonNegative
    bias: Number
    nonfinite: Annotated[int, Field(ge=0)]

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class Judgement:
    """``error``, the relative L2 of a tensor, and the rest of what there is to say about it; taken on ``rows`` rows."""

    error: float
    detail: Detail
    rows: int


Judgements = Mapping[TensorName, Judgement]


def relative_l2(value: Tensor, truth: Tensor) -> float:
    """‖value − truth‖ / ‖truth‖ in FP64, 0 for nothing against nothing; infinite where anything is wrong in kind.

    Where the truth is minus infinity (the LSE of a row without keys), the value must be
    exactly that and does not count further; any other non-finite value makes the error infinite.
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


def judged(name: TensorName, value: Tensor, truth: Tensor, unit: float = 0.0) -> Judgement:
    """All there is to say of a value (groups, heads, S, D), or of an LSE (groups, heads, S), beside its FP64 truth.

    The error of an LSE is one in nats: a relative error of the sum of exponentials, whatever
    the LSE itself is.  So |truth| counts as at least one nat where an error is divided by
    it.  Where the truth is 0 throughout, each row counts as ``unit`` long: nothing is no
    error, and something an infinite one unless a unit is given.
    """
    # FP64 by promotion; the one tensor of that size that is made here.
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
    # Waited for once: while several processes share a GPU, every wait lasts until it is this one's turn.
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
    """Root mean square along the last dimension, kept."""
    return size.square().mean(-1, keepdim=True).sqrt_()


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    """error / size, 0 where there is no error, whatever the size."""
    return torch.where(error == 0, 0.0, error / size)


@dataclass(frozen=True)
class Truth:
    """Exact out, lse (and dq, dk, dv) of a spec on some inputs, or of some of its heads where all cost too much.

    A group is one (batch, key head) with the query heads that read it: the smallest part
    whose outputs and gradients stand alone.  ``groups`` are those computed, as indices into
    batch × kv_heads; ``values`` holds FP64 tensors (groups, heads a group, S, D).  ``units`` are
    the lengths that rows of dq and dk count as where these are 0 throughout.
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
        """Compute the truth within ``largest`` operations, LARGEST_TRUTH of the device unless given.

        It is computed in FP64; in FP32, without TF32, on 16-bit tensors where the device is slow in FP64.

        Where not all groups fit, those taken are spread evenly over batch and heads, one at
        least; the first is another one in another spec, so that over a sweep every head is looked at.
        """
        limit = LARGEST_TRUTH[inputs.q.device.type] if largest is None else largest
        count = spec.batch * spec.kv_heads
        afford = min(count, max(1, int(limit * count / max(spec.flops, 1.0))))
        first = zlib.crc32(str(spec).encode())
        groups = tuple(sorted((first + index * count // afford) % count for index in range(afford)))
        parts = [_part(x, spec, groups) for x in (inputs.q, inputs.k, inputs.v)]
        # A floor is asked for later, when the inputs' own buffers may hold other numbers.
        grad_out = None if inputs.grad_out is None else _part(inputs.grad_out, spec, groups).clone()
        units = {} if grad_out is None else _units(spec, parts, grad_out)
        precision = precision or _precision(spec, inputs.q.device)
        values = _exact(spec, parts, grad_out, registry, precision)
        return cls(spec, groups, values, grad_out, units, registry, precision)

    @property
    def note(self) -> str:
        """What the errors were taken on, for the record."""
        count = self.spec.batch * self.spec.kv_heads
        return f"exact attention in {self.precision.upper()} on {len(self.groups)} of {count} (batch, key head) groups"

    def judge(self, values: Mapping[TensorName, Tensor]) -> dict[TensorName, Judgement]:
        """What is to be said of each named tensor, as the kernel returned it.

        Raises AttnbenchError on a wrong shape.
        """
        return _judge(self.spec, self.groups, values, self.values, self.units)

    def exact_on(self, operands: Operands) -> Floor | None:
        """Exact attention, forward and backward, on the quantised operands; None where none is quantised.

        Raises AttnbenchError where operands have another shape than the inputs.
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
            name: judged(name, exact[name], truth, self.units.get(name, 0.0)) for name, truth in self.values.items()
        }
        return Floor(spec, self.groups, exact, self.units, judgements)


@dataclass(frozen=True)
class Floor:
    """Exact out, lse (and dq, dk, dv) on the operands that a kernel quantised, in the groups of the truth.

    ``judgements`` is what there is to say of these ``values`` beside the truth: the error
    that quantising alone makes, below which no kernel gets with these operands.
    """

    spec: AttentionSpec
    groups: tuple[int, ...]
    values: Mapping[TensorName, Tensor]
    units: Mapping[TensorName, float]
    judgements: Mapping[TensorName, Judgement]

    def judge(self, values: Mapping[TensorName, Tensor]) -> dict[TensorName, Judgement]:
        """The kernel's own error: against exact attention on the very operands that it used.

        What the inputs lost in quantising does not count; what is left is the rounding of P,
        the sums and the output.  Raises AttnbenchError on a wrong shape.
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
        judgement = judged(name, _part(value, spec, groups), truth, units.get(name, 0.0))
        # The truth may be of few heads; that all are finite costs no truth. (The LSE of a row without keys is not.)
        lost = int((~torch.isfinite(value)).sum()) if name != "lse" else 0
        if lost > judgement.detail.nonfinite:
            detail = replace(judgement.detail, sqnr_db=None, worst_head=math.inf, bias=math.inf, nonfinite=lost)
            judgement = replace(judgement, error=math.inf, detail=detail)
        found[name] = judgement
    return found


def _units(spec: AttentionSpec, qkv: list[Tensor], grad_out: Tensor) -> dict[TensorName, float]:
    """How long rows of dq and dk are where dP and rowsum(dO∘O), which cancel for a query with one key, do not cancel.

    Only the order of size matters: scale · |dO·v| · |k| with all directions random, and the same with |q|.
    """
    q_row, k_row, v_row, do_row = (
        float(torch.linalg.vector_norm(x, dtype=torch.float64)) / math.sqrt(x.numel() // x.shape[-1])
        for x in (*qkv, grad_out)
    )
    slope = abs(spec.scale) * do_row * v_row / math.sqrt(spec.head_dim_v)
    return {"dq": slope * k_row, "dk": slope * q_row}


def _part(x: Tensor, spec: AttentionSpec, groups: tuple[int, ...]) -> Tensor:
    """(B, H, ...) to (groups, H / kv_heads, ...), copying only the groups asked for."""
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
    """Out, LSE and gradients in FP64, computed in the precision."""
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
