"""Valid rows of an H200 for a submission: three plans on twelve specs, four visits each."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

from report_rows import BEGAN, row
from row_facts import with_facts

from attnbench.harness.results.records import Measurement
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.environment import Environment

H200 = Environment(
    device_type="cuda", device_name="NVIDIA H200", capability="9.0", driver="580.159.04", uuid_hash="0123456789ab",
    clock_mhz=1980, power_cap_w=700, memory_bytes=150_109_880_320, cuda="13.0", cudnn="9.19.0", torch="2.11.0",
    triton="3.6.0", python="3.12.3", platform="Linux-6.18.44-x86_64-with-glibc2.39", cpu="Intel(R) Xeon(R) Processor",
    threads=16, attnbench="0.1.0", commit="740ed255f90d",
    backends={"fa3": "0.4.2.post2", "sdpa-flash": "2.11.0+cu130", "triton": "3.6.0"},
    origins={"fa3": "sglang", "sdpa-flash": "torch", "triton": "triton"},
)  # fmt: skip
SPECS = [AttentionSpec.make(batch=2, heads=16, seqlen_q=1024 + 64 * number, head_dim=128) for number in range(12)]
PLANS = {"sdpa-flash:bf16": (1.0, 0.002), "fa3:bf16": (0.5, 0.002), "triton:fp8": (0.4, 0.08)}
VISITS = 4


def with_visits(made: Measurement, *medians: float) -> Measurement:
    """The row with one visit of five samples for each of these median call times in milliseconds."""
    draw = random.Random(str(made.plan))
    calls = [each * draw.uniform(0.999, 1.001) for each in medians for _ in range(5)]
    times = {"kernel": [each * 0.8 for each in calls], "call": calls}
    return with_facts(made, time_ms=times, visits={cost: [5] * len(medians) for cost in times})


def valid_rows(environment: Environment = H200, factor: float = 1.0, **changes: Any) -> list[Measurement]:
    """A row for every plan and spec, started one after the other."""
    rows = []
    for spec in SPECS:
        for plan, (ms, error) in PLANS.items():
            began = BEGAN + timedelta(minutes=len(rows))
            made = row(plan, ms, error, spec, environment=environment, started=began, **changes)
            rows.append(with_visits(made, *[factor * ms] * VISITS))
    return rows
