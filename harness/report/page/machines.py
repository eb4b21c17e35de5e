"""The measurements of each machine, case by case, and the plan that each question would choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from attnbench.choosing.candidate import Candidate, Margin
from attnbench.choosing.evidence import Evidence
from attnbench.choosing.ranking import Ranking
from attnbench.choosing.regret import QUESTIONS, Asked
from attnbench.errors import MisuseError
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry
from attnbench.problem.spec import AttentionSpec, Direction
from attnbench.tables.environment import Environment
from attnbench.tables.table import Table
from attnbench.tables.user_table import Known

from ...measure.timing import COSTS
from ...results.condense import join_sweeps, worst_errors
from ...results.records import Measurement

__all__ = ["DEFAULT", "DIRECTIONS", "Answer", "Case", "Machine", "machines_of", "worst_error"]

DEFAULT = Asked(True)  # the question that the page answers first
WIDE = Asked(False)
DIRECTIONS: tuple[Direction, ...] = ("forward", "training")
_MOST_ENVIRONMENTS = 100
_MOST_SAMPLES = 500  # of each cost, evenly spread: comparing two plans takes the product of both numbers


@dataclass(frozen=True)
class Answer:
    """The plan that a question chooses at a spec, the margin to the runner-up, and what was known of every plan."""

    asked: Asked
    plan: Plan | None
    margin: Margin | None
    candidates: Mapping[Plan, Candidate]


@dataclass(frozen=True)
class Case:
    """One spec on one machine: the newest row of every plan, and the answers.

    ``name`` is that of its newest row; ``sources`` counts the measured rows of each sweep.  ``number`` identifies it on
    the page.
    """

    number: int
    name: str
    spec: AttentionSpec
    rows: Sequence[Measurement]
    sources: Mapping[str, int]
    answers: Mapping[Asked, Answer]

    @property
    def answer(self) -> Answer:
        """The answer with FP8 plans, within the default budget."""
        return self.answers[DEFAULT]

    @cached_property
    def measured(self) -> list[Measurement]:
        """The rows with numbers, in the order of their median call."""
        return sorted((row for row in self.rows if row.measured), key=Measurement.median_ms)

    @cached_property
    def times(self) -> dict[Plan, float]:
        """Median milliseconds of the call of every measured plan."""
        return {row.plan: row.median_ms() for row in self.measured}

    @property
    def wide_ms(self) -> float | None:
        """The time of the fastest accurate plan without FP8; None if there is none."""
        found = self.answers[WIDE].candidates.values()
        return min((self.times[each.plan] for each in found if each.verdict == "eligible"), default=None)

    def speed(self, plan: Plan) -> float | None:
        """How many times as fast the plan is as the fastest plan without FP8."""
        return None if self.wide_ms is None else self.wide_ms / self.times[plan]


@dataclass(frozen=True)
class Machine:
    """Sweeps whose environments can be compared, by name."""

    name: str
    sweeps: Mapping[str, Sequence[Measurement]]
    table: Table
    cases: Sequence[Case]

    @property
    def environments(self) -> dict[Environment, list[str]]:
        """Each environment with the sweeps that were measured in it."""
        found: dict[Environment, list[str]] = {}
        for name, rows in self.sweeps.items():
            for environment in dict.fromkeys(row.environment for row in rows):
                found.setdefault(environment, []).append(name)
        return found

    def of(self, direction: Direction) -> list[Case]:
        """The cases of one direction."""
        return [case for case in self.cases if case.spec.direction == direction]

    def winners(self) -> list[Plan]:
        """Every plan that was measured or chosen, the most frequent winners first."""
        wins: dict[Plan, int] = {}
        for case in self.cases:
            for row in case.measured:
                wins.setdefault(row.plan, 0)
            if case.answer.plan is not None:
                wins[case.answer.plan] += 1
        return sorted(wins, key=lambda plan: (-wins[plan], str(plan)))


def machines_of(sweeps: Mapping[str, Sequence[Measurement]], known: Registry) -> list[Machine]:
    """The sweeps by machine, in the order of their names; sweeps that cannot be compared are separate machines.

    If several sweeps measured a plan at a spec, the newest row counts.  Raises MisuseError if there are too many
    environments.
    """
    groups: list[dict[str, list[Measurement]]] = []
    seen: list[list[Environment]] = []
    places: dict[Environment, int] = {}
    for name, rows in sweeps.items():
        for row in rows:
            if row.environment not in places:
                if sum(map(len, seen)) == _MOST_ENVIRONMENTS:
                    raise MisuseError(f"a report is on at most {_MOST_ENVIRONMENTS} environments; name fewer results")
                places[row.environment] = _place(row.environment, seen)
                if places[row.environment] == len(groups):
                    groups.append({})
            groups[places[row.environment]].setdefault(name, []).append(row)
    names = [next(iter(group.values()))[0].environment.device_name for group in groups]
    machines: list[Machine] = []
    first = 0
    for place, group in enumerate(groups):
        table = join_sweeps(group)
        cases = list(_cases(group, table, known, first))
        first += len(cases)
        same = names[:place].count(names[place])
        machines.append(Machine(f"{names[place]} ({same + 1})" if same else names[place], group, table, cases))
    return machines


def _place(environment: Environment, seen: list[list[Environment]]) -> int:
    """The index of the first group that it can be compared with; a new group if there is none."""
    for place, group in enumerate(seen):
        if not any(environment.differences(other)[0] for other in group):
            group.append(environment)
            return place
    seen.append([environment])
    return len(seen) - 1


def _cases(sweeps: Mapping[str, Sequence[Measurement]], table: Table, known: Registry, first: int) -> Iterator[Case]:
    newest: dict[AttentionSpec, dict[Plan, tuple[Measurement, str]]] = {}
    for source, rows in sweeps.items():
        for row in rows:
            plans = newest.setdefault(row.spec, {})
            before = plans.get(row.plan)
            if before is None or _rank(row) >= _rank(before[0]):
                plans[row.plan] = row, source
    for number, spec in enumerate(sorted(newest, key=_order), start=first):
        found = list(newest[spec].values())
        sources: dict[str, int] = {}
        for row, source in found:
            sources[source] = sources.get(source, 0) + row.measured
        name = max((row for row, _ in found), key=lambda row: row.started).case
        answers = {asked: _answer(table, spec, asked, known) for asked in QUESTIONS}
        yield Case(number, name, spec, [_thin(row) for row, _ in found], sources, answers)


def _rank(row: Measurement) -> tuple[bool, datetime]:
    """Of two rows of a plan the higher counts: the newer, but a race that it lost replaces no errors."""
    return row.status != "slower", row.started


def _order(spec: AttentionSpec) -> tuple[object, ...]:
    return (
        spec.direction,
        spec.head_dim,
        spec.group,
        spec.seqlen_q != spec.seqlen_kv,
        spec.seqlen_kv,
        spec.seqlen_q,
        str(spec),
    )


def _answer(table: Table, spec: AttentionSpec, asked: Asked, known: Registry) -> Answer:
    """The choice of ``attention`` among what was measured in full, whatever is installed here."""
    evidence = Evidence(spec, Known.of(table))
    candidates: dict[Plan, Candidate] = {}
    for plan, entry in table.at(spec).items():
        if entry.kept and entry.status != "slower" and (asked.fp8 or not plan.fp8):
            found = evidence.candidate(plan, asked.budget(spec), known.error_growth(plan))
            if found is not None:
                candidates[plan] = found
    eligible = [each for each in candidates.values() if each.verdict == "eligible"]
    if not eligible:
        return Answer(asked, None, None, candidates)

    def preference(plan: Plan) -> float:
        kernel = known.forwards.get(plan.forward)
        return float("inf") if kernel is None or kernel.preference is None else kernel.preference

    ranking = Ranking(spec, preference, evidence.model)
    winner = ranking.winner(eligible)
    return Answer(asked, winner.plan, ranking.margin(winner, eligible), candidates)


def _thin(row: Measurement) -> Measurement:
    if all(len(samples) <= _MOST_SAMPLES for samples in row.time_ms.values()):
        return row
    kept = {cost: _some(row.time_ms[cost]) for cost in COSTS if cost in row.time_ms}
    return row.model_copy(update={"performance_": row.performance.model_copy(update={"time_ms": kept})})


def _some(samples: Sequence[float]) -> list[float]:
    return list(samples[:: -(-len(samples) // _MOST_SAMPLES)])


def worst_error(row: Measurement) -> tuple[float, str]:
    """The largest relative L2 over out and gradients and over the input families, and the family."""
    return max((error, family) for family, error in worst_errors(row).items())
