"""The tensors that kernels are measured on: named families of random inputs, drawn afresh for every case."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attnbench.dtypes import TO_TORCH
from attnbench.errors import InputError
from attnbench.spec import AttentionSpec

__all__ = ["FAMILIES", "Inputs", "draw"]

FAMILIES = ("normal", "outlier")
_OUTLIERS = 0.001  # the share of elements that get a second, ten times larger term: N(0, 100) has deviation 10
_OUTLIER_DEVIATION = 10.0
# torch draws about 100 M normal numbers a second on one CPU core and a hundred times that on
# a GPU.  Up to here (a tenth of a second) every machine sees the same numbers.
_SAME_EVERYWHERE = 2**24


@dataclass(frozen=True)
class Inputs:
    """q (B, H, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv) and, in training, grad_out (B, H, Sq, Dv).

    ``drawn_on`` is the device type whose generator made them: the numbers are a function of
    the spec, the family and this.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor | None
    drawn_on: Literal["cpu", "cuda"]


def draw(spec: AttentionSpec, family: str, device: torch.device) -> Inputs:
    """The inputs of a family, contiguous, in the spec's dtype on ``device``; the same on every call.

    ``normal`` is N(0, 1).  ``outlier`` is N(0, 1) + N(0, 100) · Bernoulli(0.001), which hurts
    scales that many elements share (FlashAttention-3, section 4.3).  Both hold for all
    four tensors.  Drawn by torch's CPU generator up to 2**24 elements in all, by the
    device's own beyond that.  Raises InputError on an unknown family.
    """
    if family not in FAMILIES:
        raise InputError(f"input families are {', '.join(FAMILIES)}, not {family!r}")
    queries = (spec.batch, spec.heads, spec.seqlen_q)
    keys = (spec.batch, spec.kv_heads, spec.seqlen_kv)
    shapes = [(*queries, spec.head_dim), (*keys, spec.head_dim), (*keys, spec.head_dim_v)]
    if spec.training:
        shapes.append((*queries, spec.head_dim_v))
    small = sum(torch.Size(shape).numel() for shape in shapes) <= _SAME_EVERYWHERE
    source = torch.device("cpu") if small else device
    seed = int.from_bytes(hashlib.sha256(f"{family} {spec}".encode()).digest()[:8], "big") >> 1
    generator = torch.Generator(source).manual_seed(seed)
    tensors = [_values(shape, family, generator).to(TO_TORCH[spec.dtype]).to(device) for shape in shapes]
    q, k, v = tensors[:3]
    return Inputs(q, k, v, tensors[3] if spec.training else None, "cuda" if source.type == "cuda" else "cpu")


def _values(shape: tuple[int, ...], family: str, generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator, device=generator.device)
    if family == "outlier":
        chosen = torch.rand(shape, generator=generator, device=generator.device) < _OUTLIERS
        second = torch.randn(shape, generator=generator, device=generator.device)
        values += second.mul_(_OUTLIER_DEVIATION).mul_(chosen)
    return values
