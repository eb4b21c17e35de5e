"""Kernels with known delays in this process, calls of them, and rows without measuring, for the tests of autotune."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import delayed_kernels
import pytest
import torch
from delayed_kernels import spec
from planted import setup
from row_facts import measurement
from torch import Tensor

from attnbench import AttentionSpec, api
from attnbench.harness.autotune import run as tuning
from attnbench.harness.autotune.deadline import Work
from attnbench.harness.results.records import Measurement
from attnbench.harness.sweep.run import Finished
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import registry
from attnbench.tables.environment import Environment
from attnbench.tables.table import Table
from attnbench.tables.user_table import user_table_path

SLOW, FAST, FP8 = "paced:bf16-slow", "paced:bf16-fast", "paced:fp8"
BREAKS = "paced:bf16-breaks"


@contextmanager
def delayed_kernels_installed() -> Iterator[None]:
    """Installs kernels of which the first in the declared order is the slowest."""
    with pytest.MonkeyPatch.context() as patch:
        delayed_kernels.install(patch.setattr)
        api.forget_choices()
        yield
    registry.cache_clear()
    api.forget_choices()


def record_work(patch: pytest.MonkeyPatch) -> list[Work]:
    """Replaces measuring; returns the list of the work that would have been measured, in order."""
    works: list[Work] = []

    def nothing(lab: Any, work: Sequence[Work], deadline: float) -> Iterator[Finished]:
        works.extend(work)
        yield from ()

    patch.setattr(tuning, "measured_within", nothing)
    return works


@cache
def here() -> Environment:
    return setup(delayed_kernels.SOURCE).environment


def row(asked: AttentionSpec, plan: str | Plan, call_ms: float | None, error: float = 0.002) -> Measurement:
    """A measured row of the plan; without a time, the row of a plan that timed out."""
    numbers = {
        "time_ms": dict.fromkeys(("kernel", "prepared", "call"), [call_ms] * 5),
        "error": {family: {"out": error} for family in ("normal", "outlier")},
        "bound": 0.1, "declared_error": 0.05, "truth": "fp64", "timer": "perf_counter", "drawn_on": "cpu",
    }  # fmt: skip
    ended = {"status": "ok", **numbers} if call_ms else {"status": "timeout", "reason": "no answer within 5 s"}
    return measurement(
        case=str(asked),
        spec=asked,
        plan=Plan.parse(str(plan)),
        started=datetime.now(timezone.utc),
        environment=here(),
        **ended,
    )


def rows_of(*lengths: int) -> list[Measurement]:
    """Rows of the slow and the fast plan at specs of these lengths, as if measured."""
    times = {SLOW: 1e3 * delayed_kernels.SLOW, FAST: 1e3 * delayed_kernels.FAST}
    return [row(spec(length), plan, ms) for length in lengths for plan, ms in times.items()]


def replay_rows(
    rows: Sequence[Measurement], calls: list[list[AttentionSpec]] | None = None, most: int | None = None
) -> Callable[..., Iterator[Finished]]:
    """A replacement for measuring that yields the given rows of the requested work; ``calls`` records the specs."""

    def measured(lab: Any, work: Sequence[Work], deadline: float) -> Iterator[Finished]:
        if calls is not None:
            calls.append([case.spec for case, _ in work])
        wanted = [(case.spec, plan) for case, plans in work for plan in plans]
        for index, row in enumerate([row for row in rows if (row.spec, row.plan) in wanted][:most]):
            yield Finished(index, len(wanted), row, resumed=False)

    return measured


def tensors(length: int = 32, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shape = (1, 2, length, 16)
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_(grad) for _ in range(3)]


def own_path() -> Path:
    return user_table_path(here())


def entries(path: Path) -> dict[AttentionSpec, set[str]]:
    """The plans of each spec."""
    found: dict[AttentionSpec, set[str]] = {}
    for asked, plan in Table.load(path).entries:
        found.setdefault(asked, set()).add(str(plan))
    return found


def children() -> set[str]:
    """The running child processes of this process."""
    found: set[str] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            found |= set((task / "children").read_text().split())
    return found
