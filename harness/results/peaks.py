"""The peak rates of devices: a time is given as a share of them, and an impossible time is detected."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attnbench.kernels.plan import Plan, precision_of
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.gpu_models import GPU_MODELS

from ..measure.timing import Cost

__all__ = ["PEAK_TFLOPS", "least_ms", "peak_share"]

# Dense operations, in 1e12 a second, by the driver's device name.
PEAK_TFLOPS: dict[str, dict[str, float]] = {name: dict(model.tflops) for name, model in GPU_MODELS.items()}


def least_ms(plan: Plan, spec: AttentionSpec, device_name: str, flops: float | None = None) -> float | None:
    """Milliseconds that the plan's kernels would take at the device's peak; None if the device or precision is not
    listed.

    Operations are ``flops``, by default the fewest that a call of the spec may have (``AttentionSpec.least_flops``),
    each pass at the peak of its kernel's precision.
    """
    peaks = PEAK_TFLOPS.get(device_name, {})
    whole = spec.least_flops if flops is None else flops
    forward = whole * spec.replace(direction="forward").flops / max(spec.flops, 1.0)
    least = 0.0
    for kernel, part in zip(plan.kernels, (forward, whole - forward), strict=False):
        peak = peaks.get(precision_of(kernel).partition("-")[0])
        if peak is None:
            return None
        least += part / peak / 1e9
    return least


def peak_share(
    plan: Plan, spec: AttentionSpec, time_ms: Mapping[Cost, list[float]], device_name: str, flops: float | None = None
) -> float | None:
    """The time that the plan's kernels would take at the device's peak (``least_ms``), divided by the median time that
    they took.

    Preparing is not counted.  Above 1 the time or the count of operations is wrong.  None without ``least_ms`` or
    without samples of each pass.
    """
    least = least_ms(plan, spec, device_name, flops)
    costs: tuple[Cost, ...] = ("kernel",) if plan.backward is None else ("kernel", "backward")
    if least is None or not all(time_ms.get(cost) for cost in costs):
        return None
    taken = sum(float(np.median(time_ms[cost])) for cost in costs)
    return least / taken if taken else None
