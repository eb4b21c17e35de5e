"""Conformance of ``error_growth``: errors over ever more keys, and those of dK and dV over as many queries."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..harness.cases.inputs import draw
from ..harness.measure.accuracy import TensorName, relative_l2
from ..kernels.plan import backend_of
from ..problem.mask import Mask
from ..problem.spec import AttentionSpec
from .conformance_subject import Subject
from .sampled_truth import sampled, sampled_truth

__all__ = ["check_growth", "long_specs", "why_not_long"]

_MOST = {"cpu": 8192, "cuda": 131072}  # keys, or queries, after a sixteenth and a quarter of them
_STEPS = (16, 4, 1)
_FEW = {"cpu": 64, "cuda": 128}  # queries, or keys, whose truth is computed
_SIZES = {"cpu": (32, 16, 64, 128), "cuda": (128, 64, 256, 16)}
_DRAWS = 2
# By how much the mean error of so many draws may differ from that of others, by family.  A mean in V, so that sums grow
# with the keys, shows a short accumulator that other inputs hide.
_MARGINS = {"normal": 1.15, "biased-v": 1.15, "outlier": 1.5}
# Errors of so much of what the other checks allow cost no choice, however they grow.
_NO_MATTER, _NO_MATTER_WIDE = 0.25, 1.0


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
    most, few = _MOST[device], _FEW[device]
    if device == "cuda":
        shapes = [(most, most, Mask()), (most, most, Mask(right=0))]
    else:
        shapes = [(few, most, Mask()), (most, few, Mask())][: 1 + training]
    plain = subject.typical(_SIZES[device])[:1]
    specs = [
        spec.replace(batch=_DRAWS, heads=1, kv_heads=1, seqlen_q=queries, seqlen_kv=keys, mask=mask)
        for spec in plain
        for queries, keys, mask in shapes
    ]
    return [spec for spec in specs if not subject.refusals(spec)]


def check_growth(subject: Subject, spec: AttentionSpec) -> str | None:
    """The errors of each tensor with a sixteenth and a quarter of the spec's tokens, and with all of them."""
    growth, few = subject.registry.error_growth(subject.plan), _FEW[subject.device.type]
    assert growth is not None, "long_specs names no spec of others"
    share, fastest = _NO_MATTER if subject.plan.fp8 else _NO_MATTER_WIDE, 0.0
    for family, margin in _MARGINS.items():
        first: dict[TensorName, float] = {}
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
            for name, error in errors.items():
                before = max(first.setdefault(name, error), share * subject.allowed(shorter))
                allowed = before * growth**doublings * margin
                if not error <= allowed:
                    tokens_before = tokens * step // _STEPS[0]
                    return (
                        f"{name} of {tokens} tokens is off by {error:.3g} on {family} inputs, of {tokens_before} by "
                        f"{first[name]:.3g}: {allowed:.3g} allowed where it grows by {growth:g} a doubling"
                    )
                if doublings:
                    fastest = max(fastest, (error / before) ** (1 / doublings))
    subject.note("growth", f"at most {fastest:.3f} a doubling, {growth:g} declared")
    return None


def _errors(subject: Subject, spec: AttentionSpec, family: str, few: int) -> dict[TensorName, float]:
    """The mean over the draws of the relative L2 of each tensor that the plan is judged by."""
    found = subject.answers(spec, draw(spec, family, subject.device))
    exact = _truth(spec, family, subject.device, few)
    return {
        name: sum(
            relative_l2(value, truth) for value, truth in zip(sampled(name, found[name], few), exact[name], strict=True)
        )
        / _DRAWS
        for name in subject.tensors
        if name != "lse"
    }


@lru_cache(maxsize=64)  # the same for all plans of a backend
def _truth(spec: AttentionSpec, family: str, device: torch.device, few: int) -> dict[TensorName, Tensor]:
    return sampled_truth(spec, draw(spec, family, device), few)
