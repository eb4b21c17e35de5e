"""Noise-free facts of loss curves: the final loss, spikes, and the gap between two curves."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from attnbench.errors import InputError

__all__ = ["Curve", "ending", "gap_curve", "known_median", "smooth", "spikes", "window_of"]

Curve: TypeAlias = npt.NDArray[np.float64]
_SPIKE = 8.0  # deviations above the steps before; normal noise exceeds it in one step of 1e15
_BEFORE = 20  # steps that a spike is compared with
_MAD = 1.4826  # the deviation of normal numbers whose median distance from their median is 1
_WINDOW = 20
_LEAST = 1e-3  # of the loss: a smaller rise is never a spike


def known_median(values: Sequence[float | None]) -> float | None:
    """The median of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def window_of(steps: int) -> int:
    """The window in which a curve of ``steps`` steps is smoothed for a figure: a twentieth of it."""
    return max(1, steps // _WINDOW)


def smooth(losses: Sequence[float], window: int) -> Curve:
    """The mean of each step and up to ``window`` − 1 steps before it.  Raises InputError for a window below 1."""
    if window < 1:
        raise InputError(f"a window has at least one step, not {window}")
    values = np.asarray(losses, dtype=np.float64)
    sums = np.concatenate(([0.0], np.cumsum(values)))
    ends = np.arange(1, values.size + 1)
    starts = np.maximum(0, ends - window)
    averaged: Curve = (sums[ends] - sums[starts]) / (ends - starts)
    return averaged


def ending(losses: Sequence[float], share: float) -> float:
    """The mean loss of the last ``share`` of the steps, at least one.  Raises InputError if there is no step."""
    if not losses:
        raise InputError("a curve has at least one step")
    return float(np.mean(losses[-max(1, round(len(losses) * share)) :]))


def gap_curve(candidate: Sequence[float], baseline: Sequence[float], window: int) -> Curve:
    """The candidate's smoothed loss over the baseline's, minus one, for the steps that both have."""
    steps = min(len(candidate), len(baseline))
    gap: Curve = smooth(candidate[:steps], window) / smooth(baseline[:steps], window) - 1
    return gap


def spikes(losses: Sequence[float]) -> list[int]:
    """The steps whose loss is more than 8 deviations above the 20 steps before, or is not finite.

    The deviation comes from the median distance of those steps to their median, which earlier spikes do not widen.
    """
    values = np.asarray(losses, dtype=np.float64)
    leaps = ~np.isfinite(values)
    if values.size > _BEFORE:
        before = np.lib.stride_tricks.sliding_window_view(np.where(leaps, np.nan, values), _BEFORE)[:-1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of windows without a single finite step
            middle = np.nanmedian(before, axis=1)
            away = np.nanmedian(np.abs(before - middle[:, None]), axis=1)
        deviation = np.maximum(_MAD * away, _LEAST * np.abs(middle))
        leaps[_BEFORE:] |= values[_BEFORE:] > middle + _SPIKE * deviation
    return [int(step) for step in np.flatnonzero(leaps)]
