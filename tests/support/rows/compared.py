"""Rows of two result sets for the tests of `attnbench compare`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from fakes import an_environment
from places import RESULTS
from row_facts import measurement, with_facts

from attnbench.harness.compare.terms import Limits, Terms
from attnbench.harness.results.records import Measurement
from attnbench.kernels.plan import Plan
from attnbench.problem.spec import AttentionSpec

HERE = an_environment(
    device_type="cuda", device_name="a GPU", capability="9.0", power_cap_w=700, backends={"fa3": "3.0"}
)
COMMITTED = RESULTS / "nvidia-h200"
QUICK = COMMITTED / "quick" / "measurements.jsonl.gz"
WIDE = Terms(limits=Limits(time=0.1))  # rows like these could show so much, and not 3 %
VISIT = 5  # samples


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
        "time_ms": (taken := changes.get("time_ms", times(seed))),
        "visits": {cost: _visits(len(samples)) for cost, samples in taken.items()},
        "error": {"normal": {"out": 0.05, "lse": 1e-7}, "outlier": {"out": 0.08}},
        "bound": 0.12,
        "declared_error": 0.06,
        "truth": "fp64",
        "timer": "cuda events",
        "drawn_on": "cuda",
        "started": datetime(2026, 11, 20, tzinfo=timezone.utc),
        "environment": HERE,
    }
    return measurement(**{**facts, **changes})


def _visits(samples: int) -> list[int]:
    return [min(VISIT, samples - start) for start in range(0, samples, VISIT)]


def passed_over(status: str, case: str = "a", plan: str = "fa3:fp8", **changes: Any) -> Measurement:
    nothing = {"time_ms": {}, "error": {}, "reason": "so it is"}
    lacking = dict.fromkeys(("bound", "declared_error", "truth", "timer", "drawn_on"))
    return row(case, plan, status=status, **nothing, **lacking, **changes)


def results(*rows: Measurement) -> dict[tuple[str, Plan], Measurement]:
    return {each.key: each for each in rows}


def written(folder: Path, rows: Iterable[Measurement]) -> Path:
    folder.mkdir()
    (folder / "measurements.jsonl").write_text("".join(f"{each.to_line()}\n" for each in rows))
    return folder


def slowed(row: Measurement, ratio: float, costs: Iterable[str] = ()) -> Measurement:
    """The row with all costs, or these, longer by the ratio."""
    chosen = set(costs) or row.time_ms.keys()
    times = {
        cost: [sample * ratio for sample in samples] if cost in chosen else samples
        for cost, samples in row.time_ms.items()
    }
    return with_facts(row, time_ms=times)
