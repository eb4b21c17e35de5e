"""Decide whether errors on few rows show that a plan is beyond its bound, or are noise.

A check takes a few rows of several random heads.  ``x`` is the squared error of one head's rows over the bound's
square, in shares of the mean size of the check's rows; E[x] = 1 for a plan at the bound, whatever the distribution.  So
``1 + bet · (x / allowance - 1)`` has a mean of at most one for every plan within the bound, and its product over heads
and checks, restarted whenever it falls below one, is an e-detector (Shin, Ramdas and Rinaldo, "E-detectors", arXiv
2203.03532): it reaches ``a`` after ``a`` checks or more on average.  The mean over several bets is one too: small bets
find rare heads that are very wrong, large ones many that are slightly wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Alarm", "Detector"]

_BETS = (0.05, 0.2, 0.5, 0.9)
_ALARM = 1e6  # checks between two false alarms, at least; with every=1000 these are 10⁹ calls
# Allowed excess of the squared error, 12 % of the error: calls differ, and one slightly beyond a bound that its plan
# keeps on average is no breach.
_ALLOWANCE = 1.25
_GROSS = 100.0  # of the squared error: one head ten times beyond the bound needs no second check


@dataclass(frozen=True)
class Alarm:
    """An alarm: the error of the checks since the trouble began, each counting alike, and the evidence (1 is none)."""

    error: float
    evidence: float


class Detector:
    """The evidence of all checks of one tensor of a plan at a spec against a bound on its relative L2."""

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self._start()

    def _start(self) -> None:
        self._logs = [0.0] * len(_BETS)
        self._error, self._checks = 0.0, 0

    def add(self, errors: Sequence[float], sizes: Sequence[float]) -> Alarm | None:
        """Add a check: squared errors and sizes of each head's rows.  Returns an alarm, and starts anew, if they are
        decisive.
        """
        size, error = math.fsum(sizes), math.fsum(errors)
        if not math.isfinite(error):
            self._start()
            return Alarm(math.inf, math.inf)
        if size == 0.0:  # nothing to be right about
            return Alarm(math.inf, math.inf) if error else None
        if max(self._logs) <= 0.0:
            self._error, self._checks = 0.0, 0
        self._error, self._checks = self._error + error / size, self._checks + 1
        shares = [len(errors) * each / (size * self.bound**2) for each in errors]
        for place, bet in enumerate(_BETS):
            gain = math.fsum(math.log1p(bet * (share / _ALLOWANCE - 1.0)) for share in shares)
            self._logs[place] = max(0.0, self._logs[place]) + gain
        largest = max(self._logs)
        mean = largest + math.log(math.fsum(math.exp(each - largest) for each in self._logs) / len(_BETS))
        gross = max(shares) >= _GROSS
        if mean < math.log(_ALARM) and not gross:
            return None
        evidence = math.inf if gross else math.exp(min(mean, 700.0))  # beyond 700 a double is infinite
        found = Alarm(math.sqrt(self._error / self._checks), evidence)
        self._start()
        return found
