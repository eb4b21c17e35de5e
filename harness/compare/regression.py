"""Compare two result sets: what became slower, less accurate, failed, or went missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from ..results.records import Measurement
from .errors import ErrorChange, families_missing, risen_errors
from .memory import MemoryChange, memory_growth, memory_sentence
from .pairs import FAILURES, Pair, baselines, other_differences, pair_rows, unlike_places, unlike_questions
from .sentences import clock_sentences, error_sentence, time_sentences
from .terms import Gated, Key, Limits, Terms, check_used
from .times import CostChange, Timed, changes_of, timed_costs, verdict_of

__all__ = ["VERDICTS", "Outcome", "Regression", "RowVerdict", "compare_results"]

RowVerdict = Literal[
    "failed",
    "inaccurate",
    "slower",
    "larger",
    "missing",
    "incomparable",
    "faster",
    "uncertain",
    "same",
    "baseline",
    "unmeasured",
]
VERDICTS: tuple[RowVerdict, ...] = get_args(RowVerdict)  # the first of several is the row's
_REGRESSED: tuple[RowVerdict, ...] = ("failed", "inaccurate", "slower", "larger")
_COMPARED: tuple[RowVerdict, ...] = (*_REGRESSED, "faster", "uncertain", "same")
# Reported for a row even if it has a worse verdict.
_FINDINGS: tuple[RowVerdict, ...] = ("inaccurate", "slower", "larger", "missing", "faster")
Yardsticks = Mapping[str, tuple[Measurement, Measurement]]


@dataclass(frozen=True)
class Outcome:
    """The comparison of one plan on one case.

    - ``failed``: it was measured in BASE and crashes, hangs, fails or runs out of memory in NEW.
    - ``inaccurate``: it is inaccurate now and was not, or an error has risen beyond its limit.
    - ``slower``, ``faster``, ``same``, ``uncertain``: its times (attnbench.harness.compare.times).
    - ``larger``: it takes more memory, beyond its limit.
    - ``missing``: only one side has it, or its errors; ``allowed`` if that was allowed by name.
    - ``incomparable``: the machines or the specs differ.
    - ``baseline``: the others' times are relative to it, and its own are not compared.
    - ``unmeasured``: neither side has numbers, and NEW is no worse.

    ``costs`` are the compared times, ``errors`` and ``memory`` those that have risen beyond the limit.
    """

    key: Key
    verdict: RowVerdict
    reasons: tuple[str, ...] = ()
    costs: Mapping[Gated, CostChange] = field(default_factory=dict)
    errors: tuple[ErrorChange, ...] = ()
    memory: tuple[MemoryChange, ...] = ()
    limits: Limits = field(default_factory=Limits)
    allowed: bool = False

    @property
    def regressed(self) -> bool:
        """Whether it makes the comparison fail."""
        return self.verdict in _REGRESSED or (self.verdict == "missing" and not self.allowed)

    @property
    def certain(self) -> bool:
        """Whether each of its costs would have been found slower if it were slower by its limit."""
        return self.verdict != "uncertain" and all(each.verdict != "uncertain" for each in self.costs.values())

    @property
    def visible(self) -> float | None:
        """The slow-down that each of its costs would have shown with 95 %, as 0.021 for 2.1 %; None without costs.

        Costs that the host decides have a limit of their own and count only if there are no others.
        """
        own = [each.visible for each in self.costs.values() if not each.host]
        return max(own or [each.visible for each in self.costs.values()], default=None)

    @property
    def suspect(self) -> bool:
        """Whether it may have become slower: the 95 % interval of an uncertain cost lies above 1."""
        return any(each.verdict == "uncertain" and each.interval[0] > 1 for each in self.costs.values())


@dataclass(frozen=True)
class Regression:
    """The outcome of every row; ``differences`` lists how the environments differ, apart from the machine.

    ``advice`` says how to make an uncertain result certain.
    """

    outcomes: list[Outcome]
    terms: Terms
    differences: list[str] = field(default_factory=list)
    advice: str = "`attnbench gate` measures until it knows"

    @property
    def counts(self) -> dict[RowVerdict, int]:
        """How many rows have each verdict, without verdicts that no row has."""
        counted = Counter(each.verdict for each in self.outcomes)
        return {verdict: counted[verdict] for verdict in VERDICTS if counted[verdict]}

    @property
    def exit_code(self) -> int:
        """0 clean, 1 regressed, 3 not comparable, 4 not certain.

        A regression among comparable rows decides; if no row is comparable, missing rows say nothing of the code.
        Clean means that every compared row would have shown a slow-down of its limit.
        """
        counts = self.counts
        compared = any(verdict in counts for verdict in _COMPARED)
        if not compared and "incomparable" in counts:
            return 3
        if any(each.regressed for each in self.outcomes):
            return 1
        if not compared or "incomparable" in counts:
            return 3
        return 0 if all(each.certain for each in self.outcomes) else 4


def compare_results(
    base: Mapping[Key, Measurement],
    new: Mapping[Key, Measurement],
    terms: Terms,
    measured: Mapping[Key, Mapping[Gated, CostChange]] | None = None,
) -> Regression:
    """Compare every row of NEW with the row of BASE that has its case and plan.

    ``measured`` are changes of times measured side by side on this machine; they replace the rows' own times.  Raises
    MisuseError if the terms name something that neither side has.
    """
    pairs = pair_rows(base, new)
    check_used(terms, [pair.key for pair in pairs])
    yardsticks = baselines(pairs, terms.relative_to)
    here = measured is not None
    if measured is None:
        times = {pair.key: found for pair in pairs if (found := _timed(pair, terms, yardsticks)) is not None}
        measured = changes_of(times)
    outcomes = [_outcome(pair, terms, yardsticks, measured, here=here) for pair in pairs]
    return Regression(outcomes, terms, _differences(pairs))


def _timed(pair: Pair, terms: Terms, yardsticks: Yardsticks) -> list[Timed] | None:
    """The times of a pair; None if they are not compared."""
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
    return timed_costs(*rows, terms.costs, terms.limits_of(pair.key), yardstick)


def _outcome(
    pair: Pair,
    terms: Terms,
    yardsticks: Yardsticks,
    changes: Mapping[Key, Mapping[Gated, CostChange]],
    *,
    here: bool,
) -> Outcome:
    key, limits = pair.key, terms.limits_of(pair.key)
    findings: list[tuple[RowVerdict, str]] = list(_absent(pair))
    errors: tuple[ErrorChange, ...] = ()
    memory: tuple[MemoryChange, ...] = ()
    costs: Mapping[Gated, CostChange] = {}
    if (rows := pair.measured) is not None:
        before, after = rows
        if unlike := unlike_questions(*rows) + ([] if terms.relative_to or here else unlike_places(*rows)):
            return Outcome(key, "incomparable", tuple(unlike), limits=limits)
        errors = tuple(risen_errors(before, after, limits.error))
        findings += _accuracy(before, after, errors)
        memory = tuple(memory_growth(before, after, limits.memory))
        findings += [("larger", memory_sentence(each)) for each in memory]
        if key in changes:
            costs = changes[key]
            found = verdict_of(costs)
            findings += [(found, each) for each in time_sentences(costs, found)] or [(found, "")]
            if found in ("slower", "faster"):
                findings += [(found, each) for each in clock_sentences(before, after)]
        elif yardsticks.get(key[0]) != rows:
            names = ", ".join(map(str, terms.relative_to))
            findings.append(("incomparable", f"{names} was not measured on this case on both sides"))
        else:
            findings.append(("baseline", "the others' times are relative to it"))
    verdict: RowVerdict = min((each for each, _ in findings), key=VERDICTS.index, default="unmeasured")
    findings.sort(key=lambda each: VERDICTS.index(each[0]))
    reasons = dict.fromkeys(reason for each, reason in findings if reason and each in (verdict, *_FINDINGS))
    allowed = verdict == "missing" and terms.allows(key)
    return Outcome(key, verdict, tuple(reasons), costs, errors, memory, limits, allowed)


def _absent(pair: Pair) -> Iterator[tuple[RowVerdict, str]]:
    """The finding if a side has no numbers; nothing if both or neither should have any."""
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
        yield "inaccurate", error_sentence(errors)
    if gone := families_missing(before, after):
        yield "missing", f"its errors on {', '.join(gone)} are in BASE alone"


def _differences(pairs: list[Pair]) -> list[str]:
    found: dict[str, None] = {}
    for pair in pairs:
        if pair.before is not None and pair.after is not None:
            found |= dict.fromkeys(other_differences(pair.before.environment, pair.after.environment))
    return list(found)
