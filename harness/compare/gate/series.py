"""One row at the gate: rounds of visits by cost, and what is decided from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from ..terms import Gated
from .evidence import Estimate, combined, slower, suspected, unchanged, visible
from .sides import SIDES, Question, Side, Visited

__all__ = ["LOOKS", "MOST_GENERATIONS", "GateRow", "Series", "SeriesState", "floor_of"]

SeriesState = Literal["slower", "same", "open"]

# The numbers of rounds of a generation after which a decision is tried: each about half as many again.
LOOKS = (5, 7, 10, 14, 20, 28, 40)
MOST_GENERATIONS = 4
_FOR_LATER = 2  # generations of a row without times of BASE: they are a later gate's base
_HOST_MATTERS = 0.5  # of the device's time: a host that needs less is always ahead of the device


def floor_of(cost: str, ms: float, device_type: str) -> float:
    """The standard deviation between the logarithms of two processes' times, though they run the same code.

    Seen in three pairs of processes of 27 rows on an H100: of kernels of 0.15 ms and more nine in ten were less than
    0.3 % apart, those of 16, 27 and 32 us about 4, 4 and 2 %, as if 0.7 us were added now and then.  On a shared CPU
    eight rows of 20 to 140 ms were 0.5 % apart in the median.
    """
    if cost == "host":
        return 0.03
    return 0.005 if device_type == "cpu" else math.hypot(0.002, 0.0007 / ms)


@dataclass
class Series:
    """The rounds of one cost, by generation: logarithms of NEW's time over BASE's.

    ``limit`` is the slow-down to be found (0.03: 3 %).  If BASE is not visited itself, ``recorded`` holds its
    generations, measured earlier beside the anchor as NEW's are now, and ``run`` is the deviation between two such
    runs.  None and 0 if BASE is visited.
    """

    cost: Gated
    limit: float
    device_type: str
    recorded: list[list[float]] | None = None
    run: float = 0.0
    generations: list[list[float]] = field(default_factory=list)
    times: dict[Side, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    finding: SeriesState = "open"
    settled: bool = False  # for this generation

    @property
    def anchored(self) -> bool:
        """Whether BASE is not visited itself."""
        return self.recorded is not None

    @property
    def unknown(self) -> bool:
        """Whether BASE has no times, so that NEW's only serve a later gate."""
        return self.recorded == []

    @property
    def floor(self) -> float:
        """The deviation between two processes of the same code."""
        return floor_of(self.cost, median(self.times["NEW"]), self.device_type)

    @property
    def estimate(self) -> Estimate | None:
        """From all rounds; None if there are too few, or BASE's times are not known."""
        return self._against_base(combined(self.generations, self.floor)) if self.times["NEW"] else None

    def renew(self) -> None:
        """Begin a generation, unless the last one got no round."""
        if not self.generations or self.generations[-1]:
            self.generations.append([])
        self.settled = self.finding != "open"

    def add(self, visits: dict[Side, list[float]]) -> None:
        """Add a round: each side's visits, milliseconds.

        A side's time is that of its fastest visit, because a disturbance (another process, a clock at the power limit)
        only makes a visit longer: on an H100 rounds are then 0.24 % apart, with means 0.64 %.  The host's time is the
        median of its visits, which depend on the core that the system has given the process.
        """
        middle = median if self.cost == "host" else min
        for side in SIDES:
            self.times[side].append(middle(visits[side]))
        self.generations[-1].append(math.log(self.times["NEW"][-1] / self.times["BASE"][-1]))

    def look(self, *, last: bool = False) -> None:
        """Decide the cost, or settle it for this generation, after a number of rounds in LOOKS or if ``last``."""
        rounds = self.generations[-1]
        if len(rounds) not in LOOKS and not last:
            return
        alone, together = self._against_base(combined([rounds], self.floor)), self.estimate
        confirmed = len(self.generations) > 1
        if together is not None and unchanged(together, self.limit, confirmed=confirmed):
            self.finding, self.settled = "same", True
        elif not confirmed:
            self.settled = together is not None and suspected(together, self.limit)
        elif together is not None and alone is not None and slower(together, self.limit):
            # The processes that raised the suspicion cannot confirm it.
            shown = alone.shift > math.log1p(self.limit) / 2
            self.finding, self.settled = ("slower", True) if shown else (self.finding, self.settled)
        # If the remaining uncertainty lies between processes, only other processes can reduce it.
        between = self._lowest_visible(len(self.generations)) > self.limit
        self.settled |= (between or self.unknown) and len(rounds) >= LOOKS[2]

    @property
    def floor_is_too_high(self) -> bool:
        """Whether processes of the same code differ too much for any number of rounds to show the limit."""
        return self._lowest_visible(MOST_GENERATIONS) > self.limit

    def _lowest_visible(self, generations: int) -> float:
        return visible(Estimate(0.0, math.hypot(self.floor / math.sqrt(generations), self.run), math.inf))

    def _against_base(self, new: Estimate | None) -> Estimate | None:
        if new is None or not self.anchored:
            return new
        base = combined(self.recorded or [], self.floor)
        if base is None:
            return None
        deviation = math.hypot(new.deviation, base.deviation, self.run)
        return Estimate(new.shift - base.shift, deviation, min(new.freedom, base.freedom))


@dataclass
class GateRow:
    """A row, its series by cost, and if it was lost, the side and the reason."""

    question: Question
    series: dict[Gated, Series]
    lost: tuple[Side, str] | None = None
    seconds: float = 0.0

    @property
    def open(self) -> bool:
        """Whether another generation may decide more."""
        return self.lost is None and any(
            each.finding == "open" and len(each.generations) < (_FOR_LATER if each.unknown else MOST_GENERATIONS)
            for each in self.series.values()
        )

    @property
    def known(self) -> bool:
        """Whether every cost has an estimate."""
        return all(each.estimate is not None for each in self.series.values())

    @property
    def settled(self) -> bool:
        """Whether this generation cannot decide more."""
        return self.lost is not None or all(each.settled for each in self.series.values())

    def renew(self) -> None:
        """Begin a generation."""
        for each in self.series.values():
            each.renew()

    def add(self, visits: dict[Side, list[Visited]]) -> None:
        """Add a round of visits, and try to decide."""
        for cost, series in self.series.items():
            if not series.settled:
                series.add({side: [each[cost] for each in visits[side]] for side in SIDES})
                series.look()

    def look(self) -> None:
        """Decide with the rounds there are, because no more will come."""
        for each in self.series.values():
            if each.generations and each.times["NEW"]:
                each.look(last=True)

    def leave_out_an_idle_host(self) -> None:
        """Drop the host's time if the device's is so much longer that the device never waits for the host."""
        host = self.series.get("host")
        if host is None:
            return
        device = sum(median(each.times["NEW"]) for cost, each in self.series.items() if cost != "host")
        # If BASE has no rounds of it, its host was idle: a host just above the threshold has not changed.
        matters = 2 * _HOST_MATTERS if host.unknown else _HOST_MATTERS
        if median(host.times["NEW"]) < matters * device:
            del self.series["host"]
