"""From what was found to the row that is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from types import MappingProxyType

from attnbench.kernels.devices import describe
from attnbench.kernels.plan import Plan

from ..cases.case import Case
from ..measure.accuracy import TensorName
from ..measure.clocks import Conditions
from ..measure.findings import Findings, Judgements, Opened, Prepared, Side
from ..measure.peaks import peak_share
from ..measure.setup import Laboratory
from ..measure.timing import LATE_MS
from ..measure.verdict import Evidence, judge
from ..results.records import LONGEST_REASON, Measurement, Status
from .interleave import Samples

__all__ = ["measured", "passed_over"]

_DIGITS = 6  # of a millisecond: a nanosecond, far below what any clock here resolves


def passed_over(
    case: Case,
    plan: Plan,
    status: Status,
    reasons: Sequence[str],
    laboratory: Laboratory,
    ran: Mapping[Side, list[str]] = MappingProxyType({}),
    check: str | None = None,
) -> Measurement:
    """The row of a plan that has no numbers."""
    return Measurement(
        case=case.name,
        spec=case.spec,
        plan=plan,
        status=status,
        reason="; ".join(reasons)[:LONGEST_REASON],
        check=check,
        ran=dict(ran),
        started=datetime.now(timezone.utc),
        environment=laboratory.environment,
    )


def measured(
    case: Case,
    plan: Plan,
    opened: Opened,
    prepared: Prepared,
    samples: Samples,
    findings: Findings,
    gpu: Conditions | None,
    started: datetime,
    laboratory: Laboratory,
) -> Measurement:
    """The row of a plan that was timed and judged; a time that cannot be makes it an error."""
    share = peak_share(plan, case.spec, samples.time_ms, laboratory.environment.device_name)
    if share is not None and share > 1:
        said = f"{share:.0%} of the device's peak: the time or the count of operations is wrong"
        return passed_over(case, plan, "error", [said], laboratory, prepared.ran, "peak")
    bound = laboratory.bound(plan, case)
    verdict = judge(_evidence(bound, samples, findings))
    return Measurement(
        case=case.name,
        spec=case.spec,
        plan=plan,
        status=verdict.status,
        reason=verdict.reason,
        check=verdict.check,
        time_ms={cost: _rounded(taken) for cost, taken in samples.time_ms.items()},
        visits={cost: list(counts) for cost, counts in samples.visits.items()},
        host_ms=_rounded(samples.host_ms),
        first_ms=round(prepared.first_ms, _DIGITS),
        replayed=list(samples.replayed),
        error=_errors(findings.judged),
        floor=_errors(findings.floor),
        detail={
            family: {name: judgement.detail for name, judgement in each.items()}
            for family, each in findings.judged.items()
        },
        deterministic=findings.deterministic,
        leak=findings.leak,
        bound=bound,
        declared_error=laboratory.registry.declared_error(plan, case.spec, describe(laboratory.device)),
        memory_bytes=findings.memory_bytes,
        retained_bytes=findings.retained_bytes,
        peak_share=share,
        gpu=gpu,
        emulated=laboratory.registry.emulated(plan, laboratory.device.type),
        ran=dict(prepared.ran),
        truth=opened.truth,
        timer=opened.timer,
        drawn_on=opened.drawn_on,
        started=started,
        environment=laboratory.environment,
    )


def _evidence(bound: float, samples: Samples, findings: Findings) -> Evidence:
    return Evidence(
        bound=bound,
        judged=findings.judged,
        floor=findings.floor,
        own=findings.own,
        stale=findings.stale,
        settled=findings.settled and samples.late_ms < LATE_MS,
        untouched=findings.untouched,
    )


def _rounded(samples: Sequence[float]) -> list[float]:
    return [round(sample, _DIGITS) for sample in samples]


def _errors(judged: Mapping[str, Judgements]) -> dict[str, dict[TensorName, float]]:
    return {
        family: {name: judgement.error for name, judgement in each.items()} for family, each in judged.items() if each
    }
