"""The race of a case's plans: a first look at each, close times of those that may win, a judgement of who wins.

A first look is one visit, without a proof of what ran, CUDA graphs or errors.  A delayed host makes a call longer,
never shorter, so the shortest sample counts; and a plan that only its host made slow is looked at once more.  In 172
choices on an H200 (tests/harness/sweep/test_race_replay.py) the plan that a full sweep found fastest won in all but
two, both of one case, where the host decided between two plans.

FP8 plans and 16-bit plans race apart, because a caller may accept the latter alone.  Only the winners and what is about
as fast are proved and judged.  One that failed or is inaccurate leaves the race, so that those behind it may win.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median

from attnbench.kernels.plan import Plan, backend_of

from ..measure.findings import Visit
from ..measure.timing import Cost
from .interleave import Samples

__all__ = ["LOOKED_AT", "Race", "covering"]

LOOKED_AT: tuple[Cost, ...] = ("prepared", "backward", "call")
# Times the fastest.  With 1.2 three winners of 333 cases were lost, one of them 28 % faster than the next plan.
_MAY_WIN = 1.3
_FP8_MAY_WIN = 1.1  # times the fastest 16-bit plan, which is more accurate
_PASSES_MAY_WIN = 1.1  # times the fastest, for the sum of two passes: a call is longer
_ABOUT_AS_FAST = 1.02  # as the winner: judged too
_LOOKS = 2


class Race:
    """The plans of one case that are compared by time, and what is known of them.

    ``required`` plans are timed and judged whatever their time.  ``emulated`` ones are too, because their errors are
    wanted and their times say nothing.  ``looks`` holds the samples of first looks, ``timed`` those of the plans that
    were timed closely, ``judged`` the plans that were or are being judged.
    """

    def __init__(self, plans: Sequence[Plan], required: Collection[Plan] = (), emulated: Collection[Plan] = ()) -> None:
        self.plans = list(plans)
        self.looks: dict[Plan, Samples] = {}
        self.timed: dict[Plan, Samples] = {}
        self.judged: set[Plan] = set()
        self._out: set[Plan] = set()
        self._always = {*required, *emulated}
        self._emulated = frozenset(emulated)
        self._cover = {*covering(plans), *self._always}

    def leave(self, plan: Plan) -> None:
        """Take a plan out that failed or is inaccurate: none has to be as fast as it."""
        self._out.add(plan)

    def rejoin(self, plan: Plan, look: Visit) -> None:
        """Let a plan that had left enter by a first look at it alone, as if it had not been timed or judged."""
        self._out.discard(plan)
        self.judged.discard(plan)
        self.timed.pop(plan, None)
        self.looks[plan] = Samples()
        self.looks[plan].add(look)

    def unseen(self) -> list[Plan]:
        """The plans to look at next: those that contain every kernel, then the pairs that these say may win."""
        waiting = [plan for plan in self.plans if plan not in self.looks and plan not in self._out]
        if first := [plan for plan in waiting if plan in self._cover]:
            return first
        return [plan for plan in waiting if _work(self.known(plan)) <= self._limit(plan, _PASSES_MAY_WIN)[0]]

    def doubtful(self) -> list[Plan]:
        """The plans to look at again: the device was fast enough for them to win, the call was not."""
        return [
            plan
            for plan, look in self._running().items()
            if plan not in self.timed
            and len(look.spans) < _LOOKS
            and _work(look) <= self._limit(plan, _MAY_WIN)[0] < _call(look)
        ]

    def entrants(self) -> list[Plan]:
        """The plans to time closely now."""
        seen = [plan for plan in self.plans if plan in self.looks and plan not in self._out and plan not in self.timed]
        return [
            plan for plan in seen if plan in self._always or _call(self.looks[plan]) <= self._limit(plan, _MAY_WIN)[0]
        ]

    def finalists(self) -> list[Plan]:
        """The plans to judge now, which count as judged: the fastest with and without FP8 that are not yet."""
        running = {plan: _typical(each) for plan, each in self.timed.items() if plan not in self._out}
        compared = {plan: ms for plan, ms in running.items() if plan not in self._emulated}
        exact = {plan: ms for plan, ms in compared.items() if not plan.fp8}
        found = [
            plan
            for plan, ms in running.items()
            if plan not in self.judged
            and (
                plan in self._always
                or ms <= _within(_ABOUT_AS_FAST, compared)[0]
                or (not plan.fp8 and ms <= _within(_ABOUT_AS_FAST, exact)[0])
            )
        ]
        self.judged.update(found)
        return found

    def known(self, plan: Plan) -> Samples:
        """The closest samples of a plan, or the shortest of its passes in the plans that were looked at."""
        if plan in self.looks:
            return self.timed.get(plan, self.looks[plan])
        forwards = [look.time_ms["prepared"] for each, look in self.looks.items() if each.forward == plan.forward]
        backwards = [look.time_ms["backward"] for each, look in self.looks.items() if each.backward == plan.backward]
        passes: dict[Cost, list[list[float]]] = {"prepared": forwards}
        if plan.backward is not None:
            passes["backward"] = backwards
        shortest = {cost: [min(map(min, taken))] for cost, taken in passes.items() if taken}
        return Samples(shortest, visits={cost: [1] for cost in shortest})

    def slower(self) -> dict[Plan, str]:
        """The plans that lost by time, and why."""
        return {plan: self._why(plan) for plan in self.plans if plan not in self.judged and plan not in self._out}

    def _why(self, plan: Plan) -> str:
        rival = self._limit(plan, 1.0)[1]
        assert rival is not None, "without a rival it may win"
        if plan in self.timed:
            rivals = [each for each in self.judged - self._out - self._emulated if plan.fp8 or not each.fp8]
            rival = min(rivals, key=lambda each: _typical(self.timed[each]))
            ratio = _typical(self.timed[plan]) / _typical(self.timed[rival])
            return f"slower than {rival}; {ratio:.2f} times as long"
        fastest = _call(self.looks[rival])
        if plan in self.looks:
            return f"slower than {rival} at a first look; {_call(self.looks[plan]) / fastest:.2f} times as long"
        ratio = _work(self.known(plan)) / fastest
        return f"slower than {rival} by its passes in other plans; {ratio:.2f} times as long"

    def _running(self) -> dict[Plan, Samples]:
        """The plans whose times count."""
        return {plan: look for plan, look in self.looks.items() if plan not in self._out and plan not in self._emulated}

    def _limit(self, plan: Plan, factor: float) -> tuple[float, Plan | None]:
        """The longest call in milliseconds with which the plan may win, and the rival that sets it."""
        running = {each: _call(look) for each, look in self._running().items()}
        exact = {each: ms for each, ms in running.items() if not each.fp8}
        limits = [_within(factor, running if plan.fp8 else exact)]
        if plan.fp8:
            limits.append(_within(min(factor, _FP8_MAY_WIN), exact))
        return min(limits, key=lambda limit: limit[0])


def covering(plans: Iterable[Plan]) -> list[Plan]:
    """Plans that together contain every forward and backward kernel, pairs of one backend first."""
    seen: set[tuple[int, str]] = set()
    kept = []
    for plan in sorted(plans, key=_mixed):
        kernels = set(enumerate(plan.kernels))
        if kernels - seen:
            seen |= kernels
            kept.append(plan)
    return kept


def _mixed(plan: Plan) -> bool:
    return plan.backward is not None and backend_of(plan.backward) != backend_of(plan.forward)


def _within(factor: float, times: Mapping[Plan, float]) -> tuple[float, Plan | None]:
    if not times:
        return math.inf, None
    fastest = min(times, key=lambda plan: times[plan])
    return factor * times[fastest], fastest


def _call(look: Samples) -> float:
    return min(look.time_ms["call"])


def _typical(timed: Samples) -> float:
    return median(timed.time_ms["call"])


def _work(look: Samples) -> float:
    """Milliseconds of the device for the passes that are known, without waiting for the host."""
    return sum(min(look.time_ms[cost]) for cost in ("prepared", "backward") if cost in look.time_ms)
