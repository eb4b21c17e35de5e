"""The gate of the fixture ``attention_benchmark``: a plan visited in turns with itself in an older environment."""

from __future__ import annotations

import itertools
import math
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...measure.timing import Cost
from ...results.records import Measurement
from ..export import regression_dict
from ..gate.gate import Gate
from ..gate.outcome import minutes_needed, outcomes
from ..gate.rows import gate_rows
from ..gate.series import GateRow
from ..gate.sides import Question, Sides
from ..regression import Outcome
from ..sentences import time_sentences
from ..terms import Limits, Terms

__all__ = ["GateVerdict", "Gatekeeper"]

_HOST = 0.5  # of the host's part of a call on a GPU, as for `attnbench gate`
_DETAILS = ("verdict", "certain", "visible", "limits", "costs", "reasons")


class GateVerdict(NamedTuple):
    """``fault`` says why a row does not pass, None if it does; ``details`` has the result in plain JSON types."""

    fault: str | None
    details: dict[str, Any]


class Gatekeeper:
    """Compares rows with the environment of the Python ``base``; keeps its processes until the context is left.

    ``fail_on`` is the slow-down to be found (0.03: 3 %), ``minutes`` the time limit for one row.
    """

    def __init__(self, base: Path, fail_on: float, minutes: float) -> None:
        self._base, self._minutes = base, minutes
        self._terms = Terms(Limits(time=fail_on, host=_HOST))
        self._sides: dict[torch.device, Sides] = {}
        self._numbers = itertools.count()
        self._open = ExitStack()

    def judge(self, row: Measurement, cost: Cost, device: torch.device) -> GateVerdict:
        """Visit the row in both environments until it is decided; for a call, with the costs of `attnbench gate`.

        Raises MisuseError if the old environment cannot take part in a gate.
        """
        (gated,) = gate_rows([row], self._terms, device, None if cost == "call" else [cost], None)
        gated.question = replace(gated.question, number=next(self._numbers))
        Gate(self._sides_on(device, gated.question), time.monotonic() + self._minutes * 60, print).run([gated])
        rows = {row.key: row}
        regression = outcomes(rows, rows, [gated], self._terms)
        (outcome,), (found,) = regression.outcomes, regression_dict(regression, rows, rows)["rows"]
        details = {"base_python": str(self._base), **{name: found[name] for name in _DETAILS}}
        return GateVerdict(self._fault(outcome, gated), details)

    def _fault(self, outcome: Outcome, row: GateRow) -> str | None:
        if outcome.regressed:
            return f"{outcome.verdict}: {'; '.join(outcome.reasons)}"
        if outcome.certain:
            return None
        uncertain = outcome.verdict == "uncertain"
        reasons = list(outcome.reasons if uncertain else time_sentences(outcome.costs, "uncertain"))
        if row.lost is None:
            reasons.append(self._remedy(row))
        return f"not certain whether it is slower: {'; '.join(reasons)}"

    def _remedy(self, row: GateRow) -> str:
        """What would make the result certain."""
        if not row.known:
            return f"--attention-minutes {self._minutes:g} is not enough"
        needed = minutes_needed([row])
        if needed is None:
            return "more time would not settle it, a larger --attention-fail-on may"
        return f"--attention-minutes {math.ceil(self._minutes + needed)} would settle it"

    def _sides_on(self, device: torch.device, question: Question) -> Sides:
        if device not in self._sides:
            sides = self._open.enter_context(Sides(device, self._base))
            sides.start([question])
            sides.introduce(question, print)
            self._sides[device] = sides
        return self._sides[device]

    def __enter__(self) -> Gatekeeper:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
