"""Which errors of a plan have risen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..measure.accuracy import TensorName
from ..results.records import Measurement

__all__ = ["ErrorChange", "families_missing", "risen_errors"]

# A smaller difference is FP32 rounding: the same kernel's LSE was 1.9e-7 off in one run and 2.2e-7 in another.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class ErrorChange:
    """A relative L2 of one tensor on one input family, before and after."""

    family: str
    tensor: TensorName
    before: float
    after: float


def risen_errors(before: Measurement, after: Measurement, rise: float) -> list[ErrorChange]:
    """The errors that have risen by more than ``rise`` (0.25 is 25 %) and FP32 rounding, the largest rise first.

    The inputs of a case depend on its own seed, so an unchanged kernel has nearly the same errors each time.
    """
    found = [each for each in _shared(before, after) if each.after - each.before > _ROUNDING + rise * each.before]
    return sorted(found, key=lambda each: each.after / max(each.before, _ROUNDING), reverse=True)


def families_missing(before: Measurement, after: Measurement) -> list[str]:
    """The input families, and tensors of them (``normal: dq``), on which BASE alone has errors."""
    found = [family for family in before.error if family not in after.error]
    for family in before.error.keys() & after.error.keys():
        found += [f"{family}: {name}" for name in before.error[family] if name not in after.error[family]]
    return sorted(found)


def _shared(before: Measurement, after: Measurement) -> Iterator[ErrorChange]:
    for family in before.error:
        for name, error in before.error[family].items():
            if name in after.error.get(family, {}):
                yield ErrorChange(family, name, error, after.error[family][name])
