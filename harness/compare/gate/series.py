"""One row at the gate: rounds of visits by cost, and what is decided from them at each look."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from ..terms import Gated
from .evidence import Estimate, combined, slower, suspected, unchanged, visible
from .sides import SIDES, Question, Side, Visited

__all__ = ["LOOKS", "MOST_GENERATIONS", "Finding", "GateRow", "Series", "floor_of"]

Finding = Literal["slower", "same", "open"]

# After how many rounds of a generation it is asked whether a row is decided: each time as many again, by half.
LOOKS = (5, 7, 10, 14, 20, 28, 40)
MOST_GENERATIONS = 4
_FOR_LATER = 2  # generations of a row that BASE has no times of: a later gate's base
_HOST_MATTERS = 0.5  # of the device's time: a host that needs less is ahead of it, whatever becomes of it


def floor_of(cost: str, ms: float, device_type: str) -> float:
    """What the logarithms of two processes' times differ by, though they run the same code: a standard deviation.

    As seen in three pairs of processes of 27 rows on an H100: of kernels of 0.15 ms and more nine in ten lay less
    than 0.3 % apart, those of 16, 27 and 32 us about 4, 4 and 2 %, as if 0.7 us were added here and there.  On a
    shared CPU eight rows of 20 to 140 ms lay 0.5 % apart in the median.
    """
    if cost == "host":
        return 0.03
    return 0.005 if device_type == "cpu" else math.hypot(0.002, 0.0007 / ms)


@dataclass
class Series:
    """The rounds of one cost, by generation: logarithms of NEW's time over BASE's.

    ``limit`` is the slow-down to be found (0.03: 3 %); ``recorded`` are BASE's own generations where its times were
    taken beside the anchor once, as NEW's are now, and ``run`` is what two runs beside it lie apart by, which no
    process of this run shows.  None and 0 where BASE is visited itself.
    """

    cost: Gated
    limit: float
    device_type: str
    recorded: list[list[float]] | None = None
    run: float = 0.0
    generations: list[list[float]] = field(default_factory=list)
    times: dict[Side, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    finding: Finding = "open"
    settled: bool = False  # for this generation

    @property
    def anchored(self) -> bool:
        """Whether BASE is not visited itself."""
        return self.recorded is not None

    @property
    def unknown(self) -> bool:
        """Whether there are no times of BASE, so that NEW's are taken for a later gate alone."""
        return self.recorded == []

    @property
    def floor(self) -> float:
        """Of two processes' times."""
        return floor_of(self.cost, median(self.times["NEW"]), self.device_type)

    @property
    def estimate(self) -> Estimate | None:
        """From all rounds; None where there are too few, or BASE's times are not known."""
        return self._against_base(combined(self.generations, self.floor)) if self.times["NEW"] else None

    def renew(self) -> None:
        """Begin a generation; one that got no round is not one."""
        if not self.generations or self.generations[-1]:
            self.generations.append([])
        self.settled = self.finding != "open"

    def add(self, visits: dict[Side, list[float]]) -> None:
        """Take in a round: each side's visits, milliseconds.

        A side's time is that of its quickest visit, because what holds up a visit (another process, a clock at the
        power limit) makes it longer and none shorter: on an H100 rounds are 0.24 % apart so, by their means 0.64 %.
        A host's visits are long or short by where the system puts the process, so of them it is the median.
        """
        middle = median if self.cost == "host" else min
        for side in SIDES:
            self.times[side].append(middle(visits[side]))
        self.generations[-1].append(math.log(self.times["NEW"][-1] / self.times["BASE"][-1]))

    def look(self, *, last: bool = False) -> None:
        """Ask whether the cost is decided, or settled for this generation, if it is time to: ``last`` is always."""
        rounds = self.generations[-1]
        if self.settled or (len(rounds) not in LOOKS and not last):
            return
        alone, together = self._against_base(combined([rounds], self.floor)), self.estimate
        confirmed = len(self.generations) > 1
        if together is not None and unchanged(together, self.limit, confirmed=confirmed):
            self.finding, self.settled = "same", True
        elif not confirmed:
            self.settled = together is not None and suspected(together, self.limit)
        elif together is not None and alone is not None and slower(together, self.limit):
            # The processes that raised the suspicion do not confirm it themselves.
            shown = alone.shift > math.log1p(self.limit) / 2
            self.finding, self.settled = ("slower", True) if shown else (self.finding, self.settled)
        # Where the rounds are many and what is left is between processes, only other processes can tell.
        between = self._lowest_visible(len(self.generations)) > self.limit
        self.settled |= len(rounds) >= LOOKS[-1] or ((between or self.unknown) and len(rounds) >= LOOKS[2])

    @property
    def floor_is_too_high(self) -> bool:
        """Whether processes of the same code lie too far apart for any number of rounds to show the limit."""
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
    """A row, its series by cost, and where and why it was lost if it was."""

    question: Question
    series: dict[Gated, Series]
    lost: tuple[Side, str] | None = None
    seconds: float = 0.0

    @property
    def open(self) -> bool:
        """Whether another generation may tell more."""
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
        """Whether this generation has told what it can."""
        return self.lost is not None or all(each.settled for each in self.series.values())

    def renew(self) -> None:
        """Begin a generation."""
        for each in self.series.values():
            each.renew()

    def add(self, visits: dict[Side, list[Visited]]) -> None:
        """Take in a round of visits, and look."""
        for cost, series in self.series.items():
            if not series.settled:
                series.add({side: [each[cost] for each in visits[side]] for side in SIDES})
                series.look()

    def look(self) -> None:
        """Judge what there is, because no more will come."""
        for each in self.series.values():
            if each.generations and each.times["NEW"]:
                each.look(last=True)

    def leave_out_an_idle_host(self) -> None:
        """Drop the host's time where the device's is so much longer that nobody waits for the host."""
        host = self.series.get("host")
        if host is None:
            return
        device = sum(median(each.times["NEW"]) for cost, each in self.series.items() if cost != "host")
        # Where BASE has no rounds of it, its host was idle: a host that is only just over the line has not changed.
        matters = 2 * _HOST_MATTERS if host.unknown else _HOST_MATTERS
        if median(host.times["NEW"]) < matters * device:
            del self.series["host"]
