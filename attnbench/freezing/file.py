"""Frozen choices as a file: one line for a question and its plan, in a fixed order, checked as tables are."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from ..errors import MalformedFileError
from ..files.json_text import read_json
from ..kernels.plan import Plan, backend_of
from ..problem.spec import AttentionSpec
from ..problem.spec_text import short_fields, spec_order
from ..tables.files import locked, read_text, replace_text
from ..tables.record_fields import NumberOrInf, PlanField, Printable, SpecField
from ..text.printable import brief

__all__ = ["SCHEMA", "Frozen", "FrozenPlan", "FrozenQuestion", "Stamp", "recording", "stamp_of"]

SCHEMA = "attnbench.frozen/1"
_LONGEST = 300  # characters
_STRICT = ConfigDict(strict=True, extra="forbid")
_Text = Annotated[str, Field(max_length=_LONGEST)]
Stamp = tuple[int, int, int, int]
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}\n]')


class FrozenQuestion(NamedTuple):
    """Everything that a plan is chosen by, except the measurements.

    ``device`` is its type (``cuda``); ``fp8``: FP8 was opted into; ``max_error`` is the budget, None if not named.
    """

    device: str
    backend: str
    fp8: bool
    max_error: float | None
    spec: AttentionSpec

    @classmethod
    def make(cls, device: str, spec: AttentionSpec, backend: str, fp8: bool, max_error: float | None) -> FrozenQuestion:
        """The question in the canonical form that a file holds."""
        if max_error is not None:
            max_error = math.inf if max_error > sys.float_info.max else float(max_error)
        return cls(device, backend, fp8, max_error, spec)

    @property
    def opens_fp8(self) -> bool:
        """Whether an FP8 plan may answer: opted into, named, or asked with FP8 tensors."""
        return self.fp8 or ":" in self.backend or self.spec.descale is not None

    def __str__(self) -> str:
        budget = "the default budget" if self.max_error is None else f"max_error={self.max_error:g}"
        return f"{self.spec} on {self.device}, backend {self.backend}, FP8 {'open' if self.fp8 else 'closed'}, {budget}"


class FrozenPlan(NamedTuple):
    """The plan that answers a question, and the versions of its backends and their libraries."""

    plan: Plan
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Frozen:
    """The content of a file: the model of each type of device, and the plan of each question."""

    devices: Mapping[str, str] = field(default_factory=dict)
    plans: Mapping[FrozenQuestion, FrozenPlan] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Frozen:
        """Read a file.  Raises MalformedFileError with the line, or OSError if it cannot be read."""
        return _parsed(path, read_text(path))

    def save(self, path: Path) -> Stamp | None:
        """Replace the file in one step; returns the new file's stamp.  Raises OutputError."""
        found = replace_text(path, _file_text(self))
        return None if found is None else _stamp(found)

    def joined(self, other: Frozen) -> Frozen:
        """Both; this one's plan counts if both have a question."""
        return Frozen({**other.devices, **self.devices}, {**other.plans, **self.plans})

    def adding(self, model: str, question: FrozenQuestion, answer: FrozenPlan) -> Frozen:
        """The same with one more answer, on this model of a device."""
        return replace(self, devices={**self.devices, question.device: model}, plans={**self.plans, question: answer})


def stamp_of(path: Path) -> Stamp | None:
    """A value that changes whenever the file is written; None if there is no file."""
    try:
        return _stamp(os.stat(path))
    except OSError:
        return None


def recording(path: Path) -> AbstractContextManager[None]:
    """Exclude other writers of this file, and remove drafts of killed ones.  Raises OutputError."""
    return locked(path, path.with_name(f"{path.name}.lock"))  # in a folder of the user's, so it bears the whole name


def _stamp(found: os.stat_result) -> Stamp:
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _file_text(content: Frozen) -> str:
    """The text of a file; the same for the same choices in any order."""
    head = json.dumps({"schema": SCHEMA, "devices": dict(sorted(content.devices.items()))}, indent=1)
    lines = sorted(
        _ordered(asked, answer.plan, tuple(sorted(answer.versions.items()))) for asked, answer in content.plans.items()
    )
    return head[:-2] + ',\n "choices": [\n' + ",\n".join(line for _, line in lines) + "\n]}\n"


@lru_cache(maxsize=2**14)  # each new choice writes all lines again
def _ordered(
    asked: FrozenQuestion, plan: Plan, versions: tuple[tuple[str, str], ...]
) -> tuple[tuple[object, ...], str]:
    """(sort key, line) of a choice; default values are left out."""
    named = {"backend": asked.backend} if asked.backend != "auto" else {}
    opened = {"fp8": True} if asked.fp8 else {}
    budget = {} if asked.max_error is None else {"max_error": "inf" if asked.max_error == math.inf else asked.max_error}
    fields = {"device": asked.device, "spec": short_fields(asked.spec), **named, **opened, **budget}
    line = json.dumps({**fields, "plan": str(plan), "versions": dict(versions)}, allow_nan=False)
    return (asked.device, spec_order(asked.spec), asked.backend, asked.fp8, asked.max_error or 0.0), line


class _Choice(BaseModel):
    """A question and its plan, without what is as usual."""

    model_config = _STRICT

    device: _Text
    backend: _Text = "auto"
    fp8: bool = False
    max_error: Annotated[NumberOrInf, Field(gt=0)] | None = None
    spec: SpecField
    plan: PlanField
    versions: Annotated[dict[_Text, Annotated[Printable, Field(max_length=_LONGEST)]], Field(max_length=16)]

    @model_validator(mode="after")
    def _fits(self) -> _Choice:
        if (self.plan.backward is not None) != self.spec.training:
            raise ValueError(f"{self.plan} is not a plan for the direction {self.spec.direction}")
        if self.backend not in ("auto", self.plan.forward, backend_of(self.plan.forward)):
            raise ValueError(f"{self.plan} is not of the backend {self.backend}")
        if self.plan.fp8 and not self.question.opens_fp8:
            raise ValueError(f"{self.plan} computes in FP8, which the question does not open")
        return self

    @property
    def question(self) -> FrozenQuestion:
        return FrozenQuestion(self.device, self.backend, self.fp8, self.max_error, self.spec)


class _Content(BaseModel):
    model_config = _STRICT

    schema_: str = Field(alias="schema")
    devices: Annotated[dict[_Text, Annotated[Printable, Field(max_length=_LONGEST)]], Field(max_length=16)]
    choices: list[_Choice]


def _parsed(path: Path, text: str) -> Frozen:
    content = read_json(path, text, SCHEMA, TypeAdapter(_Content), partial(_line_of, text))
    plans: dict[FrozenQuestion, FrozenPlan] = {}
    for number, each in enumerate(content.choices):
        if each.device not in content.devices:
            fault = f"one of the devices above, not {brief(each.device)}"
        elif each.question in plans:
            fault = f"each question once, and {each.question} occurs twice"
        else:
            plans[each.question] = FrozenPlan(each.plan, each.versions)
            continue
        raise MalformedFileError(path, f"expected {fault}", _line(text, number))
    return Frozen(content.devices, plans)


def _line_of(text: str, place: tuple[int | str, ...]) -> int | None:
    """The line of a place within a choice."""
    return _line(text, int(place[1])) if place[:1] == ("choices",) and len(place) > 1 else None


def _line(text: str, number: int) -> int | None:
    """The line on which a choice begins, in JSON of any layout; None if it is not an object."""
    line, around = 1, ""
    for token in _TOKENS.findall(text):
        if token == "\n":
            line += 1
        elif token in ("{", "["):
            if (around, token) == ("{[", "{"):
                if number == 0:
                    return line
                number -= 1
            around += token
        elif token in ("}", "]"):
            around = around[:-1]
    return None
