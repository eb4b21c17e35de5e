"""What choosing by measurement saves over always using one backend, and over torch's own choice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..kernels.plan import Plan, backend_of
from ..kernels.registry import Registry
from ..problem.spec import Direction
from ..tables.table import Table
from ..tables.user_table import Known
from .evidence import Evidence
from .regret import Asked, chosen_at, geometric_mean, served

__all__ = ["TORCH_DEFAULT", "Fixed", "against_fixed", "torch_default"]

TORCH_DEFAULT = "torch's default"
_FLEX = "flex"  # torch's only fused kernel for windows and soft caps


@dataclass(frozen=True)
class Fixed:
    """Always using one ``backend``, compared with ``auto`` in one direction.

    It serves ``serves`` of ``specs`` specs within the budget.  On those, ``slow_down`` is the geometric mean of its
    time over auto's, minus one, and ``worst`` the largest.
    """

    backend: str
    direction: Direction
    specs: int
    serves: int
    slow_down: float
    worst: float


def against_fixed(table: Table, known: Registry, asked: Asked) -> list[Fixed]:
    """A row for each direction and backend, and for torch's default, the least slow-down first.

    Auto chooses by what was measured at the spec.  A backend is taken at its fastest plan that auto could take too.
    Torch's default is the first of its kernels, in its own order on a Hopper GPU, that served.
    """
    ratios: dict[tuple[Direction, str], list[float]] = defaultdict(list)
    specs: dict[Direction, int] = defaultdict(int)
    for spec in sorted({spec for spec, _ in table.entries}, key=str):
        here = served(table, spec, known)
        chosen = chosen_at(spec, here, Evidence(spec, Known.of(table)), asked, known)
        if chosen is None:
            continue
        specs[spec.direction] += 1
        winner, eligible = chosen
        times = {plan: here[plan].time_ms or 0.0 for plan in eligible}
        for backend, time in _by_backend(times, known):
            ratios[spec.direction, backend].append(time / times[winner.plan] if times[winner.plan] else 1.0)
    rows = [
        Fixed(backend, direction, specs[direction], len(each), geometric_mean(each) - 1, max(each) - 1)
        for (direction, backend), each in ratios.items()
    ]
    return sorted(rows, key=lambda row: (row.direction, row.slow_down, row.backend))


def torch_default(plans: Iterable[Plan], known: Registry) -> Plan | None:
    """The first of these plans in the order of ``scaled_dot_product_attention`` on Hopper; FlexAttention's if it has
    none of them, None if that is not there either.
    """
    places: dict[Plan, float] = {}
    for plan in plans:
        names = {backend_of(kernel) for kernel in plan.kernels}
        if plan.fp8 or len(names) > 1:
            continue
        (name,) = names
        order = math.inf if name == _FLEX else known.backend(name).sdpa_order
        if order is not None:
            places[plan] = order
    return min(places, key=lambda plan: places[plan], default=None)


def _by_backend(times: dict[Plan, float], known: Registry) -> Iterator[tuple[str, float]]:
    backends = {backend_of(plan.forward) for plan in times}
    for backend in sorted(backends):
        yield backend, _fastest(times, backend, times)
    declared = {name: place for name in backends if (place := known.backend(name).sdpa_order) is not None}
    if first := min(declared, key=declared.__getitem__, default=None):
        alone = [plan for plan in times if {backend_of(kernel) for kernel in plan.kernels} == {first}]
        yield TORCH_DEFAULT, _fastest(times, first, alone or times)


def _fastest(times: dict[Plan, float], backend: str, plans: Iterable[Plan]) -> float:
    return min(times[plan] for plan in plans if backend_of(plan.forward) == backend)
