"""A sweep: every plan on every case, one row for each, written as soon as it is known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from attnbench.errors import MisuseError, UnknownBackendError
from attnbench.kernels.capabilities import Device
from attnbench.kernels.devices import describe
from attnbench.kernels.plan import Plan, backend_of
from attnbench.kernels.registry import Registry
from attnbench.problem.spec import AttentionSpec

from ..cases.case import Case, admits
from ..measure.setup import DeviceSetup
from ..results.records import Measurement
from ..results.store import Store
from .device_sweep import Phase, PhaseStarted
from .devices import DeviceSweeps, Task

__all__ = ["Ended", "Event", "Finished", "Started", "Task", "run_sweep", "tasks_of"]

_PAIRS = 2  # a sweep of every forward with every backward would take hours


@dataclass(frozen=True)
class Started:
    """A device has started a phase; ``index`` of the ``total`` plans that can be measured are done."""

    index: int
    total: int
    doing: PhaseStarted


@dataclass(frozen=True)
class Finished:
    """A row was written, or was there already (``resumed``).

    ``index`` of the ``total`` plans that can be measured are now done; plans that cannot are in neither number.
    """

    index: int
    total: int
    row: Measurement
    resumed: bool


@dataclass(frozen=True)
class Ended:
    """All is measured: the devices' seconds in each phase and in total, and remarks for the user."""

    spent: Mapping[Phase, float]
    seconds: float
    notes: tuple[str, ...]


Event = Started | Finished | Ended


def tasks_of(
    cases: Sequence[Case], registry: Registry, device: torch.device, dtype: str, names: Sequence[str] = ()
) -> list[Task]:
    """Every plan that a sweep of ``dtype`` admits on every case, without yardsticks; or those that ``names`` select.

    Of the pairs of a forward with another backend's backward, only the two preferred ones that can serve are swept; a
    plan that is named is always kept.  A name is a plan (``fa3:fp8>fa4:bf16``), a backend (``fa3``) or a kernel
    (``fa3:fp8``, listed or made by its backend on request).  Backend and kernel names select the plans with that
    forward, or, if there are none, with that backward.  Raises UnknownBackendError for an unknown name and MisuseError
    if there is nothing to measure.
    """
    facts = describe(device)
    for name in names:
        _check(name, registry)
    tasks = []
    for case in cases:
        plans = [plan for plan in _plans(case.spec, registry, facts, names) if admits(dtype, plan)]
        tasks += [Task.of(case, plan, registry, facts) for plan in plans]
    if not tasks:
        raise MisuseError(f"a sweep of {dtype} has no plan among {', '.join(names) or 'the installed backends'}")
    return tasks


def run_sweep(tasks: Sequence[Task], setups: Sequence[DeviceSetup], store: Store) -> Iterator[Event]:
    """Measure the tasks that the store does not hold yet; each row is written before it is yielded.

    Each device takes the next waiting case.  Raises MisuseError before anything runs if a stored row has another spec
    or error bound than its task, OutputError if a row cannot be written.
    """
    done = store.done
    for task in tasks:
        if task.key in done:
            _check_resumable(task, done[task.key], setups[0])
    index, total = 0, sum(task.runs for task in tasks)
    runs = {task.key: task.runs for task in tasks}
    for row in list(store.rows):
        if row.key in runs:
            index += runs[row.key]
            yield Finished(index, total, row, resumed=True)
    remaining = [task for task in tasks if task.key not in done]
    with DeviceSweeps(setups) as sweeps:
        for event in sweeps.measured(remaining):
            if isinstance(event, PhaseStarted):
                yield Started(index, total, event)
            else:
                store.append(event)
                index += runs[event.key]
                yield Finished(index, total, event, resumed=False)
        yield Ended(sweeps.spent, sweeps.seconds, tuple(sweeps.notes))


def _check(name: str, registry: Registry) -> None:
    """Raise UnknownBackendError unless something has the name; here a backward kernel's name is allowed too."""
    if name not in registry.backwards:
        registry.check(name)


def _plans(spec: AttentionSpec, registry: Registry, facts: Device, names: Sequence[str]) -> list[Plan]:
    listed = registry.plans(spec)
    if not names:
        yardsticks = {name for name, backend in registry.backends.items() if facts.type in backend.yardstick}
        return _few_pairs(
            [plan for plan in listed if backend_of(plan.forward) not in yardsticks], registry, facts, spec
        )
    kept: dict[Plan, None] = {}
    for name in names:
        kept |= dict.fromkeys(_named(name, spec, registry, listed))
    return list(kept)


def _few_pairs(plans: Sequence[Plan], registry: Registry, facts: Device, spec: AttentionSpec) -> list[Plan]:
    """The plans, with only the first ``_PAIRS`` cross-backend pairs of each forward; every backward is kept."""

    def place(plan: Plan) -> tuple[bool, float]:
        assert plan.backward is not None, "only pairs are ordered"
        preference = registry.backward(plan.backward).preference
        return registry.reasons(plan, spec, facts)[0] != "ok", math.inf if preference is None else preference

    pairs: dict[str, list[Plan]] = {}
    for plan in plans:
        if plan.backward is not None and backend_of(plan.backward) != backend_of(plan.forward):
            pairs.setdefault(plan.forward, []).append(plan)
    surplus = {plan for each in pairs.values() for plan in sorted(each, key=place)[_PAIRS:]}
    seen = {plan.backward for plan in plans if plan not in surplus}
    kept = []
    for plan in plans:
        if plan not in surplus or plan.backward not in seen:
            kept.append(plan)
            seen.add(plan.backward)
    return kept


def _named(name: str, spec: AttentionSpec, registry: Registry, listed: list[Plan]) -> list[Plan]:
    if ">" in name:
        return [Plan.parse(name)] if spec.training else []
    if ":" not in name:
        starting = [plan for plan in listed if backend_of(plan.forward) == name]
        return starting or [plan for plan in listed if plan.backward and backend_of(plan.backward) == name]
    try:
        return registry.plans_with(name, spec)
    except UnknownBackendError:  # a backward kernel's name: _check has accepted it
        return [plan for plan in listed if plan.backward == name]


def _check_resumable(task: Task, row: Measurement, setup: DeviceSetup) -> None:
    if row.spec != task.case.spec:
        raise MisuseError(f"the results to resume hold a case {row.case!r} of another spec; use another folder (--out)")
    if row.lengths != task.case.lengths:
        raise MisuseError(
            f"the results to resume hold a case {row.case!r} of sequences of other lengths; use another folder (--out)"
        )
    if row.measured and row.error.keys() != set(task.case.families):
        raise MisuseError(
            f"the results to resume took the errors of {row.case!r} on {', '.join(row.error)}, "
            f"not {', '.join(task.case.families)}; use another folder (--out)"
        )
    bound = setup.bound(task.plan, task.case)
    if row.measured and row.correctness.bound != bound:
        raise MisuseError(
            f"the results to resume were judged by an error of {row.correctness.bound:g}, not {bound:g}; "
            "give the same --max-error or another folder (--out)"
        )
