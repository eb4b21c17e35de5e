"""Group runs that differ only in their seed into arms, and compare a candidate's arm with its baseline's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..rows import Share, TrainingRun
from .curves import ending, known_median
from .learning import END, Learning, judge_pairs, pairs_of

__all__ = ["Arm", "arms_of", "compare_arms", "kinds_of", "scaling_efficiency", "title_of"]

# What may differ between a candidate and its baseline: the computation, not the model, data or schedule.
_HOW = (
    "attention",
    "max_error",
    "fp8",
    "linears",
    "block",
    "policy",
    "checkpointing",
    "offload",
    "compile",
    "optimiser",
    "parallel",
    "context_parallel",
    "packing",
)
_SPREAD = ("parallel", "policy", "context_parallel")  # what depends on the number of GPUs
_ATTENTION = ("attention", "max_error", "fp8")


@dataclass(frozen=True)
class Arm:
    """``runs`` in the order of their seeds; ``label`` distinguishes the arm from the others.

    ``time`` numbers repetitions of the same runs from 1: made again on the machine, or at another price.
    """

    label: str
    runs: tuple[TrainingRun, ...]
    time: int = 1

    @property
    def first(self) -> TrainingRun:
        """The first run, for what all runs have in common."""
        return self.runs[0]

    @property
    def baseline(self) -> bool:
        """Whether others are compared with it."""
        return self.first.role == "baseline"

    @property
    def samples_ms(self) -> list[float]:
        """The valid step times of all runs."""
        return [taken for run in self.runs for taken in run.samples_ms]

    @property
    def median_ms(self) -> float | None:
        """The median of ``samples_ms``; None if there are none."""
        return float(np.median(self.samples_ms)) if self.samples_ms else None

    @property
    def units_per_second(self) -> float | None:
        """Units of all ranks per second, at the median step."""
        return None if self.median_ms is None else self.first.units_per_step / self.median_ms * 1e3

    @property
    def mfu(self) -> float | None:
        """The median over the runs."""
        return known_median([run.mfu for run in self.runs])

    @property
    def attention_share(self) -> float | None:
        """The median over the runs."""
        return known_median([None if run.attention is None else run.attention.share for run in self.runs])

    @property
    def attention(self) -> Share | None:
        """The first run's that has one."""
        return next((run.attention for run in self.runs if run.attention is not None), None)

    @property
    def memory_bytes(self) -> int | None:
        """The largest peak."""
        return max((run.memory_bytes for run in self.runs if run.memory_bytes is not None), default=None)

    @property
    def end(self) -> float | None:
        """The mean over the runs of their final loss."""
        ends = [ending(run.loss, END) for run in self.runs if run.loss]
        return float(np.mean(ends)) if ends else None


def arms_of(runs: Sequence[TrainingRun]) -> list[Arm]:
    """The arms in the order of their first runs, each with a unique label if settings differ."""
    groups: dict[tuple[str, int], list[TrainingRun]] = {}
    times: dict[str, int] = {}
    for run in runs:
        group = _group(run)
        same = f"{run.seed} {group}"
        times[same] = times.get(same, 0) + 1
        groups.setdefault((group, times[same]), []).append(run)
    firsts = [group[0] for group in groups.values()]
    varying = [
        name
        for name in dict.fromkeys(name for run in firsts for name in run.settings)
        if name not in (*_ATTENTION, "seed") and len({str(run.settings.get(name)) for run in firsts}) > 1
    ] if firsts else []  # fmt: skip
    machines = len({_machine(run) for run in firsts}) > 1
    return [
        Arm(_label(group[0], varying, machines, time), tuple(sorted(group, key=lambda run: run.seed)), time)
        for (_, time), group in groups.items()
    ]


def kinds_of(runs: Sequence[TrainingRun]) -> list[list[TrainingRun]]:
    """The runs grouped by model, data and schedule, in the order of their first ones.

    Runs of one group may be compared, on whatever machine and number of GPUs.
    """
    kinds: dict[str, list[TrainingRun]] = {}
    for run in runs:
        kinds.setdefault(json.dumps(_learnt(run), sort_keys=True), []).append(run)
    return list(kinds.values())


def title_of(arms: Sequence[Arm]) -> str:
    """The model, data and device; for many kinds of arms the first three."""
    titles = dict.fromkeys(
        f"{run.settings.get('model')} {run.settings.get('size')}, {run.settings.get('seqlen')} tokens a sample, batch "
        f"{run.settings.get('batch')}, {run.settings.get('steps')} steps on {run.environment.device_name}"
        for run in (arm.first for arm in arms)
    )
    return "; ".join(list(titles)[:3]) + ("; ..." if len(titles) > 3 else "")


def compare_arms(arms: Sequence[Arm]) -> list[tuple[Arm, Arm, Learning]]:
    """Each candidate with the most similar baseline of the same model, data and schedule, and the verdict."""
    found = []
    for arm in arms:
        rivals = [each for each in arms if each.baseline and _learns_the_same(arm.first, each.first)]
        if not arm.baseline and rivals:
            nearest = min(rivals, key=lambda each: (each.time != arm.time, _differences(arm.first, each.first)))
            found.append((arm, nearest, judge_pairs(pairs_of([*arm.runs, *nearest.runs]))))
    return found


def scaling_efficiency(arm: Arm, arms: Sequence[Arm]) -> float | None:
    """Throughput of an arm's N ranks over N times that of the same arm on one rank; None if that was not run.

    Each rank has the same batch in both (weak scaling), or some of its tokens (``context_parallel``, strong scaling).
    """
    if arm.first.world == 1 or arm.units_per_second is None:
        return None
    for each in arms:
        alone = each.first.world == 1 and each.units_per_second is not None
        if alone and _without(arm.first, (*_SPREAD, "seed")) == _without(each.first, (*_SPREAD, "seed")):
            return arm.units_per_second / (arm.first.world * (each.units_per_second or 1.0))
    return None


def _group(run: TrainingRun) -> str:
    return json.dumps([run.role, run.world, _machine(run), _without(run, ("seed",))], sort_keys=True)


def _machine(run: TrainingRun) -> str:
    return f"{run.environment.device_name} {run.environment.key}"


def _without(run: TrainingRun, names: Sequence[str]) -> dict[str, object]:
    return {name: value for name, value in run.settings.items() if name not in names}


def _learnt(run: TrainingRun) -> dict[str, object]:
    """The model, data and schedule.  Packed and padded documents are the same data, windows of the text others."""
    return {**_without(run, (*_HOW, "seed")), "documents": run.settings.get("packing", "none") != "none"}


def _learns_the_same(one: TrainingRun, other: TrainingRun) -> bool:
    same = one.world == other.world and _machine(one) == _machine(other)
    return same and _learnt(one) == _learnt(other)


def _differences(one: TrainingRun, other: TrainingRun) -> int:
    return sum(one.settings.get(name) != other.settings.get(name) for name in _HOW)


def _label(run: TrainingRun, varying: Sequence[str], machines: bool, time: int) -> str:
    label = str(run.settings["attention"])
    if run.settings.get("fp8"):
        label += " fp8"
    if run.settings.get("max_error") is not None:
        label += f" max_error={run.settings['max_error']}"
    label += "".join(f" {name}={run.settings[name]}" for name in varying if name in run.settings)
    if machines or run.world > 1:
        label += f" on {f'{run.world} × ' if run.world > 1 else ''}{run.environment.device_name}"
    if time > 1:
        label += f" #{time}"
    return label
