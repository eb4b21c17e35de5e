"""Two result sets held against one another: what became slower, less accurate, failed, or went missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from .records import Measurement
from .regression_errors import ErrorChange, families_missing, risen
from .regression_pairs import FAILURES, Pair, baselines, other_differences, paired, unlike_places, unlike_questions
from .regression_sentences import clocks_said, error_said, times_said
from .regression_terms import Key, Limits, Terms, check_used
from .regression_times import CostChange, changes_of, verdict_of
from .timing import Cost

__all__ = ["VERDICTS", "Again", "Outcome", "Regression", "RowVerdict", "compare_results"]

RowVerdict = Literal[
    "failed", "inaccurate", "slower", "missing", "incomparable", "faster", "ambiguous", "same", "baseline", "unmeasured"
]
VERDICTS: tuple[RowVerdict, ...] = get_args(RowVerdict)  # of several, the first is the row's
_COMPARED: tuple[RowVerdict, ...] = ("failed", "inaccurate", "slower", "faster", "ambiguous", "same")
# What is said of a row even where something worse is.
_FINDINGS: tuple[RowVerdict, ...] = ("inaccurate", "slower", "missing", "faster")
Again = Mapping[Key, tuple[Measurement, Measurement]]
Yardsticks = Mapping[str, tuple[Measurement, Measurement]]


@dataclass(frozen=True)
class Outcome:
    """What became of one plan on one case.

    - ``failed``: it was measured in BASE and crashes, hangs, fails or runs out of memory in NEW.
    - ``inaccurate``: it is inaccurate now and was not, or an error has risen beyond its limit.
    - ``slower``, ``faster``, ``same``, ``ambiguous``: its times (attnbench.harness.regression_times).
    - ``missing``: one side alone has it, or errors of it; ``allowed`` where that was allowed by name.
    - ``incomparable``: the machines or the questions are unlike.
    - ``baseline``: what the others' times are relative to, whose own are not compared.
    - ``unmeasured``: neither side has numbers, and NEW is no worse.

    ``costs`` are the times that were compared, ``errors`` those that have risen beyond the
    limit.  ``again`` says that the times are those of a second measurement, side by side.
    """

    key: Key
    verdict: RowVerdict
    reasons: tuple[str, ...] = ()
    costs: Mapping[Cost, CostChange] = field(default_factory=dict)
    errors: tuple[ErrorChange, ...] = ()
    limits: Limits = field(default_factory=Limits)
    allowed: bool = False
    again: bool = False

    @property
    def regressed(self) -> bool:
        """Whether it makes the comparison fail."""
        return self.verdict in ("failed", "inaccurate", "slower") or (self.verdict == "missing" and not self.allowed)

    @property
    def suspect(self) -> bool:
        """Whether one of its costs would be slower or faster if it were the only row, but is not for certain."""
        return self.verdict == "ambiguous" and any(each.verdict in ("slower", "faster") for each in self.costs.values())


@dataclass(frozen=True)
class Regression:
    """The outcome of every row, and ``differences``: in what else than the machine the environments differ."""

    outcomes: list[Outcome]
    terms: Terms
    differences: list[str]
    family: int

    @property
    def counts(self) -> dict[RowVerdict, int]:
        """How many rows have each verdict, those that none has left out."""
        counted = Counter(each.verdict for each in self.outcomes)
        return {verdict: counted[verdict] for verdict in VERDICTS if counted[verdict]}

    @property
    def exit_code(self) -> int:
        """0 clean, 1 regressed, 3 not comparable.

        A regression among the rows that could be compared is one, whatever the others are;
        where none could be, what is missing says nothing of the code either.
        """
        counts = self.counts
        compared = any(verdict in counts for verdict in _COMPARED)
        if not compared and "incomparable" in counts:
            return 3
        if any(each.regressed for each in self.outcomes):
            return 1
        return 0 if compared and "incomparable" not in counts else 3


def compare_results(
    base: Mapping[Key, Measurement],
    new: Mapping[Key, Measurement],
    terms: Terms,
    again: Again | None = None,
) -> Regression:
    """Compare every row of NEW with the one of BASE that has its case and plan.

    ``again`` holds rows that were measured a second time, side by side: their times take the
    place of both rows' own, unless they say nothing.

    Raises MisuseError where the terms name what neither side has.
    """
    pairs = paired(base, new)
    check_used(terms, [pair.key for pair in pairs])
    yardsticks = baselines(pairs, terms.relative_to)
    changes: dict[Key, dict[Cost, CostChange]] = {}
    for pair in pairs:
        if (found := _changes(pair, terms, yardsticks)) is not None:
            changes[pair.key] = found
    seconds = {
        key: changes_of(*rows, terms.costs, terms.limits_of(key).time)
        for key, rows in (again or {}).items()
        if key in changes
    }
    outcomes = [_outcome(pair, terms, yardsticks, changes, seconds) for pair in pairs]
    return Regression(outcomes, terms, _differences(pairs), len(changes))


def _changes(pair: Pair, terms: Terms, yardsticks: Yardsticks) -> dict[Cost, CostChange] | None:
    """The times of a pair; None where they are not compared."""
    rows = pair.measured
    if rows is None or unlike_questions(*rows):
        return None
    yardstick = None
    if terms.relative_to:
        yardstick = yardsticks.get(pair.key[0])
        if yardstick is None or yardstick == rows:
            return None
    elif unlike_places(*rows):
        return None
    return changes_of(*rows, terms.costs, terms.limits_of(pair.key).time, yardstick)


def _outcome(
    pair: Pair,
    terms: Terms,
    yardsticks: Yardsticks,
    changes: Mapping[Key, dict[Cost, CostChange]],
    seconds: Mapping[Key, dict[Cost, CostChange]],
) -> Outcome:
    key, limits = pair.key, terms.limits_of(pair.key)
    said: list[tuple[RowVerdict, str]] = list(_absent(pair))
    errors: tuple[ErrorChange, ...] = ()
    costs: Mapping[Cost, CostChange] = {}
    again = False
    if (rows := pair.measured) is not None:
        before, after = rows
        if unlike := unlike_questions(*rows) + ([] if terms.relative_to else unlike_places(*rows)):
            return Outcome(key, "incomparable", tuple(unlike), limits=limits)
        errors = tuple(risen(before, after, limits.error))
        said += _accuracy(before, after, errors)
        if key in changes:
            costs = changes[key]
            timed = verdict_of(costs, limits.time, len(changes))
            if key in seconds:
                repeated = verdict_of(seconds[key], limits.time, len(changes))
                if repeated != "ambiguous" or timed == "ambiguous":
                    if timed != repeated:
                        said.append((repeated, f"{timed} in the results, measured again side by side"))
                    costs, timed, again = seconds[key], repeated, True
            said += [(timed, each) for each in times_said(costs, timed, len(changes))] or [(timed, "")]
            if timed in ("slower", "faster") and not again:
                said += [(timed, each) for each in clocks_said(before, after)]
        elif yardsticks.get(key[0]) != rows:
            names = ", ".join(map(str, terms.relative_to))
            said.append(("incomparable", f"{names} was not measured on this case on both sides"))
        else:
            said.append(("baseline", "the others' times are relative to it"))
    verdict: RowVerdict = min((each for each, _ in said), key=VERDICTS.index, default="unmeasured")
    said.sort(key=lambda each: VERDICTS.index(each[0]))
    reasons = dict.fromkeys(reason for each, reason in said if reason and each in (verdict, *_FINDINGS))
    allowed = verdict == "missing" and terms.allows(key)
    return Outcome(key, verdict, tuple(reasons), costs, errors, limits, allowed, again)


def _absent(pair: Pair) -> Iterator[tuple[RowVerdict, str]]:
    """What there is to say where one side has no numbers; nothing where both or neither should have any."""
    before, after = pair.before, pair.after
    if after is None:
        assert before is not None, "a pair has one row at least"
        if before.measured:
            yield "missing", "it is in BASE alone"
    elif before is None:
        if after.measured or after.status in FAILURES:
            yield "missing", "it is in NEW alone" + ("" if after.measured else f", where its status is {after.status}")
    elif before.measured and not after.measured:
        verdict: RowVerdict = "failed" if after.status in FAILURES else "missing"
        yield verdict, f"it was {before.status}, is {after.status}: {after.reason}"
    elif not before.measured and before.status != after.status:
        yield "unmeasured", f"it was {before.status}, is {after.status}"


def _accuracy(
    before: Measurement, after: Measurement, errors: tuple[ErrorChange, ...]
) -> Iterator[tuple[RowVerdict, str]]:
    if before.status == "ok" and after.status == "inaccurate":
        yield "inaccurate", f"it was ok, is inaccurate: {after.reason}"
    if errors:
        yield "inaccurate", error_said(errors)
    if gone := families_missing(before, after):
        yield "missing", f"its errors on {', '.join(gone)} are in BASE alone"


def _differences(pairs: list[Pair]) -> list[str]:
    found: dict[str, None] = {}
    for pair in pairs:
        if pair.before is not None and pair.after is not None:
            found |= dict.fromkeys(other_differences(pair.before.environment, pair.after.environment))
    return list(found)
