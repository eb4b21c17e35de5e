"""Published peak rates of GPU models, by the driver's device name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["GPU_MODELS", "GpuModel"]


@dataclass(frozen=True)
class GpuModel:
    """What the manufacturer publishes of a model.

    ``tflops``: dense operations, in 1e12 a second at the boost clock, of the fastest unit for each precision (fp32
    without TF32; fp64 on tensor cores).  ``bandwidth``: of the memory, in TB/s.  ``watts``: the thermal design power.
    """

    tflops: Mapping[str, float]
    bandwidth: float
    watts: int

    def rate(self, precision: str) -> float:
        """The peak for a kernel's precision (``fp8-token``, ``int8``, ``bf16``), in 1e12 operations a second.

        What is not listed runs on units that are as fast as those of bf16.
        """
        return self.tflops.get(precision.partition("-")[0], self.tflops["bf16"])

    def clock(self, watts: int | None = None) -> float:
        """The share of its clock that it keeps in attention under this power limit, the published one by default.

        The H200's power is taken to be just enough: of the calls longer than 2 ms in its committed rows, the median ran
        at 1965 of 1980 MHz and 606 of 700 W.  The need for power grows with the peak rate and the cube of the clock.
        A limit counts as at least a quarter of the published power, and at most all of it.
        """
        limit = min(max(watts or self.watts, self.watts / 4), self.watts)
        return min(1.0, math.pow(limit / self.tflops["bf16"] / _FULL_CLOCK, 1 / 3))


_SXM = {"int8": 1978.9, "fp8": 1978.9, "bf16": 989.4, "fp16": 989.4, "fp32": 66.9, "fp64": 66.9}
_PCIE = {"int8": 1513.0, "fp8": 1513.0, "bf16": 756.5, "fp16": 756.5, "fp32": 51.2, "fp64": 51.2}
_NVL = {"int8": 1670.5, "fp8": 1670.5, "bf16": 835.5, "fp16": 835.5, "fp32": 60.0, "fp64": 60.0}
_H20 = {"int8": 296.0, "fp8": 296.0, "bf16": 148.0, "fp16": 148.0, "fp32": 44.0, "fp64": 1.0}
_A100 = {"int8": 624.0, "bf16": 312.0, "fp16": 312.0, "fp32": 19.5, "fp64": 19.5}
_FULL_CLOCK = 700 / 989.4  # watts for each 1e12 operations a second in bf16

# NVIDIA's datasheets, whose rates of tensor cores with sparsity are halved: H100 (March 2022, table 1; 2024 for the
# NVL), H200 (2024), GH200 (2024), A100 (2021).  Those of the H800 and the H20 are as the trade press gave them (2023).
GPU_MODELS: Mapping[str, GpuModel] = {
    "NVIDIA H100 80GB HBM3": GpuModel(_SXM, 3.35, 700),
    "NVIDIA H100 PCIe": GpuModel(_PCIE, 2.0, 350),
    "NVIDIA H100 NVL": GpuModel(_NVL, 3.9, 400),
    "NVIDIA H200": GpuModel(_SXM, 4.8, 700),
    "NVIDIA H200 NVL": GpuModel(_NVL, 4.8, 600),
    "NVIDIA H800": GpuModel({**_SXM, "fp64": 1.0}, 3.35, 700),
    "NVIDIA H20": GpuModel(_H20, 4.0, 400),
    # Its module's 450 to 1000 W include the processor; the GPU is the H100's.
    "NVIDIA GH200 480GB": GpuModel(_SXM, 4.0, 700),
    "NVIDIA A100-SXM4-40GB": GpuModel(_A100, 1.555, 400),
    "NVIDIA A100-SXM4-80GB": GpuModel(_A100, 2.039, 400),
    "NVIDIA A100 80GB PCIe": GpuModel(_A100, 1.935, 300),
}
