"""Numbers of examples and combinations: a subset in the default run, all in the exhaustive run."""

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
    """All combinations of the axes' values; all but a Latin square of them are marked exhaustive.

    Unmarked are those whose index on the last axis equals the sum of their other indices modulo its length: one for
    each combination of the other axes.  Each value of the last axis is paired with each value of another axis if some
    third axis is as long as the last.
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
