"""One check of one plan: on which specs, what is wrong, and the smallest spec on which it is."""

from __future__ import annotations

from random import Random

import torch

from ...problem.spec import FP8_DTYPES, AttentionSpec
from .batches import serves_batch
from .checks import Check
from .growth import why_not_long
from .report import Finding
from .sinks import serves_sinks
from .subject import Subject, shrunk

__all__ = ["BECAUSE", "FEW", "LOST", "applies", "run_check", "specs_for"]

FEW = 1  # specs of each check that runs, where every new shape is compiled
BECAUSE = "not run, because of: "
LOST = "the GPU takes no more work from this process: "
_TRIES = 4  # specs drawn for each that must be served in a batch of unequal lengths
_SHARED = "shared"  # the seed of checks that then use the same spec
_RAISED = "raised "


def run_check(subject: Subject, check: Check, known: set[str], alone: set[str], count: int) -> Finding | None:
    """One check of one plan; None if the check is for plans of another direction."""
    plan = str(subject.plan)
    if not applies(subject, check):
        return None

    def skipped(why: str) -> Finding:
        return Finding(plan, check.name, "skipped", why)

    if check.on not in (None, subject.device.type):
        return skipped(f"needs {check.on}")
    failed = known | alone
    if blocked := [name for name in dict.fromkeys((*check.after, check.name)) if name in failed]:
        return skipped(BECAUSE + ", ".join(blocked))
    specs = specs_for(subject, check, count)
    if not specs:
        return skipped(_why_no_spec(subject, check))
    for spec in specs:
        problem = _fault(check, subject, spec)
        if problem is None:
            continue
        if problem.startswith(LOST):
            return Finding(plan, check.name, "failed", problem, spec, check.look)
        if problem.startswith(_RAISED) and "runs" in failed:
            return skipped(BECAUSE + "runs")

        small, problem = (spec, problem) if check.specs else _smallest(check, subject, spec, problem)
        return Finding(plan, check.name, "failed", problem, small, check.look)
    notes = "; ".join(subject.notes.get(check.name, []))
    return Finding(plan, check.name, "passed", f"{len(specs)} specs" + (f"; {notes}" if notes else ""))


def _smallest(check: Check, subject: Subject, spec: AttentionSpec, problem: str) -> tuple[AttentionSpec, str]:
    """A small spec that still fails, and what is wrong on it."""

    def fails(smaller: AttentionSpec) -> bool:
        nonlocal problem
        # A spec that lost the GPU is reported as it is, because no other can run in this process.
        if problem.startswith(LOST) or (check.name != "refusals" and subject.refusals(smaller)):
            return False
        found = _fault(check, subject, smaller)
        problem = found or problem
        return found is not None

    return shrunk(spec, fails), problem


def applies(subject: Subject, check: Check) -> bool:
    """Whether the check is for plans of this direction."""
    return check.only is None or (check.only == "training") == (subject.backward is not None)


def specs_for(subject: Subject, check: Check, count: int) -> list[AttentionSpec]:
    """The specs on which a check is made: the same in every process in which the same features are broken."""
    if check.name == "refusals":
        random = Random(f"{subject.seed} {subject.plan}")
        specs = [subject.random_spec(random) for _ in range(count)]
        # A spec of the forward alone never asks for the backward.
        return [spec for spec in specs if spec.training or subject.backward is None]
    if check.name == "descales":
        row = subject.row
        dtypes = tuple(each for each in row.dtypes if each in FP8_DTYPES) if row is not None and row.descales else ()
        return subject.specs(check.name, count, dtypes=dtypes) if dtypes else []
    if check.specs:
        return check.specs(subject)[:count]
    if check.batch is not None:
        specs = [*subject.mixed(check.name, _TRIES * max(count, 2)), *subject.specs(check.name, 1)]
        served = [each for each in specs if each.descale is None and serves_batch(subject, each, check.batch)]
        # One with as many keys as queries, and one whose sequences may lack either.
        kinds = {spec.seqlen_q == spec.seqlen_kv: spec for spec in reversed(served)}
        return list(dict.fromkeys([*kinds.values(), *served]))[: max(count, len(kinds))]
    if check.sinks:
        return [spec for spec in subject.mixed(check.name, _TRIES * count) if serves_sinks(subject, spec)][:count]
    if check.mixed:
        return subject.mixed(check.name, count)
    name = _SHARED if count == FEW and not check.features else check.name
    return subject.specs(name, count, *check.features)


def _why_no_spec(subject: Subject, check: Check) -> str:
    """Why there is no spec for a check."""
    if broken := sorted(subject.broken.intersection(check.features)):
        return BECAUSE + ", ".join(broken)
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
    problem = None
    try:
        problem = check.wrong(subject, spec)
    except Exception as error:  # whatever a kernel raises is a finding
        problem = f"{_RAISED}{_first_line(error)}"
    gone = None if check.name == "CUDA graph" else _device_error(subject.device)
    return problem if gone is None else LOST + gone


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
