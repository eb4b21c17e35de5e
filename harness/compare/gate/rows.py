"""Select the rows to gate, and take a first look at each: whether it still runs, and how accurate it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from attnbench.kernels.devices import describe
from attnbench.kernels.registry import Registry

from ...capture.file import PREFIX
from ...cases.case import Case
from ...measure.timing import Timer
from ...results.records import Measurement
from ...sweep.devices import Task
from ..noise import most_run, usual_run
from ..terms import Gated, Key, Terms
from .series import GateRow, Series
from .sides import Question

__all__ = ["MOST_ROWS", "brief_timer", "choose_rows", "gate_rows", "tasks"]

MOST_ROWS = 20
_RUNNERS_UP = 1  # for each of the two default budgets of a caller: 16 bits, and FP8 opted into
# Together they are the call: the device's work in either pass, and the host.
_COSTS: dict[str, tuple[Gated, ...]] = {"cuda": ("prepared", "backward", "host"), "cpu": ("call",)}


def choose_rows(base: Mapping[Key, Measurement], most: int = MOST_ROWS) -> list[Measurement]:
    """The fastest accurate plan of each case in 16 bits and in FP8, as ``auto`` chooses, then the runners-up.

    Of the runners-up the closest to the fastest come first; ``most`` rows in all.
    """
    winners: dict[Key, Measurement] = {}
    others: dict[Key, float] = {}
    for own in _by_case(base).values():
        for rivals in (own, [row for row in own if not row.plan.fp8]):
            ranked = sorted(rivals, key=Measurement.median_ms)
            for place, row in enumerate(ranked[: 1 + _RUNNERS_UP]):
                if place == 0:
                    winners[row.key] = row
                else:
                    others[row.key] = row.median_ms() / ranked[0].median_ms()
    runners_up = sorted(others.keys() - winners.keys(), key=lambda key: (others[key], key[0], str(key[1])))
    return [*winners.values(), *(base[key] for key in runners_up)][:most]


def _by_case(base: Mapping[Key, Measurement]) -> Mapping[str, list[Measurement]]:
    cases: dict[str, list[Measurement]] = {}
    for row in base.values():
        if row.status == "ok" and not row.emulated and repeatable(row):
            cases.setdefault(row.case, []).append(row)
    return cases


def repeatable(row: Measurement) -> bool:
    """Whether the row's inputs can be drawn again from its case's name and spec: captured inputs cannot."""
    return row.measured and not any(family.startswith(PREFIX) for family in row.error)


def tasks(rows: Sequence[Measurement], registry: Registry, device: torch.device) -> Iterator[Task]:
    """The rows as tasks of a sweep of NEW."""
    facts = describe(device)
    for row in rows:
        yield Task.of(Case(row.case, row.spec, tuple(row.error), row.lengths), row.plan, registry, facts)


def brief_timer(device: torch.device) -> Timer:
    """A timer for the first look, whose times decide nothing."""
    return replace(Timer.for_device(device), limit=0.02, fewest=1, narrow=1.0)


def _between_runs(cost: str, device_type: str, *, same_gpu: bool) -> float:
    """The deviation, in logarithms, between two runs of the same code beside the anchor.

    Three consecutive runs on one H200, five rows of 0.6 to 1.3 ms, were 0.1 % apart and 0.22 % at most; 0.4 % is
    assumed.  On other devices the anchor has not been shown to help.
    """
    if device_type == "cpu" or cost == "host":
        return usual_run("cpu" if device_type == "cpu" else "host")
    return 0.004 if same_gpu else most_run("device")


def gate_rows(
    rows: Sequence[Measurement],
    terms: Terms,
    device: torch.device,
    costs: Sequence[Gated] | None,
    recorded: Mapping[tuple[Key, Gated], list[list[float]]] | None,
    *,
    same_gpu: bool = True,
) -> list[GateRow]:
    """The rows with their gated costs; ``recorded`` are BASE's rounds if BASE is not visited itself."""
    names = _COSTS[device.type] if costs is None else costs
    found = []
    for number, row in enumerate(rows):
        limits = terms.limits_of(row.key)
        series = {
            cost: Series(
                cost,
                limits.host if cost == "host" else limits.time,
                device.type,
                recorded=None if recorded is None else recorded.get((row.key, cost), []),
                run=0.0 if recorded is None else _between_runs(cost, device.type, same_gpu=same_gpu),
            )
            for cost in names
            if (cost != "backward" or row.spec.training) and (cost != "host" or device.type != "cpu")
        }
        found.append(GateRow(Question(number, row.key, row.spec, next(iter(row.error)), row.lengths), dict(series)))
    return found
