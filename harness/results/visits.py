"""The medians of a row's visits, which a comparison counts as single observations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..measure.timing import Cost
from ..statistics import MEDIAN_ERROR, spread
from .records import Measurement

__all__ = ["groups", "samples_of", "sampling_error", "visit_medians"]

# The limits of a sweep (attnbench.harness.measure.timing.Timer), for rows of versions that did not record visits.
_VISIT_MS = {"cuda": 10.0, "cpu": 30.0}
_MOST_A_VISIT = 50


def visit_medians(row: Measurement, cost: Cost | None) -> list[float]:
    """The median of each visit's samples of a cost, or with None of the host's part of the call, in milliseconds.

    The samples of a row without visits are divided into groups as large as a sweep's visit would be.
    """
    samples = samples_of(row, cost)
    counts = row.performance.visits.get(cost or "call")
    if counts is None:
        longest = _VISIT_MS.get(row.environment.device_type, _VISIT_MS["cpu"])
        size = min(_MOST_A_VISIT, int(longest / row.median_ms(cost or "call")))
        return groups(samples, max(1, size))
    return [float(np.median(part)) for part in np.split(np.asarray(samples), np.cumsum(counts)[:-1])]


def sampling_error(row: Measurement, cost: Cost | None, visits: int) -> float:
    """The least standard error of a visit's median, as a logarithm, from the scatter of all samples.

    Few visits may agree by chance, although their samples scatter by 20 %.
    """
    samples = samples_of(row, cost)
    return (spread(samples) or 0.0) * MEDIAN_ERROR * math.sqrt(visits / len(samples))


def samples_of(row: Measurement, cost: Cost | None) -> Sequence[float]:
    """The samples of a cost, or with None of the host's part of the call, in milliseconds."""
    return (row.performance.host_ms or []) if cost is None else row.time_ms[cost]


def groups(samples: Sequence[float], size: int) -> list[float]:
    """The medians of equally large groups of at most ``size`` consecutive samples."""
    return [float(np.median(part)) for part in np.array_split(np.asarray(samples), -(-len(samples) // size))]
