"""The results of a comparison as sentences with numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ..formatting import error, number
from ..results.records import Measurement
from ..statistics import TimeVerdict
from .errors import ErrorChange
from .terms import LARGEST_LIMIT, Gated
from .times import CostChange

__all__ = ["change", "clock_sentences", "error_sentence", "share", "time_sentences"]

_NOTEWORTHY = 0.01  # of a clock, relative


def change(ratio: float) -> str:
    """``+3.1%`` for 1.031; as a multiple from 10 on."""
    return f"{ratio - 1:+.1%}" if ratio < 10 else f"{number(ratio)} times"


def share(value: float) -> str:
    """``2.1%`` for 0.021, rounded up; ``over`` the largest limit for larger values."""
    return f"{math.ceil(value * 1e3 - 1e-6) / 10:g}%" if value <= LARGEST_LIMIT else f"over {LARGEST_LIMIT:.0%}"


def time_sentences(costs: Mapping[Gated, CostChange], verdict: TimeVerdict) -> Iterator[str]:
    """A sentence for each cost that supports the verdict; none for ``same``."""
    if not costs:
        yield "they have no times that can be compared"
    for each in costs.values():
        if each.replayed:
            yield f"{each.cost} was timed as a CUDA graph on one side only"
        elif each.verdict == verdict != "same":
            yield _time_sentence(each)


def _time_sentence(each: CostChange) -> str:
    low, high = each.interval
    medians = f"{number(each.median[0])} to {number(each.median[1])}{'' if each.relative else ' ms'}"
    visible = f", visible {share(each.visible)}" if each.verdict == "uncertain" else ""
    return f"{each.cost} {change(each.ratio)} ({change(low)} to {change(high)}), {medians}{visible}"


def error_sentence(errors: Sequence[ErrorChange]) -> str:
    """The error that rose most, and the number of the others."""
    first = errors[0]
    others = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
    return f"{first.tensor} on {first.family}: its error was {error(first.before)}, is {error(first.after)}{others}"


def clock_sentences(before: Measurement, after: Measurement) -> Iterator[str]:
    """The difference if both rows know the GPU's clock and it changed: times may have changed for that alone."""
    was, now = (gpu.clock_mhz if (gpu := row.performance.gpu) else None for row in (before, after))
    if was and now and abs(now.median - was.median) > _NOTEWORTHY * was.median:
        yield f"the GPU's clock was {was.median:.0f} MHz, is {now.median:.0f} MHz"
