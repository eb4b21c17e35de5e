"""The loop of a sweep: every plan on every case, one row each, written as soon as it is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from attnbench.devices import describe
from attnbench.errors import MisuseError, UnknownBackendError
from attnbench.plan import Plan, backend_of
from attnbench.registry import Registry
from attnbench.spec import AttentionSpec

from .cases import Case, admits
from .measure import Bench, Laboratory, failed, passed_over
from .records import Measurement, Status
from .store import Store

__all__ = ["Finished", "Started", "Task", "run_sweep", "tasks_of"]


@dataclass(frozen=True)
class Task:
    """A plan to be measured on a case (status ``ok``), or to be passed over (``unavailable``, ``refused``) and why."""

    case: Case
    plan: Plan
    status: Status
    reasons: tuple[str, ...]

    @property
    def key(self) -> tuple[str, Plan]:
        """What is measured once in a sweep."""
        return self.case.name, self.plan


@dataclass(frozen=True)
class Started:
    """A task is about to run; ``index`` counts from 1 among the ``total`` of the sweep."""

    index: int
    total: int
    task: Task


@dataclass(frozen=True)
class Finished:
    """A row has reached the disk, or was there already (``resumed``)."""

    index: int
    total: int
    row: Measurement
    resumed: bool


def tasks_of(
    cases: Sequence[Case], registry: Registry, device: torch.device, dtype: str, names: Sequence[str] = ()
) -> list[Task]:
    """Every plan that a sweep of ``dtype`` admits on every case, or those that the names keep.

    A name is a backend's (``fa3``) or a kernel's (``fa3:fp8``, listed or one that its
    backend makes) and keeps the plans that start with it, or that end with it where none
    starts so; or it is a plan (``fa3:fp8>fa4:bf16``).  Raises UnknownBackendError for names
    that nothing carries, MisuseError where nothing is left to measure.
    """
    facts = describe(device)
    for name in names:
        _check(name, registry)
    tasks = []
    for case in cases:
        plans = [plan for plan in _plans(case.spec, registry, names) if admits(dtype, plan)]
        for plan in plans:
            status, reasons = registry.reasons(plan, case.spec, facts)
            known: Status = "ok" if status == "ok" else "unavailable" if status == "unavailable" else "refused"
            tasks.append(Task(case, plan, known, tuple(reasons)))
    if not tasks:
        raise MisuseError(f"a sweep of {dtype} has no plan among {', '.join(names) or 'the installed backends'}")
    return tasks


def run_sweep(tasks: Sequence[Task], laboratory: Laboratory, store: Store) -> Iterator[Started | Finished]:
    """Measure the tasks that the store does not hold yet, case by case, writing each row before it is yielded.

    Raises MisuseError, before anything runs, where a row of the store was measured on another
    spec or judged by another bound than its task would be; OutputError where a row cannot be written.
    """
    done = store.done
    for task in tasks:
        if task.key in done:
            _check_resumable(task, done[task.key], laboratory)
    index = 0
    for case, group in groupby(tasks, key=lambda task: task.case):
        bench: Bench | Exception | None = None
        for task in group:
            index += 1
            if task.key in done:
                yield Finished(index, len(tasks), done[task.key], resumed=True)
                continue
            yield Started(index, len(tasks), task)
            if task.status == "ok" and bench is None:
                bench = _bench(case, laboratory)
            row = _row(task, bench, laboratory)
            store.append(row)
            yield Finished(index, len(tasks), row, resumed=False)


def _row(task: Task, bench: Bench | Exception | None, laboratory: Laboratory) -> Measurement:
    if task.status != "ok":
        return passed_over(task.case, task.plan, task.status, list(task.reasons), laboratory)
    if isinstance(bench, Exception):
        return failed(task.case, task.plan, bench, laboratory)
    assert bench is not None, "made for the first task of the case that runs"
    return bench.measure(task.plan)


def _bench(case: Case, laboratory: Laboratory) -> Bench | Exception:
    try:
        return Bench(case, laboratory)
    except Exception as error:  # a case too large for this machine costs its own rows, each with this reason
        return error.with_traceback(None)  # whose frames would keep the tensors alive


def _check(name: str, registry: Registry) -> None:
    """Raise UnknownBackendError unless something carries the name; a backward's is a name here, too."""
    if name not in registry.backwards:
        registry.check(name)


def _plans(spec: AttentionSpec, registry: Registry, names: Sequence[str]) -> list[Plan]:
    listed = registry.plans(spec)
    if not names:
        return listed
    kept: dict[Plan, None] = {}
    for name in names:
        kept |= dict.fromkeys(_named(name, spec, registry, listed))
    return list(kept)


def _named(name: str, spec: AttentionSpec, registry: Registry, listed: list[Plan]) -> list[Plan]:
    if ">" in name:
        return [Plan.parse(name)] if spec.training else []
    if ":" not in name:
        starting = [plan for plan in listed if backend_of(plan.forward) == name]
        return starting or [plan for plan in listed if plan.backward and backend_of(plan.backward) == name]
    try:
        return registry.plans_with(name, spec)
    except UnknownBackendError:  # it is a backward, or _check would have raised
        return [plan for plan in listed if plan.backward == name]


def _check_resumable(task: Task, row: Measurement, laboratory: Laboratory) -> None:
    if row.spec != task.case.spec:
        raise MisuseError(f"the results to resume hold a case {row.case!r} of another spec; use another folder (--out)")
    bound = laboratory.bound(task.plan, task.case)
    if row.bound is not None and row.bound != bound:
        raise MisuseError(
            f"the results to resume were judged by an error of {row.bound:g}, not {bound:g}; "
            "give the same --max-error or another folder (--out)"
        )
