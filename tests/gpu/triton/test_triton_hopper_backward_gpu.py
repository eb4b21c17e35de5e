"""The backward's Hopper kernels on a GPU, each in a process that may hang."""

from __future__ import annotations

import os
from typing import Any

import hopper_backward
import pytest
import torch
from compiled_for_hopper import compiled
from hopper_backward import Job, Kind, check_all, jobs_of, launch, wrong
from supervised_work import run_one_by_one

pytest.importorskip("triton", minversion="3.6")

PATIENCE = 30.0  # seconds for one case with all of its truth; the kernels take milliseconds
HUNG = 2  # cases of a kernel, after which the others are not tried
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not HOPPER, reason="torch sees no Hopper GPU")
@pytest.mark.parametrize(("kind", "narrow"), sorted({(kind, narrow) for kind, _, narrow in hopper_backward.RINGS}))
def test_a_hopper_kernel_agrees_with_plain_triton_and_fp64_and_is_deterministic(kind: Kind, narrow: bool) -> None:
    """All cases in one process, as long as none hangs."""
    jobs = jobs_of(kind, narrow)
    programs = compiled(launch, jobs, max(1, (os.cpu_count() or 1) - 2))
    found: dict[Job, Any] = {job: program.problem for job, program in programs.items() if program.problem}
    sound = [job for job in jobs if job not in found]
    found |= run_one_by_one(
        check_all, sound, patience=PATIENCE, limit=300.0, give_up=lambda lost, job: len(lost) >= HUNG
    )
    assert not (problems := wrong(jobs, found)), "\n".join(problems)
