"""The terms of a comparison: which costs, which limits, what may be missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, get_args

import yaml

from attnbench.errors import InputError, MalformedFileError, MisuseError
from attnbench.kernels.plan import Plan
from attnbench.text.printable import brief

from ..yaml_file import describe_node, entries, fault, read_yaml

__all__ = [
    "GATED",
    "LARGEST_LIMIT",
    "Gated",
    "Key",
    "Limits",
    "Terms",
    "Threshold",
    "check_used",
    "matches",
    "percentage",
    "read_thresholds",
]

Key = tuple[str, Plan]  # a case's name and the plan
Gated = Literal["kernel", "prepared", "backward", "call", "host"]  # the costs of a sweep, and the host's part of a call
GATED: tuple[Gated, ...] = get_args(Gated)
_PERCENTAGE = re.compile(r"(\d{1,4}(?:\.\d{1,6})?) ?%", re.ASCII)
LARGEST_LIMIT = 10.0  # eleven times as long
_FIELDS = ("time", "host", "error", "memory")
_NAMES = "time, host, error or memory"


@dataclass(frozen=True)
class Limits:
    """``time``: the slow-down that must be found; ``error``, ``memory``: the largest rise.  0.03 is 3 %.

    ``host`` is the slow-down to be found of what a GPU's host decides: its part of a call, and a call that waits for
    it.  Without any change, that differs by tens of percent from run to run.

    The limit of errors is far above the difference between two runs: the same kernels, in three committed result sets
    from three GPUs and three states of the harness, were at most 14 % apart.
    """

    time: float = 0.03
    error: float = 0.25
    host: float = 1.0
    memory: float = 0.1


@dataclass(frozen=True)
class Threshold:
    """Limits for the rows that a pattern matches; None for a limit that it leaves unchanged."""

    pattern: str
    time: float | None = None
    error: float | None = None
    host: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class Terms:
    """What is compared and how.

    ``relative_to`` names the plans that times are divided by, in order of preference; ``allowed`` are patterns of what
    may be missing.  Of the ``thresholds`` that match a row the last one counts.
    """

    limits: Limits = Limits()
    thresholds: tuple[Threshold, ...] = ()
    costs: tuple[Gated, ...] = GATED
    relative_to: tuple[Plan, ...] = ()
    allowed: tuple[str, ...] = field(default=())

    def limits_of(self, key: Key) -> Limits:
        """The limits of a row."""
        limits = self.limits
        for each in self.thresholds:
            if matches(each.pattern, key):
                overrides = {name: value for name in _FIELDS if (value := getattr(each, name)) is not None}
                limits = replace(limits, **overrides)
        return limits

    def allows(self, key: Key) -> bool:
        """Whether the row may be missing on one side."""
        return any(matches(pattern, key) for pattern in self.allowed)


def matches(pattern: str, key: Key) -> bool:
    """Whether the pattern, with ``*`` and ``?``, is the case's name, the plan's, or both: ``case: plan``."""
    case, plan = key
    names = (case, str(plan), f"{case}: {plan}")
    return pattern in names or any(fnmatchcase(name, pattern) for name in names)


def check_used(terms: Terms, keys: Iterable[Key]) -> None:
    """Raise MisuseError if a plan or a pattern matches no row: it is misspelt, and would protect nothing."""
    rows = list(keys)
    patterns = [*terms.allowed, *(each.pattern for each in terms.thresholds)]
    for pattern in patterns:
        if not any(matches(pattern, key) for key in rows):
            raise MisuseError(f"{pattern!r} matches no case and no plan in either of the results")
    plans = {plan for _, plan in rows}
    for baseline in terms.relative_to:
        if not {baseline, Plan(baseline.forward, baseline.forward)} & plans:
            raise MisuseError(f"no row of either of the results has the plan {baseline} to be relative to")


def percentage(text: str) -> float:
    """``3%`` is 0.03.  Raises InputError if the text is not a percentage above 0 and up to 1000 %.

    The sign is required, because 3 % could be written as 3 or as 0.03.
    """
    found = _PERCENTAGE.fullmatch(text.strip())
    value = float(found[1]) / 100 if found else 0.0
    if not 0 < value <= LARGEST_LIMIT:
        raise InputError(f"expected a percentage such as 3% or 0.5%, 1000% at most, not {brief(text)}")
    return value


def read_thresholds(path: Path) -> tuple[Threshold, ...]:
    """The limits of a YAML file: patterns of cases or plans, each with a percentage, or with several::

        "*causal*": 5%
        "fa3:fp8": {time: 2%, host: 50%, error: 10%, memory: 20%}

    Raises MalformedFileError with the line and what was expected there.
    """
    root = read_yaml(path, "thresholds")
    if not isinstance(root, yaml.MappingNode) or not root.value:
        raise MalformedFileError(path, 'expected lines such as `"*causal*": 5%`', 1)
    return tuple(_thresholds(path, root))


def _thresholds(path: Path, root: yaml.MappingNode) -> Iterator[Threshold]:
    for pattern, _, value in entries(path, root, "the name or pattern of a case or plan"):
        if isinstance(value, yaml.MappingNode):
            yield Threshold(pattern, **dict(_fields(path, value)))
        else:
            yield Threshold(pattern, time=_share(path, value))


def _fields(path: Path, node: yaml.MappingNode) -> Iterator[tuple[str, float]]:
    if not node.value:
        raise fault(path, node, f"expected {_NAMES} here")
    for name, key, value in entries(path, node, _NAMES):
        if name not in _FIELDS:
            raise fault(path, key, f"expected {_NAMES}, not {describe_node(key)}")
        yield name, _share(path, value)


def _share(path: Path, node: yaml.Node) -> float:
    if not isinstance(node, yaml.ScalarNode):
        raise fault(path, node, f"expected a percentage such as 3%, not {describe_node(node)}")
    try:
        return percentage(node.value)
    except InputError as error:
        raise fault(path, node, str(error)) from error
