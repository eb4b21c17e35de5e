"""Time the plans of a case in turns, so that whatever changes during timing affects all plans alike."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np

from attnbench.kernels.plan import Plan

from ..measure.findings import Visit
from ..measure.timing import Cost, Timer
from ..statistics import MEDIAN_ERROR, median_interval, spread

__all__ = ["Samples", "interleave", "warm"]

_MOST_SAMPLES = 9_000  # of one cost; a record holds 10,000
_TELLING = 3  # with this many visits, one visit cannot move the median far
_SEVERAL = 5  # with this many samples of a call, one delayed sample does not move the median
_AGREEING = 4.0  # times the interval's half: a visit's samples are alike, those of two may not be
_BEATEN = 1.25  # times the fastest: a plan that is certainly slower is not measured more closely
_WARM_SECONDS = 0.5  # a clock that is not steady by then never will be


@dataclass
class Samples:
    """All visits of a plan: milliseconds by cost, the host's milliseconds for each call, and when they were taken.

    ``visits`` counts each cost's samples in each visit, in order.  ``late_ms`` is the least of all visits: a delayed
    host is late in some visits, work left running after the call is late in every visit.  ``host_scale`` has the
    factor of each visit's host, and ``launch_ms`` its speed (attnbench.harness.measure.findings).
    """

    time_ms: dict[Cost, list[float]] = field(default_factory=dict)
    host_ms: list[float] = field(default_factory=list)
    visits: dict[Cost, list[int]] = field(default_factory=dict)
    spans: list[tuple[float, float]] = field(default_factory=list)
    replayed: tuple[Cost, ...] = ()
    late_ms: float = math.inf
    host_scale: list[float] = field(default_factory=list)
    launch_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, visit: Visit) -> None:
        """Append a visit's samples; those of a cost that is now replayed, or no longer is, replace the earlier ones."""
        for cost, taken in visit.time_ms.items():
            if (cost in visit.replayed) != (cost in self.replayed):
                self.time_ms.pop(cost, None)
                self.visits.pop(cost, None)
            self.time_ms.setdefault(cost, []).extend(taken)
            self.visits.setdefault(cost, []).append(len(taken))
        self.host_ms += visit.host_ms
        self.host_scale.append(visit.host_scale)
        if visit.launch_ms is not None:
            self.launch_ms.append(visit.launch_ms)
        self.spans.append(visit.span)
        self.seconds += visit.span[1] - visit.span[0]
        self.replayed = visit.replayed
        self.late_ms = min(self.late_ms, visit.late_ms)

    def enough(self, timer: Timer) -> bool:
        """Whether another visit would add no information, or exceed the plan's time limit."""
        if self.over(timer) or max(map(len, self.time_ms.values()), default=0) > _MOST_SAMPLES:
            return True
        return len(self.spans) >= timer.fewest and all(self._narrow(cost, timer) for cost in self.time_ms)

    def over(self, timer: Timer) -> bool:
        """Whether the plan has used up its time; twice the limit while one delayed visit could decide."""
        return self.seconds > timer.limit * (1 if len(self.spans) >= _TELLING else 2)

    def _narrow(self, cost: Cost, timer: Timer) -> bool:
        low, middle, high = median_interval(self.time_ms[cost])
        if high - low > 2 * timer.narrow * middle:
            return False
        ends = np.cumsum(self.visits[cost])[:-1]
        apart = spread([float(np.median(taken)) for taken in np.split(np.asarray(self.time_ms[cost]), ends)])
        return apart is None or MEDIAN_ERROR * apart <= _AGREEING * timer.narrow * math.sqrt(len(ends) + 1)


def interleave(
    plans: Sequence[Plan],
    visit: Callable[[Plan], Visit | None],
    timer: Timer,
    seed: str,
    steady: Callable[[], bool],
    brief: Collection[Plan] = (),
    beaten: float = _BEATEN,
    required: Collection[Plan] = (),
) -> dict[Plan, Samples]:
    """Visit the plans forwards and backwards in turn (ABBA) until each has enough samples or is clearly slower.

    Slower is a plan whose call takes ``beaten`` times as long as that of the fastest, and a 16-bit plan as that of the
    fastest 16-bit one: these are compared with each other too.
    ``required`` plans are visited until they have enough, however slow they are.  ``brief`` plans, whose times are not
    compared with others', are visited in the first round only.  Before that, visits whose samples are discarded warm
    the device until it is ``steady``.  The order is drawn from ``seed``, so that no plan follows the same plan in every
    case.  A plan whose visit returns None gets no samples.
    """
    order = list(plans)
    random.Random(seed).shuffle(order)
    samples = {plan: Samples() for plan in warm(order, visit, steady)}
    going = list(samples)
    while going:
        for turn in (going, going[::-1]):
            for plan in turn:
                if plan in samples and not samples[plan].over(timer):
                    visited = visit(plan)
                    if visited is None:
                        del samples[plan]
                    else:
                        samples[plan].add(visited)
        rivals = {plan: each for plan, each in samples.items() if plan not in brief}
        calls = {plan: median_interval(each.time_ms["call"])[2] for plan, each in rivals.items()}
        fastest = {
            fp8: min((ms for plan, ms in calls.items() if fp8 or not plan.fp8), default=0.0) for fp8 in (False, True)
        }
        going = [
            plan
            for plan in going
            if plan in rivals
            and not rivals[plan].enough(timer)
            and (plan in required or not _beaten(rivals[plan], beaten * fastest[plan.fp8], timer))
        ]
    return samples


def warm(order: Sequence[Plan], visit: Callable[[Plan], Visit | None], steady: Callable[[], bool]) -> list[Plan]:
    """Visit the plans in turn until the device is ``steady``; the plans, without those whose visit returned None."""
    left = dict.fromkeys(order)
    spent = 0.0
    for plan in cycle(order):
        if steady() or spent > _WARM_SECONDS or not left:
            break
        if plan in left:
            warming = visit(plan)
            if warming is None:
                del left[plan]
            else:
                spent += warming.span[1] - warming.span[0]
    return list(left)


def _beaten(samples: Samples, limit: float, timer: Timer) -> bool:
    """Whether the plan's call clearly takes longer than this many milliseconds.

    A delayed host makes a sample longer, never shorter.  So after two visits the shortest of several samples decides,
    and after more visits the interval of the median.
    """
    calls = samples.time_ms["call"]
    if len(calls) >= _SEVERAL and min(calls) > limit:
        return True
    return len(samples.spans) >= max(timer.fewest, _TELLING) and median_interval(calls)[0] > limit
