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
from .candidate import Candidate, Verdict
from .cost_model.errors import ErrorModel
from .cost_model.predict import CostModel
from .similarity import SpecClass, class_of, distance, of_one_length

__all__ = ["Evidence"]

# What predicting packed batches from those of one length adds to the error.  On an H200 90 predictions, of 9 plans at
# 64k tokens, were 0.77 to 1.50 times what was measured; between plans at one batch they differed by 0.09.
_UNEQUAL = 0.1
_SWEEP = 20  # specs: a table that knows fewer of a direction is not preferred to a scaled one that knows more


class Evidence:
    """The tables' facts about one spec.

    A plan measured at the spec is judged by that entry alone.  Elsewhere the error that a new measurement stays below
    with 95 % confidence (``ErrorModel``), and that of the nearest spec in the class (``similarity``), must be within
    the budget.  If none was measured with as many keys, the error is extrapolated by its growth; a plan whose growth is
    unknown is not chosen there, nor one that failed in the class at the nearest spec or at one that is nowhere larger.
    The cost model predicts its time.

    Where a spec has sequences of unequal length and no table has such, those of one length speak for it
    (``of_one_length``): ``timed`` is the spec whose times are predicted, and their error is wider.
    """

    def __init__(self, spec: AttentionSpec, known: Known) -> None:
        # Returning the LSE changes neither time nor error; sinks and merging change no error, and add as much to each
        # plan.
        self._spec = spec.replace(return_lse=False, sinks=False, partial=False)
        self._here = known.at(self._spec)
        # Where the spec was measured, that table speaks of its neighbours too: times of two machines must not meet.
        tables = [table for table in known.tables if table.at(self._spec)][:1] or known.tables
        indexes = [_index(_Same(table)) for table in tables]
        self.timed, self._unlike = self._spec, 0.0
        index = _most_of(class_of(self._spec), indexes)
        if index is None and self._spec.lengths is not None:
            self._spec, self.timed = of_one_length(self._spec)
            index, self._unlike = _most_of(class_of(self._spec), indexes), _UNEQUAL
        alike = class_of(self._spec)
        self._class = {} if index is None else index.classes.get(alike, {})
        self.model = None if index is None else index.model
        self._errors = None if index is None else index.errors
        self._scaled_from, self._scaling_error = (None, 0.0) if index is None else (index.scaled_from, index.time_error)

    def candidate(self, plan: Plan, budget: float, growth: float | None) -> Candidate | None:
        """The plan as ``eligible``, ``inaccurate`` or ``unmeasured``; None if nothing is known about it.

        ``growth`` is the factor by which its error grows when the keys double, None if unknown.
        """
        entry = self._here.get(plan)
        if entry is None or entry.status == "slower":
            found = self._predicted(plan, budget, growth)
        else:
            found = _measured(entry, budget)
        if found is None:
            return None
        if entry is not None and entry.status == "slower":
            found = replace(found, time_ms=entry.time_ms)
        if self._scaled_from is None or found.time_ms is None:
            return found
        return found.scaled(self._scaled_from, self._scaling_error)

    def _predicted(self, plan: Plan, budget: float, growth: float | None) -> Candidate | None:
        alike = self._class.get(plan, [])
        nearest = min(alike, key=lambda each: self._order(each.spec), default=None)
        failed = [each for each in alike if not each.usable and (each is nearest or self._covers(each.spec))]
        if failed:
            worst = min(failed, key=lambda each: self._order(each.spec))
            return Candidate(plan, "unmeasured", (f"at {worst.spec}: {worst.unusable}",))
        if self.model is None or self._errors is None:
            return None
        predicted, time = self._errors.predict(plan, self._spec), self.model.predict(plan, self.timed)
        if predicted is None:
            return None
        if time is None:
            return Candidate(plan, "unmeasured", ("nothing like this was measured of it",))
        keys, most = self._spec.seqlen_kv, self._errors.most_keys(plan, self._spec)
        grown = 1.0 if keys <= most else None if growth is None else growth ** math.log2(keys / most)
        # A fault of a kernel at such shapes alone shows in the nearest one, hardly in a fit over all.
        error, family = predicted if nearest is None else max(predicted, nearest.worst)
        needs = error * (grown or 1.0)
        found = Candidate(
            plan=plan,
            verdict="eligible",
            time_ms=time.time_ms,
            error=needs,
            family=family,
            basis="predicted",
            time_error=math.hypot(time.error, self._unlike),
            needs=None if grown is None else needs,
        )
        if not needs <= budget:
            reason = f"its predicted error of {needs:.3g} on {family} inputs exceeds the budget of {budget:g}"
            return _lost(found, "inaccurate", reason)
        if grown is None:
            return _lost(
                found, "unmeasured", f"measured only up to {most} keys, and FP8 errors may grow with their number"
            )
        return found

    def _covers(self, other: AttentionSpec) -> bool:
        """Whether the other spec is nowhere larger than this one."""
        sizes = ("seqlen_q", "seqlen_kv")
        fits = all(getattr(other, size) <= getattr(self._spec, size) for size in sizes)
        return fits and other.batch * other.heads <= self._spec.batch * self._spec.heads

    def _order(self, other: AttentionSpec) -> tuple[float, str]:
        return distance(other, self._spec), str(other)


def _most_of(alike: SpecClass, indexes: Sequence[_Index]) -> _Index | None:
    """The table that knows most of the class, or of those whose kernels run alike; None if none does.

    A single shape of the user's own must not hide a whole sweep.
    """
    holding = [each for each in indexes if alike in each.classes]
    if holding:
        return max(holding, key=lambda each: (each.scaled_from is None, each.specs(alike)))
    related = [each for each in indexes if each.related(alike)]
    return max(related, key=lambda each: each.preferred(alike), default=None)


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


def _lost(candidate: Candidate, verdict: Verdict, reason: str) -> Candidate:
    return replace(candidate, verdict=verdict, reasons=(reason,))


class _Index:
    """A table's entries by class and plan, except refusals, which are asked of the kernels anew, and plans that lost a
    race, of which only times are known.
    """

    def __init__(self, table: Table) -> None:
        self.classes: dict[SpecClass, dict[Plan, list[Entry]]] = {}
        for entry in table.entries.values():
            if entry.kept and entry.status != "slower":
                self.classes.setdefault(class_of(entry.spec), {}).setdefault(entry.plan, []).append(entry)
        self.model, self.errors = CostModel(table.entries.values()), ErrorModel(table.entries.values())
        self.scaled_from, self.time_error = table.scaled_from, table.time_error

    def related(self, alike: SpecClass) -> dict[SpecClass, dict[Plan, list[Entry]]]:
        """The classes whose kernels run alike."""
        return {each: plans for each, plans in self.classes.items() if each.kind == alike.kind}

    def preferred(self, alike: SpecClass) -> tuple[bool, int]:
        """The rank of the table where no table knows the class: a sweep made on this device, then the larger one."""
        count = sum(map(self.specs, self.related(alike)))
        return self.scaled_from is None and count >= _SWEEP, count

    def specs(self, alike: SpecClass) -> int:
        """How many specs of a class there are."""
        return len({entry.spec for entries in self.classes[alike].values() for entry in entries})


class _Same:
    """A table as a key by identity."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.table is self.table

    def __hash__(self) -> int:
        return id(self.table)


@lru_cache(maxsize=512)  # more than the tables of a device
def _index(same: _Same) -> _Index:
    return _Index(same.table)
