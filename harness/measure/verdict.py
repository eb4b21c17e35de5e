"""Decide whether a kernel's numbers are plausible: small named checks, applied in order.

Each check finds a fault that the others miss.  The limits were measured on correct kernels and stand beside each
number: FP8 emulated in every recipe (scales per tensor, head, block and token, e4m3 and e5m2, rotated, smoothed, with
Hopper's accumulator, with P unscaled and with the output itself in FP8), 16-bit kernels and plans that mix them, 1 to
2048 keys, all input families.

Two principles protect correct kernels.  A kernel that quantises is compared with exact attention on the operands that
it used, so that only its own arithmetic counts.  And where a correct number may be as large as a faulty one, several
families decide: a fault of the kernel shows on all of them, a difficult input on its own family only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # these modules import torch, which is not needed here
    from .accuracy import Detail, Judgement, Judgements, TensorName

__all__ = ["CHECKS", "Check", "Observations", "Verdict", "judge"]

# Comments give the largest values on correct kernels, as multiples of the same quantity.
# Of the bound: the own error of one head.  1.1 for out, 0.7 for dv, 3.3 for dq and dk, where a query
# with two keys leaves little more than a rounding error; a missing head is 5 or more.
_HEAD: Mapping[TensorName, float] = {"out": 2.0, "lse": 2.0, "dv": 2.0, "dq": 4.0, "dk": 4.0}
# Of the bound: the own error of one row.  2.7 for out (P without a scale beside a sink), 3.1 for dv.
# Rows of dq and dk are sums that nearly cancel and may have any relative error, so they are not checked.
_ROW: Mapping[TensorName, float] = {"out": 4.0, "lse": 4.0, "dv": 4.0}
# Allowed however small the bound: of 800 heads in bf16 the worst dk was off by 0.043 on an H200, with four libraries.
_ODD = 0.15
_LEFT_OUT = 0.8  # the most that a head or row may be off, whatever the bound: 1 is a missing one
# With fewer rows the mean of their rounding errors says no more than the error itself.
_ROWS = 64
# The gain that two families share: 0.016 of out and dv, 0.035 of dq and dk.  A factor of 1.05 is 0.05.
_GAIN: Mapping[TensorName, float] = {"out": 0.02, "dq": 0.04, "dk": 0.04, "dv": 0.02}
_GAIN_OF_FLOOR = 0.5  # of the least floor: a large floor means large rounding errors in the gain as well
# Mean LSE in nats: 0.0001 on most families, but 0.004 with Hopper's accumulator where scores are large;
# the floor is large there too: it is 0.9 times the floor.  64 of 16k keys are 0.0039.
_NATS = 0.003
_NATS_OF_FLOOR = 2.0
_NATS_OF_MOST = 0.001
# The own error of out on its best family: P in e4m3 0.03, with out in e4m3 as well 0.04, P in e5m2 0.053.
_OWN = 0.06
_OWN_OF_BOUND = 0.5
# Of the floor: at least 0.45 with two keys, else 0.8; 16-bit kernels reach 0.05 and, in gradients, 0.13.
_TOO_GOOD = 1 / 3
# Of the error without negating: 1.
_STALE = 2.0


@dataclass(frozen=True)
class Observations:
    """The numbers that a verdict depends on.

    ``bound`` is the largest accepted relative L2, set by the sweep.  ``judged``, ``floor`` and ``own`` map input
    families to judgements by tensor: of the kernel against the truth, of exact attention on the quantised operands
    against the truth, and of the kernel against that attention; the latter two lack families in which nothing was
    quantised.  ``stale`` judges a run on negated inputs (attnbench.harness.measure.probes).  ``settled``: the result
    did not change until the device was idle.  ``untouched``: the inputs did not change.
    """

    judged: Mapping[str, Judgements]
    floor: Mapping[str, Judgements] = field(default_factory=dict)
    own: Mapping[str, Judgements] = field(default_factory=dict)
    stale: Judgements = field(default_factory=dict)
    settled: bool = True
    untouched: bool = True
    bound: float = math.inf

    def exact(self, tensor: TensorName) -> dict[str, Judgement]:
        """By family, the kernel against exact attention on the operands that it used."""
        found = {family: self.own.get(family, judged) for family, judged in self.judged.items()}
        return {family: each[tensor] for family, each in found.items() if tensor in each}

    def biases(self, tensor: TensorName) -> dict[str, float]:
        """The biases of ``exact``; empty if a tensor has too few rows for a mean."""
        if any(judgement.rows < _ROWS for each in self.judged.values() for judgement in each.values()):
            return {}
        return {family: judgement.detail.bias for family, judgement in self.exact(tensor).items()}

    def floor_of(self, tensor: TensorName) -> float:
        """The least floor over the families, 0 if nothing is quantised."""
        return min((each[tensor].error for each in self.floor.values()), default=0.0)


@dataclass(frozen=True)
class Verdict:
    """``ok``, or ``inaccurate`` with one sentence and the name of the check that found it."""

    status: Literal["ok", "inaccurate"]
    reason: str | None = None
    check: str | None = None


Check = Callable[[Observations], "str | None"]


def judge(observed: Observations) -> Verdict:
    """The verdict of the first check that finds a fault."""
    for name, check in CHECKS.items():
        if reason := check(observed):
            return Verdict("inaccurate", reason, name)
    return Verdict("ok")


def _inputs(observed: Observations) -> str | None:
    return None if observed.untouched else "the inputs are not what they were before the call"


def _settled(observed: Observations) -> str | None:
    return None if observed.settled else "the result went on changing after the call had returned"


def _stale(observed: Observations) -> str | None:
    """With the inputs negated the error is larger than on any family: something was kept from the run before."""
    for tensor, stale in observed.stale.items():
        judged = [each[tensor] for each in observed.judged.values()]
        # Heads of out do not nearly cancel, so there one stale head can be detected.
        found, before = (
            (stale.detail.worst_head, [each.detail.worst_head for each in judged])
            if tensor == "out"
            else (stale.error, [each.error for each in judged])
        )
        if found > _STALE * max(*before, _limit(_HEAD[tensor], observed)):
            if stale.detail.nonfinite:
                return (
                    f"{tensor} has {stale.detail.nonfinite} values that are not finite where all inputs are negated, "
                    "and none where they are not: it is not the same from call to call"
                )
            return (
                f"{tensor} is off by {_text(found)} where all inputs are negated, by {_text(max(before))} where they "
                "are not: it keeps something from call to call"
            )
    return None


def _error(observed: Observations) -> str | None:
    found = [
        (judgement.error, tensor, family, judgement.detail.nonfinite)
        for family, each in observed.judged.items()
        for tensor, judgement in each.items()
    ]
    error, tensor, family, nonfinite = max(found)
    if error <= observed.bound:
        return None
    why = f" (values that are not finite: {nonfinite})" if nonfinite else ""
    return f"the error of {tensor} on {family} inputs is {_text(error)}{why}, beyond {observed.bound:g}"


def _too_good(observed: Observations) -> str | None:
    """Closer to the truth than its quantised operands allow, on every family: it computed with others."""
    for tensor in _GAIN:
        pairs = [
            (judged[tensor].error, observed.floor[family][tensor].error)
            for family, judged in observed.judged.items()
            if tensor in judged and family in observed.floor
        ]
        if pairs and all(error < _TOO_GOOD * floor for error, floor in pairs):
            error, floor = max(pairs, key=lambda pair: pair[0] / pair[1])
            return (
                f"the error of {tensor} is {_text(error)} where its quantised operands alone make {_text(floor)}: "
                "it did not compute with them"
            )
    return None


def _head(observed: Observations) -> str | None:
    return _one(observed, "head", _HEAD, lambda detail: detail.worst_head)


def _row(observed: Observations) -> str | None:
    return _one(observed, "row", _ROW, lambda detail: detail.worst_row)


def _one(
    observed: Observations, part: str, most: Mapping[TensorName, float], worst_of: Callable[[Detail], float]
) -> str | None:
    for tensor, times in most.items():
        limit = _limit(times, observed)
        for family, judgement in observed.exact(tensor).items():
            worst = worst_of(judgement.detail)
            if worst > limit:
                return f"one {part} of {tensor} on {family} inputs is off by {_text(worst)}, beyond {limit:.3g}"
    return None


def _limit(times: float, observed: Observations) -> float:
    return min(max(times * observed.bound, _ODD), _LEFT_OUT)


def _bias(observed: Observations) -> str | None:
    """The bias has the same sign on every family, and is not small on any."""
    for tensor, least in _GAIN.items():
        gains = observed.biases(tensor)
        if len(gains) < 2 or min(gains.values()) < 0 < max(gains.values()):
            continue
        family = min(gains, key=lambda each: abs(gains[each]))
        limit = max(least, _GAIN_OF_FLOOR * observed.floor_of(tensor))
        if abs(gains[family]) > limit:
            return (
                f"{tensor} is {1 + gains[family]:.3g} times what it should be, on {family} inputs and no less on any "
                f"other, beyond {limit:.3g} of a difference"
            )
    return None


def _lse(observed: Observations) -> str | None:
    """The mean LSE is off by more than one family's floor explains, and by a noticeable amount on most families."""
    means = observed.biases("lse")
    sizes = sorted(map(abs, means.values()))
    if not sizes or sizes[(len(sizes) - 1) // 2] <= _NATS_OF_MOST:
        return None
    for family, mean in means.items():
        floor = observed.floor.get(family, {})
        limit = max(_NATS, _NATS_OF_FLOOR * floor["lse"].error if "lse" in floor else 0.0)
        if abs(mean) > limit:
            return f"the mean of lse on {family} inputs is {mean:+.3g} nats off, beyond {limit:.3g}"
    return None


def _own(observed: Observations) -> str | None:
    """Out is off from exact attention on the quantised operands, on every family."""
    errors = {family: each["out"].error for family, each in observed.own.items() if "out" in each}
    if len(errors) < 2:
        return None
    family = min(errors, key=lambda each: errors[each])
    limit = max(_OWN, _OWN_OF_BOUND * observed.bound)
    if errors[family] <= limit:
        return None
    return (
        f"out is off by {_text(errors[family])} from exact attention on its own quantised operands, on {family} inputs "
        f"and no less on any other, beyond {limit:.3g}"
    )


def _text(number: float) -> str:
    return f"{number:.3g}" if math.isfinite(number) else "infinite"


# The most informative check comes first: a NaN is an error before it is a wrong row.
CHECKS: dict[str, Check] = {
    "inputs": _inputs,
    "settled": _settled,
    "stale": _stale,
    "error": _error,
    "too good": _too_good,
    "head": _head,
    "row": _row,
    "bias": _bias,
    "lse": _lse,
    "own": _own,
}
