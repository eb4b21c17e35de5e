"""Build a Measurement from what the worker found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any

from attnbench.kernels.devices import describe
from attnbench.kernels.plan import Plan

from ..cases.case import Case
from ..measure.accuracy import Judgements, TensorName
from ..measure.clocks import Conditions
from ..measure.findings import Findings, Opened, Prepared, Side
from ..measure.setup import DeviceSetup
from ..measure.timing import LATE_MS
from ..measure.verdict import judge
from ..results.peaks import peak_share
from ..results.records import LONGEST_REASON, Correctness, Measurement, Performance, Status
from .interleave import Samples

__all__ = ["measured_row", "slower_row", "unmeasured_row"]

_DIGITS = 6  # of a millisecond: one nanosecond, far below the resolution of any clock used here


def unmeasured_row(
    case: Case,
    plan: Plan,
    status: Status,
    reasons: Sequence[str],
    setup: DeviceSetup,
    ran: Mapping[Side, list[str]] = MappingProxyType({}),
    check: str | None = None,
    performance: Performance | None = None,
) -> Measurement:
    """The row of a plan that was not measured, or only looked at."""
    return Measurement(
        case=case.name,
        spec=case.spec,
        lengths=case.lengths,
        plan=plan,
        status=status,
        reason="; ".join(reasons)[:LONGEST_REASON],
        check=check,
        ran=dict(ran),
        performance_=performance,
        started=datetime.now(timezone.utc),
        environment=setup.environment,
    )


def slower_row(
    case: Case,
    plan: Plan,
    reason: str,
    samples: Samples,
    gpu: Conditions | None,
    setup: DeviceSetup,
) -> Measurement:
    """The row of a plan that lost a race at a first look, or by its passes in other plans."""
    performance = _performance(setup.timer.conditions, samples, gpu)
    return unmeasured_row(case, plan, "slower", [reason], setup, performance=performance)


def measured_row(
    case: Case,
    plan: Plan,
    opened: Opened,
    prepared: Prepared,
    samples: Samples,
    findings: Findings,
    gpu: Conditions | None,
    started: datetime,
    setup: DeviceSetup,
) -> Measurement:
    """The row of a plan that was timed and judged.  A time above the device's peak gives an ``error`` row."""
    share = peak_share(plan, case.spec, samples.time_ms, setup.environment.device_name, case.flops)
    if share is not None and share > 1:
        reason = f"{share:.0%} of the device's peak: the time or the count of operations is wrong"
        return unmeasured_row(case, plan, "error", [reason], setup, prepared.ran, "peak")
    bound = setup.bound(plan, case)
    settled = findings.settled and samples.late_ms < LATE_MS
    verdict = judge(replace(findings, bound=bound, settled=settled))
    return Measurement(
        case=case.name,
        spec=case.spec,
        lengths=case.lengths,
        plan=plan,
        status=verdict.status,
        reason=verdict.reason,
        check=verdict.check,
        emulated=setup.registry.emulated(plan, setup.device.type),
        ran=dict(prepared.ran),
        correctness_=Correctness(
            error=_errors(findings.judged),
            floor=_errors(findings.floor),
            detail={
                family: {name: judgement.detail for name, judgement in each.items()}
                for family, each in findings.judged.items()
            },
            bound=bound,
            declared_error=setup.registry.declared_error(plan, case.spec, describe(setup.device)),
            truth=findings.truth,
            drawn_on=opened.drawn_on,
            deterministic=findings.deterministic,
            leak=findings.leak,
        ),
        performance_=_performance(
            opened.timer,
            samples,
            gpu,
            first_ms=round(prepared.first_ms, _DIGITS),
            memory_bytes=findings.memory_bytes,
            retained_bytes=findings.retained_bytes,
            peak_share=share,
        ),
        started=started,
        environment=setup.environment,
    )


def _performance(timer: str, samples: Samples, gpu: Conditions | None, **found: Any) -> Performance:
    """The samples, and what else was ``found``: the first run, memory and the share of the peak."""
    return Performance(
        time_ms={cost: _rounded(taken) for cost, taken in samples.time_ms.items()},
        visits=samples.visits,
        host_ms=_rounded(samples.host_ms) or None,
        host_scale=[] if set(samples.host_scale) <= {1.0} else _rounded(samples.host_scale),
        launch_ms=_rounded(samples.launch_ms),
        replayed=list(samples.replayed),
        timer=timer,
        gpu=gpu,
        **found,
    )


def _rounded(samples: Sequence[float]) -> list[float]:
    return [round(sample, _DIGITS) for sample in samples]


def _errors(judged: Mapping[str, Judgements]) -> dict[str, dict[TensorName, float]]:
    return {
        family: {name: judgement.error for name, judgement in each.items()} for family, each in judged.items() if each
    }
