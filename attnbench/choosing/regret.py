"""Held-out regret: how much slower choices are than the best plans, on specs that the table does not have."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..kernels.plan import Plan
from ..kernels.registry import Registry
from ..problem.spec import AttentionSpec
from ..tables.table import Entry, Table
from ..tables.user_table import Known
from .budget import class_bound, default_budget
from .candidate import Basis, Candidate
from .evidence import Evidence
from .judge import Judge
from .ranking import Ranking
from .similarity import class_of

__all__ = [
    "QUESTIONS",
    "Asked",
    "Score",
    "Summary",
    "chosen_at",
    "geometric_mean",
    "held_out",
    "scatter",
    "served",
    "summarised",
]

# Bounds on a table's held-out regret, and on the share of choices beyond their budget.  The worst is not bounded: half
# of a table whose shapes lie far apart knows nothing near some of the others.
GEOMETRIC_MEAN, PERCENTILE_95, VIOLATIONS = 0.02, 0.15, 0.01
STEADY = 0.03  # half the interquartile range over the median; more scatter hides regrets of that size
_SPLITS = 5


class Asked(NamedTuple):
    """What a caller may ask for: whether FP8 plans are allowed, and a budget (None: the default)."""

    fp8: bool
    max_error: float | None = None

    def budget(self, spec: AttentionSpec) -> float:
        """The largest error that is accepted at this spec."""
        return default_budget(spec, self.fp8) if self.max_error is None else self.max_error

    def __str__(self) -> str:
        if self.max_error is not None:
            return f"max_error={self.max_error:g}"
        return 'dtype="fp8"' if self.fp8 else "nothing"


QUESTIONS = (Asked(False), Asked(True), Asked(True, 0.05), Asked(True, 0.1), Asked(True, 0.15))


@dataclass(frozen=True)
class Score:
    """One choice made without the spec's own entries, compared with what was measured there.

    ``regret`` is the time of ``plan`` over that of ``best``, the fastest plan that the known half supports and that is
    accurate enough here, minus one.  ``caution`` is the time of ``best`` over that of the fastest accurate plan, minus
    one: the cost of FP8 plans that the known half does not support.  ``violated``: the plan's error exceeds the budget.
    ``steady``: both times are known well enough.
    """

    spec: AttentionSpec
    asked: Asked
    plan: Plan
    basis: Basis
    best: Plan
    regret: float
    caution: float
    violated: bool
    steady: bool


def held_out(
    table: Table,
    known: Registry,
    *,
    questions: Sequence[Asked] = QUESTIONS,
    splits: int = _SPLITS,
    seed: int = 0,
    steady: float = STEADY,
) -> Iterator[Score]:
    """Choose for one half of the table's specs by the other half, and vice versa, in several random splits.

    Splits are made class by class.  A spec that is alone in its class is not scored, nor a choice without a plan within
    the budget.  A score is ``steady`` if neither time scattered by more than that; otherwise a regret is mostly noise.
    """
    for split in range(splits):
        half = _half(table, random.Random(f"{seed}/{split}"))
        for choosing in (half, set(_specs(table)) - half):
            yield from _scored(table, choosing, known, questions, steady)


def _half(table: Table, chance: random.Random) -> set[AttentionSpec]:
    classes: dict[str, list[AttentionSpec]] = defaultdict(list)
    for spec in _specs(table):
        classes[str(class_of(spec))].append(spec)
    half: set[AttentionSpec] = set()
    for name in sorted(classes):
        specs = classes[name]
        chance.shuffle(specs)
        half.update(specs[: (len(specs) + chance.randrange(2)) // 2])
    return half


def _specs(table: Table) -> list[AttentionSpec]:
    """The specs at which anything was measured, in a fixed order."""
    return sorted({spec for (spec, _), entry in table.entries.items() if entry.usable}, key=str)


def _scored(
    table: Table, choosing: set[AttentionSpec], known: Registry, questions: Sequence[Asked], steady: float
) -> Iterator[Score]:
    seen = replace(table, entries={key: entry for key, entry in table.entries.items() if key[0] in choosing})
    classes = {class_of(spec) for spec in _specs(seen)}
    for spec in _specs(table):
        if spec in choosing or class_of(spec) not in classes:
            continue
        evidence = Evidence(spec, Known.of(seen))
        here = served(table, spec, known)
        for asked in questions:
            chosen = chosen_at(spec, here, evidence, asked, known)
            if chosen is not None:
                yield _score(spec, here, asked, *chosen, steady)


def chosen_at(
    spec: AttentionSpec,
    here: Iterable[Plan],
    evidence: Evidence,
    asked: Asked,
    known: Registry,
    declared: Callable[[Plan], float] | None = None,
) -> tuple[Candidate, set[Plan]] | None:
    """(the plan that the selector chooses from those that served here, all eligible ones); None if there is none.

    ``declared`` is a plan's error where nothing was measured in the spec's class; by default what it must be to
    deserve the status ok.
    """
    judge = Judge(evidence, asked.budget(spec), asked.fp8, known, declared or (lambda plan: class_bound(plan, spec)))
    eligible = [each for each in map(judge, here) if each.verdict == "eligible"]
    if not eligible:
        return None
    ranking = Ranking(spec, judge.preference, evidence.model)
    return ranking.winner(eligible), {each.plan for each in eligible}


def _score(
    spec: AttentionSpec,
    here: dict[Plan, Entry],
    asked: Asked,
    chosen: Candidate,
    eligible: set[Plan],
    steady: float,
) -> Score:
    budget = asked.budget(spec)
    times = {
        plan: entry.time_ms or 0.0
        for plan, entry in here.items()
        if (asked.fp8 or not plan.fp8) and (entry.worst[0] <= budget or plan == chosen.plan)
    }
    best = min((plan for plan in times if plan in eligible), key=lambda plan: (times[plan], str(plan)))
    return Score(
        spec=spec,
        asked=asked,
        plan=chosen.plan,
        basis=chosen.basis,
        best=best,
        regret=_over(times[chosen.plan], times[best]),
        caution=_over(times[best], min(times.values())),
        violated=not here[chosen.plan].worst[0] <= budget,
        steady=max(scatter(here[chosen.plan]), scatter(here[best])) <= steady,
    )


def scatter(entry: Entry) -> float:
    """Half the interquartile range of a plan's samples over their median."""
    return (entry.spread_ms or 0.0) / entry.time_ms / 2 if entry.time_ms else 0.0


def _over(time: float, best: float) -> float:
    return time / best - 1 if best else 0.0


def served(table: Table, spec: AttentionSpec, known: Registry) -> dict[Plan, Entry]:
    """The plans that were measured at a spec, of kernels that this installation knows, installed or not."""
    return {
        plan: entry
        for plan, entry in table.at(spec).items()
        if entry.usable and plan.forward in known.forwards and plan.backward in (None, *known.backwards)
    }


@dataclass(frozen=True)
class Summary:
    """The regrets of a group of scores: geometric mean, 95th percentile and worst of the time ratios, minus one."""

    name: str
    specs: int
    choices: int
    geometric_mean: float
    percentile_95: float
    worst: float
    violations: int
    caution: float

    @property
    def passes(self) -> bool:
        """Whether the group stays within the bounds on a table's regret."""
        return (
            self.geometric_mean <= GEOMETRIC_MEAN
            and self.percentile_95 <= PERCENTILE_95
            and self.violations <= VIOLATIONS * self.choices
        )


def summarised(
    scores: Iterable[Score], key: Callable[[Score], str] = lambda score: score.spec.direction
) -> list[Summary]:
    """A summary of each group that ``key`` names, by name."""
    groups: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        groups[key(score)].append(score)
    return [_summary(name, groups[name]) for name in sorted(groups)]


def _summary(name: str, scores: list[Score]) -> Summary:
    regrets = sorted(score.regret for score in scores)
    return Summary(
        name=name,
        specs=len({score.spec for score in scores}),
        choices=len(scores),
        geometric_mean=geometric_mean(1 + regret for regret in regrets) - 1,
        percentile_95=regrets[math.ceil(0.95 * len(regrets)) - 1],
        worst=regrets[-1],
        violations=sum(score.violated for score in scores),
        caution=geometric_mean(1 + score.caution for score in scores) - 1,
    )


def geometric_mean(ratios: Iterable[float]) -> float:
    """The geometric mean of one or more positive ratios."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(math.fsum(logs) / len(logs))
