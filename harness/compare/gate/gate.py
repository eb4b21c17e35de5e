"""Run the gate: visit rows in turns, again in new processes if one pair of processes is not enough."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ...sweep.worker_process import LostError
from .series import LOOKS, MOST_GENERATIONS, GateRow
from .sides import SIDES, Side, Sides, Visited

__all__ = ["Gate"]

# Forwards and backwards, then the other way round, so that neither drift nor the visit to another row just before
# favours a side.  On an H100 at its power limit the two halves of a round differ by 2 %, alternately up and down.
_ORDER: tuple[Side, ...] = ("BASE", "NEW", "NEW", "BASE", "NEW", "BASE", "BASE", "NEW")
_MOST_ROWS = 24  # at a time: each holds its inputs and its graphs' memory twice on the device


class Gate:
    """Visits rows until each is decided, or ``deadline`` (``time.monotonic`` seconds) has passed.

    ``say`` receives a line of progress at a time.
    """

    def __init__(self, sides: Sides, deadline: float, say: Callable[[str], object]) -> None:
        self._sides, self._deadline, self._say = sides, deadline, say

    def run(self, rows: Sequence[GateRow]) -> None:
        """Measure all rows in parts that share the time; rows without enough memory are measured again alone."""
        waiting = [list(rows[start : start + _MOST_ROWS]) for start in range(0, len(rows), _MOST_ROWS)]
        while waiting:
            part = waiting.pop(0)
            left = sum(map(len, waiting))
            share = (self._deadline - time.monotonic()) * len(part) / (len(part) + left)
            waiting += [[row] for row in self._part(part, time.monotonic() + share)]

    def _part(self, rows: Sequence[GateRow], deadline: float) -> list[GateRow]:
        """Measure the rows side by side; returns those for which memory did not suffice."""
        crowded: list[GateRow] = []
        for generation in range(MOST_GENERATIONS):
            going = [row for row in rows if row.open and row not in crowded]
            if not going or time.monotonic() >= deadline:
                break
            if generation:
                self._sides.close()
                self._say(f"again in processes of their own: {len(going)} of {len(rows)} rows")
            crowded += self._begin(going, alone=len(rows) == 1)
            self._generation([row for row in going if row not in crowded], deadline)
        for row in rows:
            row.look()
            self._sides.end(row.question)
        return crowded

    def _begin(self, rows: Sequence[GateRow], *, alone: bool) -> list[GateRow]:
        """Prepare the rows; returns those that must wait for memory.  Other rows that fail are marked as lost."""
        lost = self._sides.begin([row.question for row in rows])
        crowded = []
        for row in rows:
            row.renew()
            if row.question.number in lost:
                side, error = lost[row.question.number]
                if error.status == "oom" and not alone:
                    crowded.append(row)
                else:
                    self._lose(row, side, error)
        return crowded

    def _generation(self, rows: Sequence[GateRow], deadline: float) -> None:
        """Visit all rows that are not settled in rounds, so that a disturbance falls on many rows, not on one."""
        for number in range(LOOKS[-1] + 1):
            going = [row for row in rows if not row.settled]
            if not going:
                return
            for row in going:
                if time.monotonic() >= deadline:
                    return
                start = time.monotonic()
                visits = self._round(row)
                row.seconds += time.monotonic() - start
                if visits is not None and number:  # the first is a warm-up
                    row.add(visits)
                    if number == 1:
                        row.leave_out_an_idle_host()
            if number in LOOKS:
                self._say(f"{number} rounds: {sum(not row.settled for row in rows)} of {len(rows)} rows are open")

    def _round(self, row: GateRow) -> dict[Side, list[Visited]] | None:
        """Visits of both sides; None if one was lost."""
        visits: dict[Side, list[Visited]] = {side: [] for side in SIDES}
        costs = [cost for cost, each in row.series.items() if not each.settled]
        for side in _ORDER:
            try:
                visits[side].append(self._sides.visit(side, row.question, costs))
            except LostError as error:
                self._lose(row, side, error)
                return None
        return visits

    def _lose(self, row: GateRow, side: Side, error: LostError) -> None:
        row.lost = side, f"{error.status}: {error.reason}"
        self._say(f"{row.question.key[0]}: {row.question.plan} in {side}: {row.lost[1]}")
