"""Pydantic fields that several record types share: specs, plans, environments, times."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, InstanceOf, PlainSerializer

from attnbench.kernels.plan import Plan
from attnbench.problem.spec import AttentionSpec
from attnbench.tables.environment import Environment

__all__ = ["EnvironmentField", "PlanField", "SpecField", "UtcTime"]

_LONGEST_PLAN = 200  # characters


def _spec(value: object) -> AttentionSpec:
    if isinstance(value, AttentionSpec):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("mask"), dict):
        raise ValueError("a spec is an object, and its mask is an object too")
    return AttentionSpec.from_dict(value)


def _plan(value: object) -> Plan:
    if isinstance(value, Plan):
        return value
    if not isinstance(value, str) or len(value) > _LONGEST_PLAN:
        raise ValueError(f"a plan is text of at most {_LONGEST_PLAN} characters")
    return Plan.parse(value)


def _environment(value: object) -> Environment:
    return value if isinstance(value, Environment) else Environment.from_dict(value)


def _utc(value: datetime) -> datetime:
    if value.utcoffset():
        raise ValueError("times are in UTC")
    return value


SpecField = Annotated[
    InstanceOf[AttentionSpec], BeforeValidator(_spec), PlainSerializer(AttentionSpec.to_dict, dict[str, Any])
]
PlanField = Annotated[InstanceOf[Plan], BeforeValidator(_plan), PlainSerializer(str, str)]
EnvironmentField = Annotated[
    InstanceOf[Environment], BeforeValidator(_environment), PlainSerializer(Environment.to_dict, dict[str, Any])
]
UtcTime = Annotated[AwareDatetime, AfterValidator(_utc)]
