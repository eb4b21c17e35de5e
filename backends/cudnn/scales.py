"""Scales for cuDNN's FP8 backward from bounds instead of maxima, without a history or a read-back.

cuDNN rounds dS, dQ, dK and dV to FP8 and needs their scales beforehand.  With a bound nothing saturates.  A bound is
many times the maximum, too much for e4m3; e5m2 has 32 binades, within which the relative error is the same.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.problem.fp8 import LARGEST, Quantised
from attnbench.problem.spec import AttentionSpec

__all__ = ["Bounds", "descale_of", "gradient_bounds", "too_long"]

_MARGIN = 2.0  # rounding moves P, O and dO by at most an eighth; a whole binade costs nothing
_LONGEST = 2**52  # of Sq · group · Skv²: normal inputs' dK then stays a binade above e5m2's smallest normal number


class Bounds(NamedTuple):
    """Magnitudes that nothing exceeds, each fp32 (1, 1, 1, 1): of what cuDNN calls dP (our dS), and dQ, dK, dV."""

    ds: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def gradient_bounds(q: Quantised, k: Quantised, v: Quantised, grad_out: Tensor, spec: AttentionSpec) -> Bounds:
    """Bounds from norms of the operands, on their device.

    With r = max‖dOᵢ‖ · max‖Vⱼ‖, both dOᵢ·Vⱼ and dOᵢ·Oᵢ are at most r (O is a mean of V's rows), so
    |dSᵢⱼ| = scale · Pᵢⱼ |dPᵢⱼ − Dᵢ| ≤ scale · 2r · Pᵢⱼ (1 − Pᵢⱼ) ≤ scale · r / 2.  A row of P sums to one:
    |dQ| ≤ scale · 2r · max|K|.  Over the n = Sq · group queries of a key, Cauchy and Schwarz:
    |dKⱼ| ≤ √n · (scale · r / 2) · ‖Q's column‖ and |dVⱼ| ≤ √n · ‖dO's column‖.
    """
    reach = _row_norm(grad_out) * _row_norm(v.data.to(torch.bfloat16)) * v.descale
    scale = abs(spec.scale)
    ds = 0.5 * scale * reach
    largest_k = LARGEST["e4m3"] * k.descale
    queries = math.sqrt(spec.seqlen_q * spec.group)
    column_q = _column_norm(q.data.to(torch.bfloat16), spec) * q.descale
    found = (ds, 2 * scale * reach * largest_k, queries * ds * column_q, queries * _column_norm(grad_out, spec))
    return Bounds(*((_MARGIN * x).reshape(1, 1, 1, 1) for x in found))


def descale_of(bound: Tensor) -> Tensor:
    """What one step of e5m2 stands for when its largest number is ``bound``; 1 where the bound is 0."""
    return torch.where(bound == 0, 1.0, (bound / LARGEST["e5m2"]).clamp_min(torch.finfo(torch.float32).tiny))


def too_long(spec: AttentionSpec) -> str | None:
    """Why the bounds leave no digits for so many tokens, or None; normal dK is about 7 · √(Sq · group) · Skv below its
    bound.
    """
    size = spec.seqlen_q * spec.group * spec.seqlen_kv**2
    if size > _LONGEST:
        return "gradients over so many tokens fall below e5m2 when their scale is not known from a history"
    return None


def _row_norm(x: Tensor) -> Tensor:
    rows: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return rows.amax()


def _column_norm(x: Tensor, spec: AttentionSpec) -> Tensor:
    """The largest norm of a column of x (B, H, Sq, D) over the tokens of a whole group of heads."""
    columns: Tensor = torch.linalg.vector_norm(x, dim=2, dtype=torch.float32)
    grouped = columns.reshape(spec.batch, spec.kv_heads, spec.group, -1)
    largest: Tensor = torch.linalg.vector_norm(grouped, dim=2).amax()
    return largest
