"""The peak rates of devices: a time is given as a share of them, and an impossible time is detected."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attnbench.kernels.plan import Plan, precision_of
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.gpu_models import GPU_MODELS

from .timing import Cost

__all__ = ["PEAK_TFLOPS", "peak_share"]

# Dense operations, in 1e12 a second, by the driver's device name.
PEAK_TFLOPS: dict[str, dict[str, float]] = {name: dict(model.tflops) for name, model in GPU_MODELS.items()}


def peak_share(plan: Plan, spec: AttentionSpec, time_ms: Mapping[Cost, list[float]], device_name: str) -> float | None:
    """The time that the plan's kernels would take at the device's peak, divided by the median time that they took.

    Operations are those of ``AttentionSpec.flops``, each pass at the peak of its kernel's precision; preparing is not
    counted.  Above 1 the time or the count of operations is wrong.  None if the device or precision is not listed.
    """
    peaks = PEAK_TFLOPS.get(device_name, {})
    forward = spec.replace(direction="forward").flops
    work: dict[Cost, tuple[float, str]] = {"kernel": (forward, plan.forward)}
    if plan.backward is not None:
        work["backward"] = (spec.flops - forward, plan.backward)
    ideal = taken = 0.0
    for cost, (flops, kernel) in work.items():
        peak = peaks.get(precision_of(kernel).partition("-")[0])
        samples = time_ms.get(cost)
        if peak is None or not samples:
            return None
        ideal += flops / peak / 1e9
        taken += float(np.median(samples))
    return ideal / taken if taken else None
