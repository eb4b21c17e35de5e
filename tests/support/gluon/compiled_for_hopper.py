"""Triton kernels compiled for Hopper through their own launches, on any machine and without a launch.

What is compiled lies in Triton's cache on the disk afterwards, where a process with a GPU finds it.
"""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import pytest

__all__ = ["SHARED_MEMORY", "Program", "compiled", "compiling", "idle_barriers"]

SHARED_MEMORY = 227 * 1024  # bytes that a program may have on Hopper
Job = TypeVar("Job")


class Program(NamedTuple):
    """What came of a job: most bytes of shared memory, seconds that it took, and what is wrong, or None."""

    shared: int
    seconds: float
    problem: str | None


@contextmanager
def compiling() -> Iterator[list[Any]]:
    """Launches of the ``triton`` backend compile for Hopper and start nothing; yields Triton's compiled kernels.

    The operands may be on the device ``meta``: of a tensor no more is asked than its dtype, shape and alignment.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from attnbench.backends.triton.forward.hopper import launch as forward_hopper_launch
    from attnbench.backends.triton.launching import Launch

    made: list[Any] = []

    def compile_(launch: Launch, first: tuple[Any, ...], addresses: int) -> None:
        made.append(launch.kernel.warmup(*first, *launch.constants, grid=launch.grid, **launch.options))

    hopper = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    before = driver._active
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", compile_)
        patch.setattr(forward_hopper_launch, "runs_on", lambda device: True)
        driver.set_active(hopper)
        try:
            yield made
        finally:
            driver._active = before


def idle_barriers(ttgir: str) -> list[str]:
    """The barriers of a warp-specialised kernel that none of its partitions is given.

    The compiler lends their memory out, and the GPU may write there what they were.
    """
    made = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<[\dx]*xi64,", ttgir)
    (given,) = re.findall(r"ttg\.warp_specialize\(([^)]*)\)", ttgir)
    assert made, "a kernel whose warps are specialised has barriers"
    return [each for each in made if each not in given.split(", ")]


def compiled(
    launch: Callable[[Job], object], jobs: Sequence[Job], processes: int, ends: float = float("inf")
) -> dict[Job, Program]:
    """What comes of ``launch(job)`` for each, in many processes, until ``ends`` on the monotonic clock.

    ``launch`` is a function of a module.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(processes, len(jobs)) or 1, mp_context=context)
    futures = {pool.submit(_compile, launch, job): job for job in jobs}
    done, late = wait(futures, timeout=None if ends == float("inf") else max(0.0, ends - time.monotonic()))
    found = {futures[future]: Program(0, 0.0, "no time left to compile it") for future in late}
    for future in done:
        broken = future.exception()  # of a process that a compiler took along
        found[futures[future]] = Program(0, 0.0, f"its process died: {broken}") if broken else future.result()
    workers = list((pool._processes or {}).values())
    pool.shutdown(wait=not late, cancel_futures=True)
    for worker in workers if late else ():
        worker.kill()
    return {job: found[job] for job in jobs}


def _compile(launch: Callable[[Job], object], job: Job) -> Program:
    begun = time.monotonic()
    shared, problem = 0, None
    try:
        with compiling() as made:
            launch(job)
        shared = max(each.metadata.shared for each in made)
        if shared > SHARED_MEMORY:
            problem = f"takes {shared} bytes of shared memory, {SHARED_MEMORY} is all there is"
    except Exception as error:  # a candidate may fail in any way, and is then none
        problem = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
    return Program(shared, time.monotonic() - begun, problem)
