"""Which eligible plan wins: the fastest, within the noise the more accurate, then a declared order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..kernels.plan import Plan
from ..problem.spec import AttentionSpec
from .candidate import Candidate, Margin, Trade
from .cost_model.pool import PooledModel

__all__ = ["Ranking", "noise", "rounded_up"]

_FLOOR, _CEILING = 0.01, 0.03
# By how much of its standard error a prediction is taken to be too low.  On fresh shapes, 50 of an H200 and 70 of an
# H100, 0.4 to 0.7 lost least; with 1, plans of which little is known lost calls that they were the fastest at, with 0
# they won calls that they were not.
_DOUBT = 0.5
_AS_ACCURATE = 1.25  # ratio below which two errors count as equal: one precision differs so much between random inputs


def noise(one: Candidate, other: Candidate) -> float:
    """The relative difference of two measured times below which neither plan counts as faster.

    Half the interquartile ranges over the medians, added in quadrature; at least 1 % (between two sweeps of an H200
    times changed by 1.1 % in the median), at most 3 % (a wide spread comes from a changing clock).
    """
    spreads = [
        0.0 if each.spread_ms is None or not each.time_ms else each.spread_ms / each.time_ms for each in (one, other)
    ]
    return min(_CEILING, max(_FLOOR, math.hypot(*spreads) / 2))


class Ranking:
    """Picks among the candidates of one spec, in any order.

    ``preference`` orders plans where nothing was measured, smallest first; ``model`` predicted the times of others.
    """

    def __init__(self, spec: AttentionSpec, preference: Callable[[Plan], float], model: PooledModel) -> None:
        self._spec, self._preference, self._model = spec, preference, model

    def winner(self, eligible: Sequence[Candidate]) -> Candidate:
        """The candidate that runs; its basis says what decided.

        Measured times decide beyond their ``noise``.  Within it the more accurate plan wins (errors within a quarter
        count as equal), then the declared order, so that sweeps that differ by noise choose alike.  A predicted time
        wins if it leads the best measured plan of this spec by more than the error of the prediction, or if no plan was
        measured here.  Predictions are compared by the time that each takes if it was too low by half its standard
        error (``_DOUBT``): of many, the lowest is one whose error is wide more often than one whose plan is fast.
        Plans without a time come last.
        """
        timed = [each for each in eligible if each.time_ms is not None]
        if not timed:
            return min(eligible, key=self._declared)
        measured = [each for each in timed if each.basis == "measured"]
        fastest = min(timed, key=_by_doubted_time)
        if not measured:
            return fastest
        known = self._settled(measured)
        ahead = fastest.basis != "measured" and _gap(known, fastest) > self._error(known, fastest)
        return fastest if ahead else known

    def margin(self, winner: Candidate, eligible: Iterable[Candidate]) -> Margin | None:
        """The lead of the winner over the fastest of the others; None if either has no time."""
        others = [each for each in eligible if each.plan != winner.plan and each.time_ms is not None]
        if winner.time_ms is None or not others:
            return None
        second = min(others, key=_by_time)
        return Margin(second.plan, math.expm1(_gap(second, winner)), self._error(second, winner))

    def trades(self, winner: Candidate, budget: float, able: Iterable[Candidate]) -> tuple[Trade, ...]:
        """What other budgets would choose from the candidates ``able`` to serve, with FP8 allowed, tightest first.

        A looser budget is listed if it saves more time than the one before, of the tighter ones only the cheapest.
        """
        if winner.time_ms is None:
            return ()
        able = list(able)
        needs = {each.plan: each.needs for each in able if each.needs is not None and 0 < each.needs < math.inf}
        able = [each for each in able if each.plan in needs]

        def under(max_error: float) -> Iterator[Trade]:
            admitted = [each for each in able if needs[each.plan] <= max_error]
            other = self.winner(admitted) if admitted else winner
            if other.time_ms is not None and other.plan != winner.plan:
                yield Trade(max_error, other.plan, math.expm1(_gap(other, winner)))

        steps = sorted({rounded_up(each) for each in needs.values()})
        within = min(needs.get(winner.plan, 0.0), budget)
        tighter = [trade for step in steps if step < within for trade in under(step)]
        looser, best = [], -max(noise(winner, winner), winner.time_error or 0.0)
        # The current budget is one of them: as a named budget it allows FP8.
        for trade in (trade for step in (budget, *steps) if step >= budget for trade in under(step)):
            if trade.change < best:
                looser.append(trade)
                best = trade.change
        return (*sorted(tighter, key=lambda trade: (trade.change, trade.max_error))[:1], *looser)

    def _settled(self, measured: Sequence[Candidate]) -> Candidate:
        """The fastest measured plan; of plans within its noise the most accurate, then the first in declared order."""
        fastest = min(measured, key=_by_time)
        tied = [each for each in measured if _gap(each, fastest) <= math.log1p(noise(each, fastest))]
        accurate = min(each.error or 0.0 for each in tied) * _AS_ACCURATE
        return min((each for each in tied if (each.error or 0.0) <= accurate), key=self._declared)

    def _declared(self, candidate: Candidate) -> tuple[float, str]:
        return self._preference(candidate.plan), str(candidate.plan)

    def _error(self, one: Candidate, other: Candidate) -> float:
        """How large the gap between two candidates must be to be significant."""
        if one.basis == "measured" and other.basis == "measured":
            return noise(one, other)
        if "measured" not in (one.basis, other.basis):
            return self._model.gap_error(one.plan, other.plan, self._spec)
        return max(_FLOOR, one.time_error or 0.0, other.time_error or 0.0)


def _by_time(candidate: Candidate) -> tuple[float, str]:
    return candidate.time_ms or 0.0, str(candidate.plan)


def _by_doubted_time(candidate: Candidate) -> tuple[float, str]:
    return (candidate.time_ms or 0.0) * math.exp(_DOUBT * (candidate.time_error or 0.0)), str(candidate.plan)


def _gap(one: Candidate, other: Candidate) -> float:
    """The logarithm of the ratio of their times."""
    first, second = one.time_ms or 0.0, other.time_ms or 0.0
    if first == second:
        return 0.0
    return math.log(first / second) if first and second else math.copysign(math.inf, first - second)


def rounded_up(needed: float) -> float:
    """The budget with two digits that is not below what is needed."""
    unit = 10.0 ** (math.floor(math.log10(needed)) - 1)
    rounded = float(f"{math.ceil(needed / unit - 1e-9) * unit:.2g}")
    return rounded if rounded >= needed else float(f"{(math.ceil(needed / unit) + 1) * unit:.2g}")
