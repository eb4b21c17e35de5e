"""``check_backend``: test whether a backend's kernels keep the contract, with a report for their author.

Checks go from the plain to the special.  Later checks avoid what an earlier one found wrong, so that a fault is
reported once, by the check that is about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ...errors import AttnbenchError
from ...kernels import devices
from ...kernels.contract import Backend
from ...kernels.plan import Plan, backend_of
from ...kernels.registry import Registry
from ...kernels.registry import registry as installed
from ...tables.environment import Environment
from .checks import CHECKS
from .one_check import BECAUSE, FEW, LOST, run_check
from .rehearsal import Setting, rehearse
from .report import Finding, Report
from .subject import Subject

__all__ = ["check_backend"]

_EXACT = "reference:fp32"  # the forward for a backward that has none of its own


def check_backend(
    name: str, device: str = "auto", *, seed: int = 0, known: Registry | None = None, quiet: bool = False
) -> Report:
    """Check every kernel of a backend against the contract on a device, print what is found, and return the report.

    ``name`` is a backend, one of its kernels or a plan; ``device`` auto, cpu, cuda or cuda:N.  Specs are small, drawn
    from ``seed`` within what the kernels' rows declare; results must be within twice the ``declared_error``.  ``known``
    is the registry, by default of everything installed.  ``to_markdown`` gives the report as a document.

    >>> assert check_backend("naive", "cpu").ok

    Raises UnknownBackendError for an unknown name, AttnbenchError if the backend cannot be used here, InputError for a
    missing device.
    """
    known, rehearsed = known or installed(), known is None
    known.check(name)
    backend = known.backend(backend_of(name))
    asked = dict.fromkeys(backend_of(each) for each in (Plan.parse(name).kernels if ":" in name else (name,)))
    versions = [_version(each, known) for each in asked]
    place = devices.find(device)
    subjects = [Subject(plan, place, known, seed) for plan in _plans(name, backend, known)]
    here = Environment.detect(place, known)
    report = Report(name, here.device_name, ", ".join(versions), seed, here, ())

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    say(report.heading)
    if rehearsed and backend.compiles and place.type == "cuda":
        say("\ncompiling: many processes run every check once beforehand")
        rehearse(subjects, Setting(place, seed), here.memory_bytes)
    report = replace(report, findings=tuple(_report_each(_findings(subjects, backend), say)))
    say(f"\n{report.summary}")
    return report


def _report_each(findings: Iterable[Finding], say: Callable[[str], None]) -> Iterator[Finding]:
    """Say each finding as soon as it is known."""
    plan = ""
    for each in findings:
        if each.plan != plan:
            plan = each.plan
            say(f"\n{plan}")
        say(str(each))
        yield each


def _version(backend: str, known: Registry) -> str:
    """Version and origin of a backend.  Raises AttnbenchError where it cannot be used."""
    found = known.availability(backend)
    if not found.ok:
        how = f"; add it with: {found.install}" if found.install else ""
        raise AttnbenchError(f"{backend} cannot be used here: {found.reason}{how}")
    return " from ".join((found.version or "of unknown version", *filter(None, [found.origin])))


def _plans(name: str, backend: Backend, known: Registry) -> list[Plan]:
    """Each forward alone, then each backward after a forward: its own, one that it names, or an exact one."""
    if ">" in name:
        plan = Plan.parse(name)
        return [Plan(plan.forward), plan]
    forwards = [each for each in known.forwards if backend_of(each) == backend.name]
    backwards = [each for each in known.backwards if backend_of(each) == backend.name]
    if ":" in name:
        known.forward(name)
        forwards = [name]
        backwards = [name] if name in known.backwards else []
    pairs = []
    for each in backwards:
        other = _EXACT if known.backward(each).follows is None else known.leader(each)
        pairs.append(Plan(each if each in forwards else other, each))
    return [Plan(each) for each in forwards] + pairs


def _findings(subjects: Sequence[Subject], backend: Backend) -> Iterator[Finding]:
    """Plan by plan; recording graphs comes last, because a failed one leaves the process unfit for more."""
    failed: dict[Plan, set[str]] = {}
    lost = ""
    late = [check for check in CHECKS if check.name == "CUDA graph"]
    for checks in ([check for check in CHECKS if check not in late], late):
        for subject in subjects:
            plan = subject.plan
            if refused := _missing_row(subject):
                if checks is not late:
                    yield Finding(str(plan), "refusals", "skipped", refused)
                continue
            known = failed.setdefault(plan, set())
            alone = failed.get(Plan(plan.forward), set()) if plan.backward else set()
            if plan.backward and checks is not late:
                before = next((each for each in subjects if each.plan == Plan(plan.forward)), None)
                subject.broken |= before.broken if before else set()
            for check in checks:
                if lost:
                    yield Finding(str(plan), check.name, "skipped", f"not run, because {LOST}{lost}")
                    continue
                few = backend.compiles and check.name != "refusals"
                finding = run_check(subject, check, known, alone, FEW if few else check.count)
                if finding is None:
                    continue
                if finding.detail.startswith(LOST):
                    lost = f"{plan}, {check.name}"
                if finding.outcome == "failed" or finding.detail.startswith(BECAUSE):
                    known.add(check.name)
                    subject.broken |= {*check.features, *(("lse",) if check.name == "LSE" else ())}
                yield finding


def _missing_row(subject: Subject) -> str | None:
    """Which devices the kernels have rows for, if this one is not among them."""
    kernels = [subject.forward] if subject.backward is None else [subject.forward, subject.backward]
    here = subject.facts.type
    return next((f"{each.name} runs on {' and '.join(each.rows)}" for each in kernels if here not in each.rows), None)
