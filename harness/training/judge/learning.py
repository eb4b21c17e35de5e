"""Decide whether a configuration learns as well as the baseline, by stated rules over paired runs.

Runs are paired by seed: the same initial weights, the same data in the same order.  Differences come from the
configuration and from rounding.  The range of the final losses of baseline runs with different seeds is the band within
which a difference does not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from attnbench.errors import InputError

from ...formatting import change, number
from ..rows import TrainingRun
from .curves import ending, known_median, spikes

__all__ = ["RULES", "Learning", "LearningVerdict", "Pair", "judge_pairs", "pairs_of"]

LearningVerdict = Literal["equivalent", "degraded", "diverged", "inconclusive"]

TOLERANCE = 0.0025  # relative loss; what DeepSeek-V3's report (arXiv 2412.19437, section 3.3) accepts of FP8
LEAST_SEEDS = 3
LEAST_STEPS = 100
END = 0.2  # the share of the steps whose mean is a run's final loss
CONFIDENCE = 0.95  # one-sided, of the mean gap over the seeds
GRADIENT = 0.25  # twice the default error limit of FP8 attention changes a norm by less
RISE = 0.1  # of the loss, above the lowest fifth: a run that learns does not rise so far
_ROUNDING = 1e-9  # of the means that the band is computed from
_CERTAIN = 4.0  # standard errors by which it must rise, because small batches make fifths differ

RULES: tuple[tuple[LearningVerdict | str, str], ...] = (
    (
        "diverged",
        "a candidate's run ended because loss or gradients were not finite, or its loss at the end lies "
        f"{RISE:.0%} above its own lowest fifth and {_CERTAIN:g} standard errors, and no baseline's did",
    ),
    (
        "degraded",
        f"attention's first gradients, taken with equal weights and data, are {GRADIENT:.0%} shorter or longer than "
        f"the baseline's in most seeds; or after {LEAST_STEPS} steps or more the gap is above {TOLERANCE:.2%}, and "
        f"above zero with {CONFIDENCE:.0%} confidence",
    ),
    (
        "inconclusive",
        f"fewer than {LEAST_SEEDS} pairs or {LEAST_STEPS} steps; or the baseline diverged; or no other rule applies",
    ),
    (
        "equivalent",
        f"the gap is at most {TOLERANCE:.2%} either way and inside the band of the baseline's seeds, and below twice "
        f"that with {CONFIDENCE:.0%} confidence",
    ),
)
"""The verdicts in the order in which they are tried, each with its rule.

*End* is the mean loss of the last fifth of the steps; *gap* the mean over the pairs of (candidate's end / baseline's
end − 1); its confidence is Student's over the pairs.  The *band* reaches from the lowest to the highest end of the
baseline's runs, relative to their mean.
"""


@dataclass(frozen=True)
class Pair:
    """A candidate's and a baseline's run with the same seed."""

    candidate: TrainingRun
    baseline: TrainingRun

    @property
    def gap(self) -> float:
        """The candidate's end over the baseline's, minus one."""
        steps = min(len(self.candidate.loss), len(self.baseline.loss))
        ours, theirs = (ending(run.loss[:steps], END) for run in (self.candidate, self.baseline))
        return ours / theirs - 1 if theirs else math.nan

    @property
    def gradient_ratio(self) -> float | None:
        """The median over the steps of the candidate's gradient norm over the baseline's."""
        norms = zip(self.candidate.grad_norm, self.baseline.grad_norm, strict=False)
        ratios = [ours / theirs for ours, theirs in norms if theirs > 0 and math.isfinite(ours / theirs)]
        return float(np.median(ratios)) if ratios else None

    @property
    def first_gradient_ratio(self) -> float | None:
        """The ratio of the norms of attention's own gradients at the first step, when the weights are equal."""
        if not (self.candidate.signs and self.baseline.signs):
            return None
        ours, theirs = self.candidate.signs[0], self.baseline.signs[0]
        if ours.step != 0 or theirs.step != 0 or not theirs.gradient_norm > 0:
            return None
        return ours.gradient_norm / theirs.gradient_norm


@dataclass(frozen=True)
class Learning:
    """The verdict on the pairs.

    ``gap`` and its one-sided bounds ``low`` and ``high`` are relative losses, ``band`` is the baseline's (lowest,
    highest) end relative to its mean; None if they cannot be computed.  ``gradient_ratio`` and ``first_gradient_ratio``
    are medians over the pairs; ``spikes`` counts those of (candidate, baseline) over all pairs.
    """

    verdict: LearningVerdict
    reason: str
    pairs: int
    steps: int
    gap: float | None = None
    low: float | None = None
    high: float | None = None
    band: tuple[float, float] | None = None
    gradient_ratio: float | None = None
    first_gradient_ratio: float | None = None
    spikes: tuple[int, int] = (0, 0)


def pairs_of(runs: Sequence[TrainingRun]) -> list[Pair]:
    """Candidates and baselines with equal seeds, in the order of the seeds.

    Raises InputError if two runs have the same role and seed.
    """
    found: dict[tuple[str, int], TrainingRun] = {}
    for run in runs:
        if (run.role, run.seed) in found:
            raise InputError(f"two {run.role} runs have the seed {run.seed}")
        found[run.role, run.seed] = run
    seeds = sorted({seed for _, seed in found})
    return [
        Pair(found["candidate", seed], found["baseline", seed])
        for seed in seeds
        if ("candidate", seed) in found and ("baseline", seed) in found
    ]


def judge_pairs(pairs: Sequence[Pair]) -> Learning:
    """The verdict on the pairs by ``RULES``, with a sentence that names the rule."""
    if not pairs:
        return Learning("inconclusive", "no pair of runs", 0, 0)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # of losses that are not finite
        return _judge(pairs)


def _judge(pairs: Sequence[Pair]) -> Learning:
    steps = min(min(len(pair.candidate.loss), len(pair.baseline.loss)) for pair in pairs)
    counted = (
        sum(len(spikes(pair.candidate.loss)) for pair in pairs),
        sum(len(spikes(pair.baseline.loss)) for pair in pairs),
    )
    baselines = [pair.baseline for pair in pairs]
    lost = [pair.candidate for pair in pairs if _diverged(pair.candidate)]
    first = known_median([pair.first_gradient_ratio for pair in pairs])
    gaps = np.array([pair.gap for pair in pairs]) if steps else np.full(len(pairs), math.nan)
    gap, (low, high) = float(gaps.mean()), _interval(gaps)
    band = _band(baselines, steps) if steps else (math.nan, math.nan)
    verdict: LearningVerdict
    if any(_diverged(baseline) for baseline in baselines):
        verdict, reason = "inconclusive", "the baseline itself diverged"
    elif lost:
        seeds = ", ".join(str(run.seed) for run in lost)
        verdict, reason = "diverged", f"with the seed {seeds} {_how(lost[0])}"
    elif first is not None and not 1 - GRADIENT <= first <= 1 + GRADIENT:
        verdict, reason = "degraded", f"attention's first gradients are {number(first)} times as long as the baseline's"
    elif not math.isfinite(gap):
        verdict, reason = (
            "inconclusive",
            "no step was taken by both" if not steps else "the ratio of the losses is not finite",
        )
    else:
        verdict, reason = _by_gap(gap, low, high, band, len(pairs), steps)
    return Learning(
        verdict,
        reason,
        len(pairs),
        steps,
        gap=gap if math.isfinite(gap) else None,
        low=low if math.isfinite(low) else None,
        high=high if math.isfinite(high) else None,
        band=band if all(map(math.isfinite, band)) else None,
        gradient_ratio=known_median([pair.gradient_ratio for pair in pairs]),
        first_gradient_ratio=first,
        spikes=counted,
    )


def _by_gap(
    gap: float, low: float, high: float, band: tuple[float, float], pairs: int, steps: int
) -> tuple[LearningVerdict, str]:
    gap_text = f"the gap is {change(gap)}"
    if steps < LEAST_STEPS:  # while the loss falls steeply, a moment's delay is a large gap
        return "inconclusive", f"{gap_text} after {steps} steps; {LEAST_STEPS} are needed"
    if gap > TOLERANCE and low > 0:
        return "degraded", f"{gap_text}, more than {TOLERANCE:.2%}, and above zero with {CONFIDENCE:.0%} confidence"
    if pairs < LEAST_SEEDS:
        return "inconclusive", f"{gap_text}, of {pairs} seeds; {LEAST_SEEDS} are needed"
    if abs(gap) > TOLERANCE:
        return "inconclusive", f"{gap_text}, beyond {TOLERANCE:.2%}, and may be chance or no loss at all"
    if not band[0] - _ROUNDING <= gap <= band[1] + _ROUNDING:
        return "inconclusive", f"{gap_text}, outside the baseline's own {change(band[0])} to {change(band[1])}"
    if max(-low, high) > 2 * TOLERANCE:
        return "inconclusive", f"{gap_text}, but may be {change(low)} to {change(high)}: the seeds differ too much"
    return (
        "equivalent",
        f"{gap_text}, within {TOLERANCE:.2%} and inside the baseline's own {change(band[0])} to {change(band[1])}",
    )


def _diverged(run: TrainingRun) -> bool:
    if run.status == "diverged":
        return True
    if len(run.loss) < 2:
        return False
    fifths = np.array_split(np.asarray(run.loss), round(1 / END))
    means = [float(each.mean()) for each in fifths if each.size]
    errors = [float(each.var() / each.size) for each in fifths if each.size]
    lowest = int(np.argmin(means))
    rise = means[-1] - means[lowest]
    certain = rise > _CERTAIN * math.sqrt(errors[-1] + errors[lowest])
    return not math.isfinite(means[-1]) or (rise > RISE * means[lowest] and certain)


def _how(run: TrainingRun) -> str:
    if run.status == "diverged":
        return run.reason or "it was not finite"
    return f"the loss ends {RISE:.0%} or more above its lowest fifth"


def _interval(gaps: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    """The one-sided bounds of the mean, each with ``CONFIDENCE``; infinite for one pair."""
    if gaps.size < 2:
        return -math.inf, math.inf
    half = float(stats.t.ppf(CONFIDENCE, gaps.size - 1) * gaps.std(ddof=1) / math.sqrt(gaps.size))
    middle = float(gaps.mean())
    return middle - half, middle + half


def _band(baselines: Sequence[TrainingRun], steps: int) -> tuple[float, float]:
    ends = [ending(run.loss[:steps], END) for run in baselines]
    middle = float(np.mean(ends))
    return (min(ends) / middle - 1, max(ends) / middle - 1) if middle else (math.nan, math.nan)
