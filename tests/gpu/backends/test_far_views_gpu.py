"""Every plan is right, or refuses, where tokens, heads or batch entries lie beyond 2³¹ elements of a view's memory.

Kernels that count elements in 32 bits read other memory there, and some of them without an error.
"""

from __future__ import annotations

import far_views
import pytest
import torch
from supervised_work import run_one_by_one

from attnbench.kernels.registry import registry

PATIENCE = 60.0  # seconds for a plan's compilation
MEMORY = 20 * 2**30  # bytes: views of 8.6 GB, and a kernel's copies


@pytest.mark.parametrize("family", [name for name in registry().backends if name != "emulated"])
def test_each_plan_reads_far_views_as_it_reads_the_same_numbers_close_together(family: str) -> None:
    if torch.cuda.mem_get_info()[0] < MEMORY:
        pytest.skip(f"needs {MEMORY >> 30} GiB of free GPU memory")
    if reason := registry().availability(family).reason:
        pytest.skip(f"{family}: {reason}")
    jobs = far_views.jobs_of(registry(), family)
    found = run_one_by_one(far_views.compare_all, jobs, patience=PATIENCE)
    wrong = {job: found.get(job, "not reached") for job in jobs if found.get(job, "not reached") is not None}
    assert not wrong, "\n".join(f"{job.plan}, {job.layout}: {problem}" for job, problem in wrong.items())
