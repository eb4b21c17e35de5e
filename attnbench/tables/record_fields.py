"""Pydantic fields that several kinds of file share: specs, plans, texts, times."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, InstanceOf, PlainSerializer

from ..kernels.plan import Plan
from ..problem.spec import AttentionSpec
from ..text.printable import printable

__all__ = ["LONGEST_PLAN", "NumberOrInf", "PlanField", "Printable", "SpecField", "UtcTime"]

LONGEST_PLAN = 200  # characters


def _spec(value: Any) -> AttentionSpec:
    return value if isinstance(value, AttentionSpec) else AttentionSpec.from_dict(value)


def _plan(value: object) -> Plan:
    if isinstance(value, Plan):
        return value
    if not isinstance(value, str) or len(value) > LONGEST_PLAN:
        raise ValueError(f"a plan is text of at most {LONGEST_PLAN} characters")
    return Plan.parse(value)


def _utc(value: datetime) -> datetime:
    if value.utcoffset():
        raise ValueError("times are in UTC")
    return value


SpecField = Annotated[
    InstanceOf[AttentionSpec], BeforeValidator(_spec), PlainSerializer(AttentionSpec.to_dict, dict[str, Any])
]
PlanField = Annotated[InstanceOf[Plan], BeforeValidator(_plan), PlainSerializer(str, str)]
NumberOrInf = Annotated[float, BeforeValidator(lambda value: math.inf if value == "inf" else value)]
Printable = Annotated[str, AfterValidator(printable)]  # what would steer a terminal becomes spaces
UtcTime = Annotated[AwareDatetime, AfterValidator(_utc)]
