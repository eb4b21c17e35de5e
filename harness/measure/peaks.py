"""The peak rates of devices: a time is given as a share of them, and an impossible time is detected."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attnbench.kernels.plan import Plan, precision_of
from attnbench.problem.spec import AttentionSpec

from .timing import Cost

__all__ = ["PEAK_TFLOPS", "least_ms", "peak_share"]

_HOPPER_SXM = {"int8": 1978.9, "fp8": 1978.9, "bf16": 989.4, "fp16": 989.4, "fp32": 66.9, "fp64": 66.9}
_A100 = {"int8": 624.0, "bf16": 312.0, "fp16": 312.0, "fp32": 19.5, "fp64": 19.5}

# Dense operations, in 1e12 a second at the boost clock, of the fastest unit for the precision (fp32 without TF32;
# fp64 on tensor cores), by the driver's device name.  Sources: NVIDIA's H100 (March 2022, table 1), H200 (2024) and
# A100 (2021) datasheets; the H200 has the H100 SXM's multiprocessors and clock.
PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "NVIDIA H200": _HOPPER_SXM,
    "NVIDIA H100 80GB HBM3": _HOPPER_SXM,
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
}


def least_ms(plan: Plan, spec: AttentionSpec, device_name: str) -> float | None:
    """Milliseconds that the plan's kernels would take at the device's peak; None if the device or precision is not
    listed.

    Operations are those of ``AttentionSpec.flops``, each pass at the peak of its kernel's precision.
    """
    peaks = PEAK_TFLOPS.get(device_name, {})
    forward = spec.replace(direction="forward").flops
    least = 0.0
    for kernel, flops in zip(plan.kernels, (forward, spec.flops - forward), strict=False):
        peak = peaks.get(precision_of(kernel).partition("-")[0])
        if peak is None:
            return None
        least += flops / peak / 1e9
    return least


def peak_share(plan: Plan, spec: AttentionSpec, time_ms: Mapping[Cost, list[float]], device_name: str) -> float | None:
    """The time that the plan's kernels would take at the device's peak, divided by the median time that they took.

    Preparing is not counted.  Above 1 the time or the count of operations is wrong.  None without ``least_ms`` or
    without samples of each pass.
    """
    least = least_ms(plan, spec, device_name)
    costs: tuple[Cost, ...] = ("kernel",) if plan.backward is None else ("kernel", "backward")
    if least is None or not all(time_ms.get(cost) for cost in costs):
        return None
    taken = sum(float(np.median(time_ms[cost])) for cost in costs)
    return least / taken if taken else None
