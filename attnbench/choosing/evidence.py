"""What the tables say of a plan at a spec: measured there, or vouched for and predicted by its neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from ..kernels.plan import Plan
from ..problem.spec import AttentionSpec
from ..tables.table import Entry, Table
from ..tables.user_table import Known
from .candidate import Candidate, Verdict
from .cost_model.predict import CostModel
from .similarity import SpecClass, apart, class_of, distance

__all__ = ["MARGIN", "Evidence"]

# The factor by which the errors of an FP8 plan's neighbours must stay below the budget of an unmeasured spec.
# Of 704 errors on an H200 7 were more than 10 % above the largest neighbour's, 2 by 31 %.
MARGIN = 1.3
# How much larger an FP8 error may be for each unit that two classes are apart (``similarity.apart``).  In 6,666 rows of
# an H200 half the head dimension made it 1.6 times as large at most, another mask 1.4 times.
_OTHER_CLASS = 1.6
_NEAR = 2.0  # doublings: farther away, the winner says less than a prediction
_SWEEP = 20  # specs: a table that knows fewer of a direction is not preferred to a scaled one that knows more


class Evidence:
    """The tables' facts about one spec.

    A plan measured at the spec is judged by that entry alone.  Elsewhere its entries in the class of the spec
    (``similarity``) vouch for it: all with at most as many keys, and the nearest with more, must be within the budget
    on every input family, for FP8 by the factor ``MARGIN``.  Where the class has no entry, those of the nearest classes
    vouch, for FP8 by a factor more for what differs.  If none has as many keys, the error is extrapolated by its
    growth; nothing vouches for a plan whose growth is unknown, or that failed in the class at the nearest spec or at
    one that is nowhere larger.  The cost model predicts its time.
    """

    def __init__(self, spec: AttentionSpec, known: Known) -> None:
        self._spec = spec.replace(return_lse=False)  # returning the LSE changes neither time nor error
        self._here = known.at(self._spec)
        alike = class_of(self._spec)
        # Where the spec was measured, that table speaks of its neighbours too: times of two machines must not meet.
        # Elsewhere the one that knows most of the class: a single shape of the user's own must not hide a whole sweep.
        tables = [table for table in known.tables if table.at(self._spec)][:1] or known.tables
        indexes = [_index(_Same(table)) for table in tables]
        holding = [each for each in indexes if alike in each.classes]
        index = max(holding, key=lambda each: (each.scaled_from is None, each.specs(alike)), default=None)
        if index is None:
            related = [each for each in indexes if each.related(alike)]
            index = max(related, key=lambda each: each.preferred(alike), default=None)
        self._class = {} if index is None else index.classes.get(alike, {})
        self._classes = {} if index is None else index.related(alike)
        self.model = None if index is None else index.model
        self._scaled_from, self._scaling_error = (None, 0.0) if index is None else (index.scaled_from, index.time_error)

    def candidate(self, plan: Plan, budget: float, growth: float | None) -> Candidate | None:
        """The plan as ``eligible``, ``inaccurate`` or ``unmeasured``; None if nothing is known about it.

        ``growth`` is the factor by which its error grows when the keys double, None if unknown.
        """
        entry = self._here.get(plan)
        if entry is None or entry.status == "slower":
            found = self._neighbours(plan, budget, growth)
        else:
            found = _measured(entry, budget)
        if found is None:
            return None
        if entry is not None and entry.status == "slower":
            found = replace(found, time_ms=entry.time_ms)
        if self._scaled_from is None or found.time_ms is None:
            return found
        return found.scaled(self._scaled_from, self._scaling_error)

    def nearest(self, plan: Plan, others: Iterable[Plan]) -> list[Candidate]:
        """Measurements of a predicted plan and of the others at the nearest spec that has the plan; none beyond
        ``_NEAR``.
        """
        usable = (entry.spec for entry in self._class.get(plan, ()) if entry.usable)
        spec = min(usable, key=self._order, default=None)
        if spec is None or distance(spec, self._spec) > _NEAR:
            return []
        entries = [entry for each in {plan, *others} for entry in self._class.get(each, ()) if entry.spec == spec]
        return [_measured(entry, entry.worst[0]) for entry in entries if entry.usable]

    def _neighbours(self, plan: Plan, budget: float, growth: float | None) -> Candidate | None:
        alike = self._class.get(plan, [])
        nearest = min(alike, key=lambda each: self._order(each.spec), default=None)
        failed = [each for each in alike if not each.usable and (each is nearest or self._covers(each.spec))]
        if failed:
            worst = min(failed, key=lambda each: self._order(each.spec))
            return Candidate(plan, "unmeasured", (f"at {worst.spec}: {worst.unusable}",))
        usable = self._vouching(plan)
        if not usable:
            return None
        keys = self._spec.seqlen_kv
        more = sorted({each.spec.seqlen_kv for each in usable if each.spec.seqlen_kv >= keys})
        asked = [each for each in usable if each.spec.seqlen_kv <= (more[0] if more else keys)] or usable
        witness = max(asked, key=lambda each: (each.worst[0] * self._doubt(each), str(each.spec)))
        error, family = witness.worst
        prediction = None if self.model is None else self.model.predict(plan, self._spec)
        if prediction is None:
            return Candidate(plan, "unmeasured", ("nothing like this was measured of it",))
        most = max(each.spec.seqlen_kv for each in usable)
        grown = 1.0 if keys <= most else None if growth is None else growth ** math.log2(keys / most)
        doubt = self._doubt(witness)
        needs = error * doubt * (grown or 1.0)
        found = Candidate(
            plan=plan,
            verdict="eligible",
            time_ms=prediction.time_ms,
            error=error,
            family=family,
            basis="predicted",
            measured_at=witness.spec,
            time_error=prediction.error,
            needs=None if grown is None else needs,
        )
        if not needs <= budget:
            factors = f", times {doubt:.3g} for a shape that was not measured," if plan.fp8 else ""
            factors += f" and {grown:.3g} for more keys than were measured," if grown not in (None, 1.0) else ""
            reason = f"its error of {error:.3g} on {family} inputs at {witness.spec}{factors} exceeds the budget"
            return _lost(found, "inaccurate", f"{reason} of {budget:g}")
        if grown is None:
            return _lost(
                found, "unmeasured", f"measured only up to {most} keys, and FP8 errors may grow with their number"
            )
        return found

    def _vouching(self, plan: Plan) -> list[Entry]:
        """The plan's usable entries in the class, or else in the nearest classes up to one that has as many keys."""
        alike = class_of(self._spec)
        found = [entry for entry in self._class.get(plan, ()) if entry.usable]
        if found:  # an FP8 error may be a rare draw: other classes do not replace more keys of the class itself
            return found
        for other in sorted(self._classes, key=lambda each: (apart(each, alike), str(each))):
            usable = [entry for entry in self._classes[other].get(plan, ()) if entry.usable]
            found += usable
            if any(entry.spec.seqlen_kv >= self._spec.seqlen_kv for entry in usable):
                break
        return found

    def _doubt(self, entry: Entry) -> float:
        """The factor by which the error may be larger at the spec than the entry's."""
        if not entry.plan.fp8:
            return 1.0
        factor: float = MARGIN * _OTHER_CLASS ** apart(class_of(entry.spec), class_of(self._spec))
        return factor

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
        measured_at=entry.spec,
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
        self.model = CostModel(table.entries.values())
        self.scaled_from, self.time_error = table.scaled_from, table.time_error

    def related(self, alike: SpecClass) -> dict[SpecClass, dict[Plan, list[Entry]]]:
        """The classes whose kernels run alike: of one direction and one type of tensors."""

        def kind(each: SpecClass) -> tuple[object, ...]:
            return each.direction, each.dtype, each.descale

        return {each: plans for each, plans in self.classes.items() if kind(each) == kind(alike)}

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
