"""What the tables say of a plan at a spec: measured there, or predicted from what was measured elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ..kernels.plan import Plan
from ..problem.spec import AttentionSpec
from ..tables.table import Entry, Table
from ..tables.user_table import Known
from .candidate import Candidate, CandidateVerdict
from .cost_model.errors import ErrorModel, summed
from .cost_model.pool import PooledModel
from .similarity import SpecClass, class_of, distance

__all__ = ["Evidence"]


class Evidence:
    """The tables' facts about one spec.

    A plan measured at the spec is judged by that entry alone.  Elsewhere all tables speak, scaled ones too: the error
    that a new measurement stays below with 95 % confidence (``ErrorModel``), and that of the nearest spec in the class
    (``similarity``), must be within the budget.  If none was measured with as many keys (in
    training also as many queries, over which dK and dV are sums), the error is extrapolated by the growth that its
    kernels declare.  A plan whose growth is unknown is not chosen there, nor one that failed in the class at the
    nearest spec or at one that is nowhere larger.  The cost models of the tables predict its time (``PooledModel``).

    Where a spec has sequences of unequal length, plans of which the class holds such are judged by these, and others by
    sequences of one length: errors by those as long as the longest, times by those of as much work, with a wider error.
    """

    def __init__(self, spec: AttentionSpec, known: Known) -> None:
        # Returning the LSE changes neither time nor error; sinks and merging change no error, and add as much to each
        # plan.
        self._spec = spec.replace(return_lse=False, sinks=False, partial=False)
        table = known.table_of(self._spec)
        self._here = known.at(self._spec)
        self._source, self._scaling_error = (None, 0.0) if table is None else (table.scaled_from, table.time_error)
        # Where the spec was measured, that table speaks of its neighbours too: times of two machines must not meet.
        index = _index(_Same(known.tables if table is None else (table,)))
        self._class = index.about(self._spec)
        self.model, self._errors = index.model, index.errors

    def candidate(self, plan: Plan, budget: float, growth: float | None) -> Candidate | None:
        """The plan as ``eligible``, ``inaccurate`` or ``unmeasured``; None if nothing is known about it.

        ``growth`` is the factor by which its error grows when the keys double, None if unknown.
        """
        entry = self._here.get(plan)
        if entry is not None and entry.status != "slower":
            return _measured(entry, budget).scaled(self._source, self._scaling_error)
        found = self._predicted(plan, budget, growth)
        return found if found is None or entry is None else replace(found, time_ms=entry.time_ms)

    def _predicted(self, plan: Plan, budget: float, growth: float | None) -> Candidate | None:
        alike = self._class.get(plan, [])
        nearest = min(alike, key=lambda each: self._order(each.spec), default=None)
        failed = [each for each in alike if not each.usable and (each is nearest or self._covers(each.spec))]
        if failed:
            worst = min(failed, key=lambda each: self._order(each.spec))
            return Candidate(plan, "unmeasured", (f"at {worst.spec}: {worst.unusable}",))
        predicted, time = self._errors.predict(plan, self._spec), self.model.predict(plan, self._spec)
        if predicted is None:
            return None
        if time is None:
            return Candidate(plan, "unmeasured", ("nothing like this was measured of it",))
        tokens, most = summed(self._spec), self._errors.most_summed(plan, self._spec)
        beyond = tokens > most
        grown = 1.0 if not beyond else None if growth is None else growth ** math.log2(tokens / most)
        # A fault of a kernel at such shapes alone shows in the nearest one, hardly in a fit over all.
        error, family = predicted if nearest is None else max(predicted, nearest.worst)
        needs = error * (grown or 1.0)
        found = Candidate(
            plan=plan,
            verdict="eligible",
            time_ms=time.time_ms,
            error=needs,
            family=family,
            basis="predicted" if time.scaled_from is None else "scaled",
            time_error=time.error,
            needs=None if grown is None else needs,
            scaled_from=time.scaled_from,
            declared_beyond=most if beyond and plan.fp8 and grown is not None else None,
        )
        if not needs <= budget:
            reason = f"its predicted error of {needs:.3g} on {family} inputs exceeds the budget of {budget:g}"
            return _lost(found, "inaccurate", reason)
        if grown is None:
            what = "keys and queries" if self._spec.training else "keys"
            return _lost(
                found, "unmeasured", f"measured only up to {most} {what}, and FP8 errors may grow with their number"
            )
        return found

    def _covers(self, other: AttentionSpec) -> bool:
        """Whether the other spec is nowhere larger than this one."""
        sizes = ("seqlen_q", "seqlen_kv")
        fits = all(getattr(other, size) <= getattr(self._spec, size) for size in sizes)
        return fits and other.batch * other.heads <= self._spec.batch * self._spec.heads

    def _order(self, other: AttentionSpec) -> tuple[float, str]:
        return distance(other, self._spec), str(other)


def _measured(entry: Entry, budget: float) -> Candidate:
    if entry.unusable is not None:
        return Candidate(entry.plan, "unmeasured", (entry.unusable,))
    error, family = entry.worst
    found = Candidate(
        plan=entry.plan,
        verdict="eligible",
        time_ms=entry.time_ms,
        error=error,
        family=family,
        basis="measured",
        spread_ms=entry.spread_ms,
        needs=error,
    )
    if not error <= budget:
        size = f"error of {error:.3g}" if math.isfinite(error) else "infinite error"
        reason = f"its {size} on {family} inputs exceeds the budget of {budget:g}"
        return _lost(found, "inaccurate", reason)
    return found


def _lost(candidate: Candidate, verdict: CandidateVerdict, reason: str) -> Candidate:
    return replace(candidate, verdict=verdict, reasons=(reason,))


class _Index:
    """The entries of some tables by class and plan, except refusals, which are asked of the kernels anew, and plans
    that lost a race, of which only times are known.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        entries = [entry for table in tables for entry in table.entries.values()]
        self.classes: dict[SpecClass, dict[Plan, list[Entry]]] = {}
        for entry in entries:
            if entry.kept and entry.status != "slower":
                self.classes.setdefault(class_of(entry.spec), {}).setdefault(entry.plan, []).append(entry)
        self.model, self.errors = PooledModel(tables), ErrorModel(entries)

    def about(self, spec: AttentionSpec) -> dict[Plan, list[Entry]]:
        """The entries of each plan in the spec's class, or where it has none in that of sequences of one length."""
        own, equal = (self.classes.get(class_of(each), {}) for each in (spec, spec.replace(lengths=None)))
        return {**equal, **own}


class _Same:
    """Tables as a key by identity."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tables

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and list(map(id, other.tables)) == list(map(id, self.tables))

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.tables)))


@lru_cache(maxsize=512)  # more than a device has tables: each of them alone, and all together
def _index(same: _Same) -> _Index:
    return _Index(same.tables)
