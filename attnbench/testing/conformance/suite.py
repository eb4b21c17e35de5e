"""``check_backend``: test whether a backend's kernels keep the contract, with a report for their author.

Checks go from the plain to the special.  Later checks avoid what an earlier one found wrong, so that a fault is
reported once, by the check that is about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import torch

from ...errors import AttnbenchError
from ...kernels import devices
from ...kernels.contract import Backend
from ...kernels.plan import Plan, backend_of
from ...kernels.registry import Registry
from ...kernels.registry import registry as installed
from ...problem.spec import FP8_DTYPES, AttentionSpec
from ...tables.environment import Environment
from .batches import serves_batch
from .checks import CHECKS, Check
from .growth import why_not_long
from .report import Finding, Report
from .sinks import serves_sinks
from .subject import Subject, shrunk

__all__ = ["check_backend"]

_FEW = 1  # specs of each check that runs, where every new shape is compiled
_TRIES = 4  # specs drawn for each that must be served in a batch of unequal lengths
_SHARED = "shared"  # the seed of checks that then use the same spec
_BECAUSE = "not run, because of: "
_RAISED = "raised "
_LOST = "the GPU takes no more work from this process: "
_EXACT = "reference:fp32"  # the forward for a backward that has none of its own


def check_backend(
    name: str, device: str = "auto", *, seed: int = 0, known: Registry | None = None, quiet: bool = False
) -> Report:
    """Check every kernel of a backend against the contract on a device, print the report and return it.

    ``name`` is a backend, one of its kernels or a plan; ``device`` auto, cpu, cuda or cuda:N.  Specs are small, drawn
    from ``seed`` within what the kernels' rows declare; results must be within twice the ``declared_error``.  ``known``
    is the registry, by default of everything installed.  ``to_markdown`` gives the report as a document.

    >>> assert check_backend("naive", "cpu").ok

    Raises UnknownBackendError for an unknown name, AttnbenchError if the backend cannot be used here, InputError for a
    missing device.
    """
    known = known or installed()
    known.check(name)
    backend = known.backend(backend_of(name))
    asked = dict.fromkeys(backend_of(each) for each in (Plan.parse(name).kernels if ":" in name else (name,)))
    versions = [_version(each, known) for each in asked]
    place = devices.find(device)
    subjects = [Subject(plan, place, known, seed) for plan in _plans(name, backend, known)]
    findings = tuple(_findings(subjects, backend))
    here = Environment.detect(place, known)
    report = Report(name, here.device_name, ", ".join(versions), seed, here, findings)
    if not quiet:
        print(report)
    return report


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
                    yield Finding(str(plan), check.name, "skipped", f"not run, because {_LOST}{lost}")
                    continue
                few = backend.compiles and check.name != "refusals"
                finding = _run_check(subject, check, known, alone, _FEW if few else check.count)
                if finding is None:
                    continue
                if finding.said.startswith(_LOST):
                    lost = f"{plan}, {check.name}"
                if finding.outcome == "failed" or finding.said.startswith(_BECAUSE):
                    known.add(check.name)
                    subject.broken |= {*check.features, *(("lse",) if check.name == "LSE" else ())}
                yield finding


def _missing_row(subject: Subject) -> str | None:
    """Which devices the kernels have rows for, if this one is not among them."""
    kernels = [subject.forward] if subject.backward is None else [subject.forward, subject.backward]
    here = subject.facts.type
    return next((f"{each.name} runs on {' and '.join(each.rows)}" for each in kernels if here not in each.rows), None)


def _run_check(subject: Subject, check: Check, known: set[str], alone: set[str], count: int) -> Finding | None:
    """One check of one plan; None if the check is for plans of another direction."""
    plan, training = str(subject.plan), subject.backward is not None
    if check.only is not None and (check.only == "training") != training:
        return None

    def skipped(why: str) -> Finding:
        return Finding(plan, check.name, "skipped", why)

    if check.on not in (None, subject.device.type):
        return skipped(f"needs {check.on}")
    failed = known | alone
    if blocked := [name for name in dict.fromkeys((*check.after, check.name)) if name in failed]:
        return skipped(_BECAUSE + ", ".join(blocked))
    specs = _specs_for(subject, check, count)
    if not specs:
        return skipped(_why_no_spec(subject, check))
    for spec in specs:
        said = _fault(check, subject, spec)
        if said is None:
            continue
        if said.startswith(_LOST):
            return Finding(plan, check.name, "failed", said, spec, check.look)
        if said.startswith(_RAISED) and "runs" in failed:
            return skipped(_BECAUSE + "runs")

        small, said = (spec, said) if check.specs else _smallest(check, subject, spec, said)
        return Finding(plan, check.name, "failed", said, small, check.look)
    notes = "; ".join(subject.notes.get(check.name, []))
    return Finding(plan, check.name, "passed", f"{len(specs)} specs" + (f"; {notes}" if notes else ""))


def _smallest(check: Check, subject: Subject, spec: AttentionSpec, said: str) -> tuple[AttentionSpec, str]:
    """A small spec that still fails, and what is wrong on it."""

    def fails(smaller: AttentionSpec) -> bool:
        nonlocal said
        # A spec that lost the GPU is reported as it is, because no other can run in this process.
        if said.startswith(_LOST) or (check.name != "refusals" and subject.refusals(smaller)):
            return False
        found = _fault(check, subject, smaller)
        said = found or said
        return found is not None

    return shrunk(spec, fails), said


def _specs_for(subject: Subject, check: Check, count: int) -> list[AttentionSpec]:
    if check.name == "refusals":
        random = Random(f"{subject.seed} {subject.plan}")
        specs = [subject.whatever(random) for _ in range(count)]
        # A spec of the forward alone never asks for the backward.
        return [spec for spec in specs if spec.training or subject.backward is None]
    if check.name == "descales":
        row = subject.row
        dtypes = tuple(each for each in row.dtypes if each in FP8_DTYPES) if row is not None and row.descales else ()
        return subject.specs(check.name, count, dtypes=dtypes) if dtypes else []
    if check.specs:
        return check.specs(subject)[:count]
    if check.batch is not None:
        specs = subject.mixed(check.name, _TRIES * count)
        return [spec for spec in specs if spec.descale is None and serves_batch(subject, spec, check.batch)][:count]
    if check.sinks:
        return [spec for spec in subject.mixed(check.name, _TRIES * count) if serves_sinks(subject, spec)][:count]
    if check.mixed:
        return subject.mixed(check.name, count)
    name = _SHARED if count == _FEW and not check.features else check.name
    return subject.specs(name, count, *check.features)


def _why_no_spec(subject: Subject, check: Check) -> str:
    """Why there is no spec for a check."""
    if broken := sorted(subject.broken.intersection(check.features)):
        return _BECAUSE + ", ".join(broken)
    if check.name == "descales":
        return "the row names no descales"
    if check.name == "growth" and (why := why_not_long(subject)):
        return why
    if check.batch is not None and (subject.row is None or check.batch not in subject.row.lengths):
        return f"the row names no {check.batch} batches"
    random = Random(0)
    spec = subject.any_spec(random, *check.features)
    reasons = subject.refusals(spec)
    return f"refused: {reasons[0]}" if reasons else "no such spec is served"


def _fault(check: Check, subject: Subject, spec: AttentionSpec) -> str | None:
    """What is wrong on a spec, including an exception; None if nothing is."""
    said = None
    try:
        said = check.wrong(subject, spec)
    except Exception as error:  # whatever a kernel raises is a finding
        said = f"{_RAISED}{_first_line(error)}"
    gone = None if check.name == "CUDA graph" else _device_error(subject.device)
    return said if gone is None else _LOST + gone


def _device_error(device: torch.device) -> str | None:
    """Why a GPU takes no more work from this process, as after an illegal memory access; None if it does."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except Exception as error:  # nothing runs after any of them
            return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
