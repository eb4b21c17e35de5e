"""The main findings in sentences: fastest plans, gain of FP8, fast but inaccurate plans, gain of choosing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from attnbench.choosing.regret_fixed import TORCH_DEFAULT, Fixed, against_fixed
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import Registry
from attnbench.problem.spec import Direction

from ...formatting import error
from .machines import DEFAULT, DIRECTIONS, WIDE, Case, Machine, worst_error
from .shapes import short

__all__ = ["fixed_of", "headlines"]

_NAMED = 3
_EMULATION = "They show what FP8 does to the result; their times say nothing of a GPU's FP8 kernels."


def fixed_of(machine: Machine, known: Registry) -> list[Fixed]:
    """The cost of always using one backend, FP8 plans included."""
    return against_fixed(machine.table, known, DEFAULT)


def headlines(machine: Machine, fixed: Sequence[Fixed]) -> list[tuple[str, str]]:
    """(topic, sentence) pairs, the most important first."""
    entries = []
    for direction in DIRECTIONS:
        cases = [case for case in machine.of(direction) if case.answer.plan is not None]
        if cases:
            entries.append((f"Who wins, {direction}", _winners(cases)))
    paid = [text for direction in DIRECTIONS if (text := _pays(machine, direction))]
    if paid:
        entries.append(("Does FP8 pay", " ".join(paid)))
    if trap := _traps(machine):
        entries.append(("Fast but wrong", trap))
    saved = [text for direction in DIRECTIONS if (text := _saved(fixed, direction))]
    if saved:
        entries.append(("What choosing saves", " ".join(saved)))
    if any(row.emulated for case in machine.cases for row in case.measured):
        entries.append(("Emulated plans", _EMULATION))
    return entries


def _winners(cases: Sequence[Case]) -> str:
    won = Counter(short(case.answer.plan) for case in cases if case.answer.plan).most_common()
    wide = Counter(short(plan) for case in cases if (plan := case.answers[WIDE].plan)).most_common()
    tight = sum(case.answer.margin is not None and case.answer.margin.inside_noise for case in cases)
    bounds = sorted({DEFAULT.budget(case.spec) for case in cases})
    text = f"Within an error of {' or '.join(f'{bound:g}' for bound in bounds)}, {_count_text(won, len(cases))}."
    if wide and wide[0][0] != won[0][0]:
        text += f" Without FP8, {_count_text(wide, len(cases))}."
    if tight:
        text += f" At {tight} the runner-up lies within the noise."
    return text


def _count_text(won: Sequence[tuple[str, int]], total: int) -> str:
    first, others = won[0], won[1:_NAMED]
    text = f"{first[0]} wins at {first[1]} of {total} {'shape' if total == 1 else 'shapes'}"
    if others:
        text += f", {', '.join(f'{plan} at {count}' for plan, count in others)}"
    left = sum(count for _, count in won[_NAMED:])
    return f"{text}, others at {left}" if left else text


def _pays(machine: Machine, direction: Direction) -> str:
    """How often the chosen plan uses FP8, and how much faster it is than the fastest plan without FP8."""
    cases = [case for case in machine.of(direction) if case.wide_ms is not None and case.answer.plan is not None]
    tried = [case for case in cases if any(row.plan.fp8 and not row.emulated for row in case.measured)]
    if not tried:
        return ""
    gains = [case.speed(case.answer.plan) or 0.0 for case in tried if case.answer.plan and case.answer.plan.fp8]
    where = "In the forward" if direction == "forward" else "In training (forward and backward)"
    if not gains:
        return f"{where} no FP8 plan is chosen at any of the shapes, {len(tried)} in all."
    return (
        f"{where} an FP8 plan is chosen at {len(gains)} of {len(tried)} shapes, {np.median(gains):.2f} times as fast "
        f"as the fastest plan without FP8 in the median, {max(gains):.2f} times at most."
    )


def _traps(machine: Machine) -> str:
    """Plans that are faster than the chosen one but not accurate enough: how often, and their errors."""
    ahead: dict[Plan, list[tuple[float, float]]] = {}
    for case in machine.cases:
        chosen = case.answer.plan
        for row in case.measured:
            if chosen is None or case.times[row.plan] >= case.times[chosen]:
                break
            candidate = case.answer.candidates.get(row.plan)
            if not row.emulated and (candidate is None or candidate.verdict != "eligible"):
                ahead.setdefault(row.plan, []).append((worst_error(row)[0], case.times[chosen] / case.times[row.plan]))
    if not ahead:
        return "Nowhere is a plan that is not accurate enough faster than the one that is chosen."
    worst = sorted(ahead, key=lambda plan: (-len(ahead[plan]), str(plan)))
    named = [
        f"{short(plan)} (at {len(ahead[plan])}, error up to {error(max(each[0] for each in ahead[plan]))}, "
        f"up to {max(each[1] for each in ahead[plan]):.2f} times as fast)"
        for plan in worst[:_NAMED]
    ]
    more = f", and {len(worst) - _NAMED} more" if len(worst) > _NAMED else ""
    return f"Faster than what is chosen, and not accurate enough or not right: {', '.join(named)}{more}."


def _saved(fixed: Sequence[Fixed], direction: Direction) -> str:
    rows = [row for row in fixed if row.direction == direction]
    usual = next((row for row in rows if row.backend == TORCH_DEFAULT), None)
    best = next((row for row in rows if row.serves == row.specs and row.backend != TORCH_DEFAULT), None)
    parts = list(_parts(usual, best))
    return f"{direction.capitalize()}: {'; '.join(parts)}." if parts else ""


def _parts(usual: Fixed | None, best: Fixed | None) -> Iterator[str]:
    if usual is not None:
        yield f"taking torch's default everywhere costs {usual.slow_down:.0%} in the mean, {usual.worst:.0%} at worst"
    if best is not None:
        yield f"the best single backend, {best.backend}, {best.slow_down:.0%} and {best.worst:.0%}"
