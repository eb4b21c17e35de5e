"""The rounds that a gate measured, a line for each cost of each row: the basis of its verdict and of a later gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from attnbench.tables.record_fields import PlanField

from ...json_lines import Form, read_lines
from ..terms import Gated, Key
from .series import GateRow, SeriesState

__all__ = ["ROUNDS", "Rounds", "read_rounds", "rounds_of", "rounds_text"]

ROUNDS = "rounds.jsonl"  # beside the measurements
_SCHEMA = "attnbench.rounds/1"
_FORM = Form(_SCHEMA, "a row's rounds", "rounds", longest_line=2**20, largest_file=2**26)
_Logarithm = Annotated[float, Field(ge=-50, le=50)]
_Milliseconds = Annotated[float, Field(gt=0, le=1e9)]
_Times = Annotated[list[_Milliseconds], Field(max_length=10_000)]


class Rounds(BaseModel):
    """One cost of one row.

    ``against``: whether BASE was visited, or the anchor, a fixed piece of work.  ``generations`` has, for each pair of
    processes, the logarithm of NEW's time over the other's in each round; ``times_ms`` both times of each round.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)

    schema_: Annotated[Literal["attnbench.rounds/1"], Field(alias="schema")] = "attnbench.rounds/1"
    case: Annotated[str, Field(min_length=1, max_length=200)]
    plan: PlanField
    cost: Gated
    against: Literal["BASE", "anchor"]
    generations: Annotated[list[Annotated[list[_Logarithm], Field(max_length=1000)]], Field(max_length=100)]
    times_ms: dict[Literal["BASE", "NEW"], _Times]
    finding: SeriesState


def rounds_of(rows: Sequence[GateRow]) -> list[Rounds]:
    """The rounds of the gate's rows."""
    return [
        Rounds(
            case=row.question.key[0],
            plan=row.question.plan,
            cost=cost,
            against="anchor" if series.anchored else "BASE",
            generations=[[round(each, 6) for each in rounds] for rounds in series.generations],
            times_ms={side: [round(ms, 6) for ms in times] for side, times in series.times.items()},
            finding=series.finding,
        )
        for row in rows
        for cost, series in row.series.items()
    ]


def rounds_text(rounds: Sequence[Rounds]) -> str:
    """The contents of a file of rounds."""
    return "".join(each.model_dump_json(by_alias=True) + "\n" for each in rounds)


def read_rounds(path: Path) -> Mapping[tuple[Key, Gated], list[list[float]]]:
    """The generations against the anchor by row and cost; empty if there is no such file.

    Raises MalformedFileError with the line and what was expected there.
    """
    if not path.exists():
        return {}
    found = read_lines(path, Rounds, _FORM)
    return {((each.case, each.plan), each.cost): each.generations for each in found if each.against == "anchor"}
