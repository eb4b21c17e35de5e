"""Decide which plans became slower, with a bound on the probability of any false alarm over all rows together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..measure.timing import Cost
from ..results.records import Measurement
from ..results.visits import samples_of, sampling_error, visit_medians
from ..statistics import TimeVerdict, compare
from .noise import Kind, Observed, noise_of
from .terms import Gated, Key, Limits

__all__ = ["CostChange", "Timed", "changes_of", "ratios", "timed_costs", "verdict_of"]

_FEW = 4  # samples: with fewer, one delayed sample is at least a third of them
_FAR = 1.3  # visits of unchanged GPU times were never all apart by this factor
_DECIDES = 0.5  # of a call: above this share the host's part is what varies


@dataclass(frozen=True)
class CostChange:
    """One cost of one plan before and after.

    ``ratio`` is above 1 if it takes longer now; ``interval`` contains it with 95 %.  ``visible`` is the smallest
    slow-down that would have been found with 95 %, ``limit`` the one that had to be: 0.03 is 3 %.  ``visits`` and
    ``median`` are of BASE and NEW: milliseconds, or ratios to the baseline plan if ``relative``.  ``host``: a GPU's
    host decides it, and ``limit`` is the host's.  ``replayed``: only one side was timed as a CUDA graph, so that
    nothing can be concluded.
    """

    cost: Gated
    verdict: TimeVerdict
    ratio: float
    interval: tuple[float, float]
    visible: float
    limit: float
    visits: tuple[int, int]
    median: tuple[float, float]
    host: bool = False
    replayed: bool = False
    relative: bool = False


@dataclass(frozen=True)
class Timed:
    """The medians of visits of one cost on both sides, and what limits their precision.

    ``scatter`` is the least error of such a median by the row's samples, ``fewest`` the smaller number of samples.
    """

    cost: Gated
    kind: Kind
    limit: float
    observed: Observed
    scatter: float
    fewest: int
    replayed: bool
    relative: bool


def timed_costs(
    before: Measurement,
    after: Measurement,
    costs: Sequence[Gated],
    limits: Limits,
    baseline: tuple[Measurement, Measurement] | None = None,
) -> list[Timed]:
    """Each cost that both rows have, in the order of ``costs``; relative to the baseline's rows if given."""
    found = []
    for cost in costs:
        rows = (before, after, *(baseline or ()))
        if not all(_has(row, cost) for row in rows):
            continue
        kinds = {_kind(row, cost) for row in rows}
        kind: Kind = "host" if "host" in kinds else kinds.pop()
        taken = [visit_medians(row, _recorded(cost)) for row in rows]
        errors = [sampling_error(row, _recorded(cost), len(visits)) for row, visits in zip(rows, taken, strict=True)]
        if baseline is not None:
            taken = [ratios(taken[0], taken[2]), ratios(taken[1], taken[3])]
            errors = [math.hypot(errors[0], errors[2]), math.hypot(errors[1], errors[3])]
        fewest = min(len(samples_of(row, _recorded(cost))) for row in rows)
        replays = [cost in row.performance.replayed for row in rows]
        graph = replays[0] != replays[1] or replays[-2] != replays[-1]
        limit = limits.host if kind == "host" else limits.time
        found.append(Timed(cost, kind, limit, Observed(*taken), max(errors), fewest, graph, baseline is not None))
    return found


def changes_of(rows: Mapping[Key, Sequence[Timed]]) -> dict[Key, dict[Gated, CostChange]]:
    """The changes of every cost of all rows, judged with the noise of their kind and corrected for their number."""
    every = [each for row in rows.values() for each in row]
    noises = {
        kind: noise_of(kind, [each.observed for each in every if each.kind == kind and not each.replayed])
        for kind in {each.kind for each in every}
    }
    changes: dict[Key, dict[Gated, CostChange]] = {}
    for key, row in rows.items():
        own = {}
        for each in row:
            noise = noises[each.kind]
            noise = replace(noise, visit=max(noise.visit, each.scatter))
            found = compare(*each.observed, factor=each.limit, noise=noise, family=len(every))
            own[each.cost] = CostChange(
                each.cost,
                "uncertain" if each.replayed else found.verdict,
                found.ratio,
                found.interval,
                math.inf if each.replayed else found.visible,
                each.limit,
                (len(each.observed.before), len(each.observed.after)),
                (float(np.median(each.observed.before)), float(np.median(each.observed.after))),
                each.kind == "host",
                each.replayed,
                each.relative,
            )
        apart = [_far_apart(each) for each in row]
        for each, verdict in zip(row, apart, strict=True):
            if verdict is not None and apart.count(verdict) > 1 and own[each.cost].verdict == "uncertain":
                own[each.cost] = replace(own[each.cost], verdict=verdict)
        changes[key] = {each.cost: _confirmed(each, own) for each in row}
    return changes


def _far_apart(each: Timed) -> TimeVerdict | None:
    """The direction if all visits of a device time lie far beyond all visits of the other side.

    If two costs of a row agree in this, no test is needed; two visits at two clocks would not pass one.
    """
    far = max(_FAR, math.sqrt(1 + each.limit))
    if each.kind == "device" and not each.replayed:
        if min(each.observed.after) > far * max(each.observed.before):
            return "slower"
        if min(each.observed.before) > far * max(each.observed.after):
            return "faster"
    return None


def _confirmed(each: Timed, changes: Mapping[Gated, CostChange]) -> CostChange:
    """The change of a cost; with a single visit or few samples it needs another cost that shows the same."""
    change, others = changes[each.cost], [other for cost, other in changes.items() if cost != each.cost]
    if min(change.visits) > 1 and (each.fewest >= _FEW or not others):
        return change
    visible = max(change.visible, min((other.visible for other in others), default=math.inf))
    if change.verdict == "same":
        known = visible <= each.limit
    else:
        known = any(other.verdict == change.verdict for other in others)
    return replace(change, visible=visible, verdict=change.verdict if known else "uncertain")


def verdict_of(changes: Mapping[Gated, CostChange]) -> TimeVerdict:
    """The verdict of a row: ``slower`` if any cost is, else ``faster`` if any is, ``same`` if every cost is."""
    found = {each.verdict for each in changes.values()}
    for verdict in ("slower", "faster"):
        if verdict in found:
            return verdict
    return "same" if found == {"same"} else "uncertain"


def ratios(medians: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """The ratio of visits to the baseline's at the same position, as many as the shorter list has.

    A sweep visits its plans in turns, so visits at the same position were made at about the same time, under the same
    conditions.  The longer list is condensed to medians of neighbours.
    """
    count = min(len(medians), len(baseline))
    top, bottom = (
        np.array([np.median(part) for part in np.array_split(np.asarray(each, dtype=np.float64), count)])
        for each in (medians, baseline)
    )
    return [float(ratio) for ratio in top / bottom]


def _has(row: Measurement, cost: Gated) -> bool:
    """Whether the row has the cost; on a CPU the host is the device."""
    if cost == "host":
        return row.performance.host_ms is not None and row.environment.device_type != "cpu"
    return cost in row.time_ms


def _kind(row: Measurement, cost: Gated) -> Kind:
    if row.environment.device_type == "cpu":
        return "cpu"
    if cost == "host":
        return "host"
    host = row.performance.host_ms if cost == "call" else None
    return "host" if host and np.median(host) > _DECIDES * row.median_ms() else "device"


def _recorded(cost: Gated) -> Cost | None:
    return None if cost == "host" else cost
