"""Conformance of ``error_growth``: errors over ever more keys, and those of dK and dV over as many queries."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...harness.cases.inputs import draw
from ...harness.measure.accuracy import TensorName, relative_l2
from ...kernels.plan import backend_of
from ...problem.fp8 import Quantised
from ...problem.mask import Mask
from ...problem.spec import AttentionSpec
from ..sampled_truth import sampled, sampled_truth
from .subject import Subject

__all__ = ["check_growth", "long_specs", "why_not_long"]

# Keys, or queries, after a sixteenth and a quarter of them; the first number that is served.  Plans without an
# 8-bit kernel, which declare nothing, start at the next, whose truth costs a sixteenth.
_MOST = {"cpu": (8192, 2048), "cuda": (131072, 32768, 8192)}
_STEPS = (16, 4, 1)
_FEW = {"cpu": 64, "cuda": 128}  # queries, or keys, whose truth is computed
_SIZES = {"cpu": (32, 16, 64, 128), "cuda": (128, 64, 256, 16)}
_DRAWS = 2
# By how much the mean error of so many draws may differ from that of others, by family.  A mean in V, so that sums grow
# with the keys, shows a short accumulator that other inputs hide; rounding O to bf16 then costs dQ up to 1.17 from 8k
# to 128k keys (H200), where FP8 sums in FP32 stay within 1.05 on normal inputs, and 1.11 from 512 to 8k (CPU).
_MARGINS = {"normal": 1.15, "biased-v": 1.25, "outlier": 1.5}
_HARDER = ("outlier",)  # for exact attention on quantised tensors too: of more tokens the largest are larger
# Errors of so much of what the other checks allow cost no choice, however they grow.
_NO_MATTER, _NO_MATTER_WIDE = 0.25, 1.0
# On an H200 the outputs of sdpa-efficient:fp32 grew from 1.1e-6 to 6.4e-6 from 2k to 32k keys with outliers, and dQ of
# the reference from 0.9e-6 to 4e-6: as rounding errors that add up at random, by the root of their number.
_FP32_SUMS, _FINE = 2**0.5, 1e-5


def why_not_long(subject: Subject) -> str | None:
    """Why nothing is tried with many keys, if so."""
    if subject.registry.error_growth(subject.plan) is None:
        return "the plan declares no error_growth"
    compiled = any(subject.registry.backend(backend_of(kernel)).compiles for kernel in subject.plan.kernels)
    if subject.device.type not in _MOST or (compiled and subject.device.type == "cpu"):
        return f"its kernels add up in another way on {subject.device.type}"
    return None


def long_specs(subject: Subject) -> list[AttentionSpec]:
    """Specs of as many keys as the check goes to.

    On a GPU queries are as many, because kernels take other paths for few (splits, tiles, sums in another order).  On a
    CPU they are few, and for dK and dV many over few keys.
    """
    device, training = subject.device.type, subject.backward is not None
    if why_not_long(subject):
        return []
    few, plain = _FEW[device], subject.typical(_SIZES[device])[:1]
    for most in _MOST[device][not subject.plan.fp8 :]:
        if device == "cuda":
            shapes = [(most, most, Mask()), (most, most, Mask(right=0))]
        else:
            shapes = [(few, most, Mask()), (most, few, Mask())][: 1 + training]
        specs = [
            spec.replace(batch=_DRAWS, heads=1, kv_heads=1, seqlen_q=queries, seqlen_kv=keys, mask=mask)
            for spec in plain
            for queries, keys, mask in shapes
        ]
        if served := [spec for spec in specs if not subject.refusals(spec)]:
            return served
    return []


def check_growth(subject: Subject, spec: AttentionSpec) -> str | None:
    """The errors of each tensor with a sixteenth and a quarter of the spec's tokens, and with all of them."""
    growth, few = subject.registry.error_growth(subject.plan), _FEW[subject.device.type]
    assert growth is not None, "long_specs names no spec of others"
    if subject.declared(spec) < _FINE:  # others are off by more than what a sum in FP32 loses
        growth = max(growth, _FP32_SUMS)
    share, fastest = _NO_MATTER if subject.plan.fp8 else _NO_MATTER_WIDE, 0.0
    for family, margin in _MARGINS.items():
        first: dict[TensorName, _Error] = {}
        for step in _STEPS:
            tokens = max(spec.seqlen_q, spec.seqlen_kv) // step
            queries, keys = (min(length, tokens) for length in (spec.seqlen_q, spec.seqlen_kv))
            shorter = spec.replace(seqlen_q=queries, seqlen_kv=keys)
            try:
                errors = _errors(subject, shorter, family, few)
            except torch.OutOfMemoryError:
                subject.note("growth", f"{tokens} tokens do not fit in memory")
                break
            doublings = math.log2(_STEPS[0] / step)
            for name, (error, floor) in errors.items():
                shortest = first.setdefault(name, errors[name])
                harder = max(floor / shortest.floor, 1.0) if shortest.floor else 1.0
                before = max(shortest.error * harder, share * subject.allowed(shorter))
                allowed = before * growth**doublings * margin
                if not error <= allowed:
                    before_that = f"of {tokens * step // _STEPS[0]} by {shortest.error:.3g}"
                    return (
                        f"{name} of {tokens} tokens is off by {error:.3g} on {family} inputs, {before_that}; "
                        f"{allowed:.3g} allowed where it grows by {growth:g} a doubling"
                    )
                if doublings:
                    fastest = max(fastest, (error / before) ** (1 / doublings))
    most = max(spec.seqlen_q, spec.seqlen_kv)
    subject.note("growth", f"at most {fastest:.3f} a doubling up to {most} tokens, {growth:g} declared")
    return None


class _Error(NamedTuple):
    """A tensor's error, and its floor: that of exact attention on the plan's operands, 0 if these are inputs."""

    error: float
    floor: float


def _errors(subject: Subject, spec: AttentionSpec, family: str, few: int) -> dict[TensorName, _Error]:
    """The errors of each tensor that the plan is judged by."""
    inputs = draw(spec, family, subject.device)
    operands = subject.forward.prepare(inputs.qkv, spec)
    found, exact = subject.answers_of(operands, inputs.grad_out), _truth(spec, family, subject.device, few)
    floor: dict[TensorName, Tensor] = {}
    if family in _HARDER and isinstance(operands.k, Quantised):
        q, k, v = operands.tensors(torch.float64)
        floor = sampled_truth(spec, replace(inputs, q=q, k=k, v=v), few)
    return {
        name: _Error(
            _mean_error(sampled(name, found[name], few), exact[name]),
            _mean_error(floor[name], exact[name]) if floor else 0.0,
        )
        for name in subject.tensors
        if name != "lse"
    }


def _mean_error(values: Tensor, exact: Tensor) -> float:
    """The mean over the draws of their relative L2."""
    return sum(map(relative_l2, values, exact)) / _DRAWS


@lru_cache(maxsize=64)  # the same for all plans of a backend
def _truth(spec: AttentionSpec, family: str, device: torch.device, few: int) -> dict[TensorName, Tensor]:
    return sampled_truth(spec, draw(spec, family, device), few)
