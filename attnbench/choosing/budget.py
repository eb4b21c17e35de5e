"""The default error budget of each precision: relative L2 against exact attention on the original inputs."""

from __future__ import annotations

from ..kernels.plan import Plan, precision_of
from ..problem.spec import AttentionSpec

__all__ = ["budget_of", "class_bound", "default_budget"]

# A few times the rounding of the type: attention in fp32 lands near 3e-7, in bf16 near 2e-3 and 3e-3 backward, in fp16
# near 3e-4 (8 times less than bf16, so a kernel that computes in bf16 under an fp16 name is out of bounds).
_BOUNDS = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 1e-2, "fp16": 2e-3}
# FP8 with a scale a head measures 0.05 on normal and 0.07 to 0.10 on outlier inputs; its
# gradients, when the backward sees what the forward saw, up to 0.17 on outliers.
_FP8 = {"forward": 0.12, "training": 0.20}


def class_bound(plan: Plan, spec: AttentionSpec) -> float:
    """The error bound of this precision; a plan within it has the status ``ok``."""
    if plan.fp8:
        return _FP8[spec.direction]
    narrowest = max(_BOUNDS.get(precision_of(kernel).partition("-")[0], _BOUNDS["bf16"]) for kernel in plan.kernels)
    # Out and gradients are rounded to the input's type (bf16 for FP8).
    return max(narrowest, _BOUNDS.get(spec.dtype, _BOUNDS["bf16"]))


def default_budget(spec: AttentionSpec, fp8: bool) -> float:
    """The default budget: the bound of the tensors' type, or that of FP8 if the caller opted into it."""
    return _FP8[spec.direction] if fp8 or spec.descale is not None else _BOUNDS[spec.dtype]


def budget_of(spec: AttentionSpec, backend: str, fp8: bool, max_error: float | None) -> float | None:
    """The largest accepted error; None if the caller named a backend or plan and no error, so any is accepted."""
    if max_error is not None:
        return max_error
    return default_budget(spec, fp8) if backend == "auto" else None
