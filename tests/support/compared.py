"""Rows of two result sets for the tests of `attnbench compare`, and a plug-in whose kernel can be slowed down."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnbench.environment import Environment
from attnbench.harness.records import Measurement
from attnbench.mask import Mask
from attnbench.plan import Plan
from attnbench.registry import Registry
from attnbench.spec import AttentionSpec

HERE = Environment(
    device_type="cuda", device_name="a GPU", torch="2.9.0", python="3.12.1", platform="Linux", cpu="a CPU", threads=2,
    attnbench="0.1.0", power_cap_w=700, backends={"fa3": "3.0"}, capability="9.0",
)  # fmt: skip
COMMITTED = Path(__file__).parents[2] / "results" / "nvidia-h200"
QUICK, INFERENCE = COMMITTED / "quick" / "measurements.jsonl", COMMITTED / "inference" / "measurements.jsonl.gz"
BLOCK = 10  # samples that stay together when a row is resampled, so that it stays as autocorrelated as it was


def times(seed: int, count: int = 40, spread: float = 0.003, ratio: float = 1.0) -> dict[str, list[float]]:
    rng = np.random.default_rng(seed)
    costs = {"kernel": 1.0, "prepared": 1.2, "call": 1.3}
    return {cost: (size * ratio * rng.lognormal(0, spread, count)).tolist() for cost, size in costs.items()}


def row(case: str = "a", plan: str = "fa3:fp8", seed: int = 0, **changes: Any) -> Measurement:
    """A forward that was measured; the case's name gives its length."""
    facts: dict[str, Any] = {
        "case": case,
        "spec": AttentionSpec.make(batch=1, heads=2, seqlen_q=64 + len(case), head_dim=16),
        "plan": Plan.parse(plan),
        "status": "ok",
        "time_ms": times(seed),
        "error": {"normal": {"out": 0.05, "lse": 1e-7}, "outlier": {"out": 0.08}},
        "bound": 0.12,
        "declared_error": 0.06,
        "truth": "fp64",
        "timer": "cuda events",
        "drawn_on": "cuda",
        "started": datetime(2026, 11, 20, tzinfo=timezone.utc),
        "environment": HERE,
    }
    return Measurement(**{**facts, **changes})


def passed_over(status: str, case: str = "a", plan: str = "fa3:fp8", **changes: Any) -> Measurement:
    nothing = {"time_ms": {}, "error": {}, "reason": "so it is"}
    lacking = dict.fromkeys(("bound", "declared_error", "truth", "timer", "drawn_on"))
    return row(case, plan, status=status, **nothing, **lacking, **changes)


def few_samples(case: str = "tiny", plan: str = "paced:bf16", **changes: Any) -> Measurement:
    """A row of this machine with three samples a cost, too few for a verdict, that can be measured again."""
    facts: dict[str, Any] = {
        "time_ms": times(0, 3),
        "spec": AttentionSpec.make(batch=1, heads=1, seqlen_q=16, head_dim=16, mask=Mask(right=0)),
        "environment": Environment.detect(torch.device("cpu"), Registry(())),
        "timer": "a clock",
        "drawn_on": "cpu",
    }
    return row(case, plan, **{**facts, **changes})


def results(*rows: Measurement) -> dict[tuple[str, Plan], Measurement]:
    return {each.key: each for each in rows}


def written(folder: Path, rows: Iterable[Measurement]) -> Path:
    folder.mkdir()
    (folder / "measurements.jsonl").write_text("".join(f"{each.to_line()}\n" for each in rows))
    return folder


def resampled(row: Measurement, rng: np.random.Generator) -> Measurement:
    """The row as another run could have measured it: blocks of its own samples, each cost's for itself."""

    def drawn(samples: list[float]) -> list[float]:
        block = min(BLOCK, len(samples))
        starts = rng.integers(len(samples), size=-(-len(samples) // block))
        places = (starts[:, None] + np.arange(block)).ravel()[: len(samples)] % len(samples)
        return np.asarray(samples)[places].tolist()

    return row.model_copy(update={"time_ms": {cost: drawn(samples) for cost, samples in row.time_ms.items()}})


def slowed(row: Measurement, ratio: float, costs: Iterable[str] = ()) -> Measurement:
    """The row with all costs, or these, longer by the ratio."""
    chosen = set(costs) or row.time_ms.keys()
    changed = {
        cost: [sample * ratio for sample in samples] if cost in chosen else samples
        for cost, samples in row.time_ms.items()
    }
    return row.model_copy(update={"time_ms": changed})


SLOWED_BY = "PACED_PLUGIN_MS"
PLUGIN = f"""
import os, time
from attnbench.backends.reference import BACKEND as REFERENCE
from attnbench.capabilities import Capabilities
from attnbench.kernel import Availability, Backend, ForwardKernel, Operands, Result

EXACT = next(kernel for kernel in REFERENCE.kernels if isinstance(kernel, ForwardKernel))

class Paced(ForwardKernel):
    rows = {{"cpu": Capabilities(dtypes=("bf16", "fp16", "fp32"))}}
    declared_error = 0.02

    def __init__(self, name, more):
        self.name, self.seconds = name, (4 + more) / 1e3

    def prepare(self, q, k, v, spec):
        return Operands(spec, q, k, v)

    def run(self, operands):
        time.sleep(self.seconds)
        out, lse, _ = EXACT.run(operands)
        return Result(out, lse)

BACKEND = Backend(
    "paced", "takes its time", lambda: Availability(version="1.0"),
    (Paced("paced:bf16", float(os.environ.get("{SLOWED_BY}", 0))), Paced("paced:fp16", 0.0)),
)
"""


def install_plugin(site: Path) -> None:
    """A distribution as pip lays it down: the kernel paced:bf16 takes as many more milliseconds as SLOWED_BY says."""
    (site / "paced_plugin.py").write_text(PLUGIN)
    info = site / "paced_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paced-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[attnbench.backends]\npaced = paced_plugin:BACKEND\n")


def python(path: Path, executable: str, **variables: str) -> Path:
    """A Python of another environment: the same one, with variables of its own."""
    exports = "".join(f"export {name}={value}\n" for name, value in variables.items())
    path.write_text(f'#!/bin/sh\n{exports}exec {executable} "$@"\n')
    path.chmod(0o755)
    return path
