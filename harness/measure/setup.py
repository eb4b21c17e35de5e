"""What every measurement of a sweep on one device shares."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch

from attnbench.choosing.budget import class_bound
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry
from attnbench.tables.environment import Environment

from ..cases.case import Case
from .timing import Timer

__all__ = ["INSTALLED", "DeviceSetup", "registry_of"]

INSTALLED = "attnbench.kernels.registry:registry"


def registry_of(source: str) -> Registry:
    """The registry that the function called ``module:function`` returns."""
    return cast(Registry, pkgutil.resolve_name(source)())


@dataclass(frozen=True)
class DeviceSetup:
    """One device, its environment, how to time on it, and where its workers find the registry.

    ``max_error`` replaces the bound of FP8 plans; other plans keep that of their precision.  A request to a worker
    (preparing a plan, a visit, judging it) that takes longer than ``seconds`` counts as a hang.  With ``race`` only
    the plans of a case that may win are measured (attnbench.harness.sweep.race).
    """

    device: torch.device
    environment: Environment
    timer: Timer
    source: str = INSTALLED
    max_error: float | None = None
    seconds: float = 300.0
    race: bool = False

    @cached_property
    def registry(self) -> Registry:
        """The registry in this process; each worker makes its own."""
        return registry_of(self.source)

    @property
    def uuid(self) -> str | None:
        """The GPU's UUID as the driver and NVML give it; None on a CPU."""
        if self.device.type != "cuda":
            return None
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def bound(self, plan: Plan, case: Case) -> float:
        """The largest error for which the plan is still ``ok``."""
        return self.max_error if plan.fp8 and self.max_error is not None else class_bound(plan, case.spec)
