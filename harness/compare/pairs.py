"""Pair the rows of two result sets, and decide whether they can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attnbench.errors import MisuseError
from attnbench.kernels.plan import Plan
from attnbench.tables.environment import Environment

from ..results.records import Measurement, Status, read_measurements
from ..results.store import measurements_file
from .terms import Key

__all__ = [
    "FAILURES",
    "Pair",
    "baselines",
    "machine_differences",
    "other_differences",
    "pair_rows",
    "rows_of",
    "unlike_places",
    "unlike_questions",
]

FAILURES: tuple[Status, ...] = ("oom", "timeout", "crashed", "error")
_MACHINE = ("device_type", "device_name", "device_count", "capability", "cpu")


@dataclass(frozen=True)
class Pair:
    """The rows of one case and plan in BASE and NEW; None on a side without one."""

    key: Key
    before: Measurement | None
    after: Measurement | None

    @property
    def measured(self) -> tuple[Measurement, Measurement] | None:
        """Both rows, if both carry numbers."""
        if self.before is None or self.after is None or not (self.before.measured and self.after.measured):
            return None
        return self.before, self.after


def rows_of(place: Path) -> dict[Key, Measurement]:
    """The rows of a folder of results or a file of measurements.

    Raises MalformedFileError if it holds anything else, MisuseError if it is empty or has a case and plan twice.
    """
    path = measurements_file(place)
    rows: dict[Key, Measurement] = {}
    for row in read_measurements(path):
        if row.key in rows:
            raise MisuseError(f"{path} has the case {row.case!r} with the plan {row.plan} twice")
        rows[row.key] = row
    if not rows:
        raise MisuseError(f"there is no measurement in {path}")
    return rows


def pair_rows(base: Mapping[Key, Measurement], new: Mapping[Key, Measurement]) -> list[Pair]:
    """Every case and plan of either side: those of BASE in order, then those only in NEW."""
    return [Pair(key, base.get(key), new.get(key)) for key in dict.fromkeys([*base, *new])]


def baselines(pairs: Iterable[Pair], plans: Sequence[Plan]) -> dict[str, tuple[Measurement, Measurement]]:
    """By case, the rows of the first of the plans that was measured on both sides.

    In training, a plan without a backward means its forward's own backward.
    """
    measured = {pair.key: rows for pair in pairs if (rows := pair.measured) is not None}
    found: dict[str, tuple[Measurement, Measurement]] = {}
    for plan in plans:
        for case, _ in measured:
            for key in ((case, plan), (case, Plan(plan.forward, plan.forward))):
                if case not in found and key in measured:
                    found[case] = measured[key]
    return found


def unlike_questions(before: Measurement, after: Measurement) -> list[str]:
    """Why no ratio of the two means anything, not even one to a baseline."""
    if before.spec == after.spec and before.lengths != after.lengths:
        return ["the sequences of the case have other lengths"]
    if before.spec == after.spec:
        return []
    return [f"the case was {before.spec}, is {after.spec}"]


def unlike_places(before: Measurement, after: Measurement) -> list[str]:
    """Why times of the two cannot be compared directly: another machine, another clock."""
    found = list(machine_differences(before.environment, after.environment))
    if (was := before.performance.timer) != (now := after.performance.timer):
        found.append(f"the timer was {was!r}, is {now!r}")
    return found


@cache
def machine_differences(before: Environment, after: Environment) -> tuple[str, ...]:
    """How two machines differ, so that times differ as well; one sentence for each fact.

    Versions of software are not among them: they are what is compared.  A different power cap, or on a CPU another
    number of threads, counts as another machine.
    """
    return tuple(_differing(before, after, _binding(before, after)))


@cache
def other_differences(before: Environment, after: Environment) -> tuple[str, ...]:
    """The other differences of two environments, to report beside the result."""
    hard, soft = before.differences(after)
    machine = set(machine_differences(before, after))
    return tuple(each for each in hard + soft if each not in machine)


def _binding(before: Environment, after: Environment) -> list[str]:
    names = list(_MACHINE)
    if "cpu" in (before.device_type, after.device_type):
        names.append("threads")
    if None not in (before.power_cap_w, after.power_cap_w):  # older records do not have it
        names.append("power_cap_w")
    return names


def _differing(before: Environment, after: Environment, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        was, now = getattr(before, name), getattr(after, name)
        if was != now:
            yield f"{name} was {'absent' if was is None else was}, is {'absent' if now is None else now}"
