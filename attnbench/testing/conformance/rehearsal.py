"""The checks of a compiling backend in many processes at once, before the ones that count.

Each check has shapes and strides of its own, for which Triton and Inductor compile anew, seconds every time.  What a
rehearsal compiles lies on the disk, where the checks find it; what it finds out is not looked at.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial

import torch

from ...harness.measure.setup import INSTALLED, registry_of
from ...harness.measure.worker import main as serve_requests
from ...harness.sweep.worker_pool import process_count, share_out
from ...harness.sweep.worker_process import LostError, Worker
from ...kernels.plan import Plan
from ...problem.spec import AttentionSpec
from .checks import CHECKS
from .one_check import FEW, applies, specs_for
from .subject import Subject

__all__ = ["Setting", "main", "rehearse"]

_SECONDS = 300.0  # for one check
_UNREHEARSED = ("refusals", "growth")  # which runs nothing, and whose long inputs fill a GPU


@dataclass(frozen=True)
class Setting:
    """The first message to a worker: where the checks are made, and the registry's ``module:function``."""

    device: torch.device
    seed: int = 0
    source: str = INSTALLED


class Rehearsal:
    """What a worker serves."""

    def __init__(self, setting: Setting) -> None:
        torch.set_num_threads(1)  # each process has a core
        known = registry_of(setting.source)
        self._subject = cache(lambda plan: Subject(plan, setting.device, known, setting.seed))

    def run(self, plan: Plan, name: str) -> None:
        """Make one check of a plan, on the specs that it is made on as long as nothing is found wrong."""
        subject = self._subject(plan)
        check = next(each for each in CHECKS if each.name == name)
        for spec in specs_for(subject, check, FEW):
            check.wrong(subject, spec)


main = partial(serve_requests, made=Rehearsal)


def rehearse(subjects: Sequence[Subject], setting: Setting, memory_bytes: int | None) -> None:
    """Run their checks in as many processes as the cores and the device's memory allow; where none pays do nothing."""
    waiting = _requests(subjects)
    count = process_count(len(waiting), memory_bytes)
    share_out(waiting, [Worker(setting, module=__name__) for _ in range(count)], _ask)


def _requests(subjects: Sequence[Subject]) -> deque[tuple[Plan, str]]:
    """Plans and checks.  Those with the same specs are far apart: the later one finds on the disk what both need."""
    alike = Counter[tuple[Plan, tuple[AttentionSpec, ...]]]()
    found: list[tuple[int, tuple[Plan, str]]] = []
    for subject in subjects:
        for check in CHECKS:
            if check.name in _UNREHEARSED or check.on is not None or not applies(subject, check):
                continue
            same = subject.plan, tuple(specs_for(subject, check, FEW))
            if same[1]:
                found.append((alike[same], (subject.plan, check.name)))
                alike[same] += 1
    return deque(request for _, request in sorted(found, key=lambda each: each[0]))


def _ask(worker: Worker, request: tuple[Plan, str]) -> None:
    with suppress(LostError):  # the check itself will say why
        worker.ask("run", *request, seconds=_SECONDS)
