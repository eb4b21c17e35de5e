"""The error of an answer: its distance from exact attention in FP64.

One relative L2 over a whole tensor hides one wrong head among many, one wrong row, and a factor of 1.05 among the noise
of FP8, so each of these has a number of its own.  The floor is exact attention on the operands that the kernel used:
its error tells a bad kernel from a hard input, and the kernel's distance from it is the kernel's own error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer
from torch import Tensor

__all__ = [
    "LARGEST_ERROR",
    "Detail",
    "Judgement",
    "Judgements",
    "NonNegative",
    "Number",
    "TensorName",
    "judge_tensor",
    "relative_l2",
]

TensorName = Literal["out", "lse", "dq", "dk", "dv"]
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
    """‖value − truth‖ / ‖truth‖ in FP64, 0 if both are zero; infinite where a value is not finite.  Not for an LSE."""
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
    scalars = torch.stack([whole, heads.amax(), rows.amax(), bias, (~finite).sum().to(torch.float64)])
    relative, worst_head, worst_row, gain, nonfinite = scalars.tolist()
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
