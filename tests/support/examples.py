"""How much of a property is tried: a part in every run, all of it in the exhaustive one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

__all__ = ["every_pair", "examples"]


def examples(few: int, many: int) -> int:
    """``many`` where HYPOTHESIS_PROFILE is ``exhaustive``, else ``few``."""
    return many if os.environ.get("HYPOTHESIS_PROFILE") == "exhaustive" else few


def every_pair(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of the axes' values, marked exhaustive but for a Latin square of them.

    Left are those whose place on the last axis, counted round and round, is the sum of their places on the others: one
    for each combination of the others.  Each value of the last axis meets each value of another axis that way where
    some third axis is as long as the last.
    """
    combinations = []
    for places in product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        left = sum(places[:-1]) % len(axes[-1]) == places[-1]
        marks = () if left else pytest.mark.exhaustive
        combinations.append(pytest.param(*values, marks=marks, id="-".join(map(_name, values))))
    return combinations


def _name(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(_name, value))
    return str(getattr(value, "name", value))
