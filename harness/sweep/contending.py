"""Which plans a race measures at all: those that the tables do not predict to be surely slower than their choice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attnbench.choosing.fresh_regret import contenders, without
from attnbench.choosing.regret_fixed import torch_default
from attnbench.kernels.capabilities import Device
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry
from attnbench.tables.user_table import Known

from ..cases.case import Case
from .devices import Task

__all__ = ["contending"]

_SLOWER = "the tables predict that it is surely slower than what they choose here"


def contending(
    tasks: Iterable[Task], tables: Known, known: Registry, device: Device, *, fresh: bool = False
) -> list[Task]:
    """The tasks; those of plans that cannot win by the tables do not run and have the status ``slower``.

    Torch's default always runs, because speed-ups are relative to it.  With ``fresh`` it may be left out too, the
    tables are not asked for their own entries of a case, and what they choose is ``required``.
    """
    tasks = list(tasks)
    plans: dict[Case, list[Plan]] = {}
    for task in tasks:
        if task.runs:
            plans.setdefault(task.case, []).append(task.plan)
    found = {
        case: contenders(case.spec, own, without(tables, case.spec) if fresh else tables, known, device)
        for case, own in plans.items()
    }

    if not fresh:
        for case, own in plans.items():
            if (default := torch_default(own, known)) is not None:
                found[case].setdefault(default, False)

    def judged(task: Task) -> Task:
        if not task.runs:
            return task
        if task.plan not in found[task.case]:
            return replace(task, status="slower", reasons=(_SLOWER,))
        return replace(task, required=fresh and found[task.case][task.plan])

    return [judged(task) for task in tasks]
