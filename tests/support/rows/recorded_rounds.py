"""A gate whose visits replay recorded rounds: measured noise of unchanged rows plus slow-downs of a known size."""

from __future__ import annotations

import gzip
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from places import RESULTS

from attnbench.harness.compare.gate.gate import Gate
from attnbench.harness.compare.gate.rounds import Rounds
from attnbench.harness.compare.gate.series import GateRow, Series
from attnbench.harness.compare.gate.sides import Question, Side
from attnbench.kernels.plan import Plan
from attnbench.problem.spec import AttentionSpec

SPEC = AttentionSpec.make(batch=1, heads=1, seqlen_q=16, head_dim=16)
NO_END = math.inf


@dataclass
class Recording:
    """The two sides of a gate: in each generation a row has the noise of one that was recorded, drawn anew.

    ``planted`` are the slow-downs of NEW by the row's number.  What NEW took longer by all the while is taken off: it
    is what looking for a slow-down costs (tests/support/faulty/injected_slowdowns.py).
    """

    rows: Sequence[Sequence[Rounds]]
    rng: random.Random
    planted: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.close()

    def close(self) -> None:
        self._noise: dict[tuple[int, str], list[float]] = {}
        self._round: dict[tuple[int, str], float] = {}

    def begin(self, questions: Sequence[Question]) -> Mapping[int, Any]:
        for question in questions:
            for each in self.rows[question.number]:
                sign = self.rng.choice((-1, 1))  # neither side is the other's better
                rounds = self.rng.choice([found for found in each.generations if len(found) > 4])
                own = median(value for found in each.generations for value in found)
                self._noise[question.number, each.cost] = [sign * (value - own) for value in rounds]
        return {}

    def visit(self, side: Side, question: Question, costs: Sequence[str]) -> Mapping[str, float]:
        found = {}
        for each in self.rows[question.number]:
            if each.cost not in costs:
                continue
            key = question.number, each.cost
            if side == "BASE":  # the first visit of a round is BASE's
                self._round[key] = self.rng.choice(self._noise[key])
            shift = self._round[key] + math.log1p(self.planted.get(question.number, 0.0)) if side == "NEW" else 0.0
            found[each.cost] = each.times_ms["BASE"][0] * math.exp(shift)
        return found

    def end(self, question: Question) -> None:
        pass


def recorded_rows(device: str, costs: Sequence[str], name: str = "rounds") -> list[list[Rounds]]:
    """What was recorded of each row on a device, of these costs."""
    rows: dict[tuple[str, Plan], list[Rounds]] = {}
    with gzip.open(RESULTS / device / "gate" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        for each in map(Rounds.model_validate_json, file):
            if each.cost in costs:
                rows.setdefault((each.case, each.plan), []).append(each)
    return list(rows.values())


def gated(recording: Recording, limit: float, device_type: str) -> list[str]:
    """One run of the gate: what is found of each row."""
    rows = [
        GateRow(
            Question(number, (own[0].case, own[0].plan), SPEC, "normal"),
            {each.cost: Series(each.cost, limit, device_type) for each in own},
        )
        for number, own in enumerate(recording.rows)
    ]
    Gate(recording, NO_END, lambda line: None).run(rows)  # type: ignore[arg-type]
    found = []
    for row in rows:
        findings = {each.finding for each in row.series.values()}
        found.append(next(each for each in ("slower", "open", "same") if each in findings))
    return found
