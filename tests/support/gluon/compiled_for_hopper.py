"""Triton kernels compiled for Hopper through their own launches, on any machine and without a launch.

What is compiled lies in Triton's cache on the disk afterwards, where a process with a GPU finds it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import pytest
from places import SUPPORT

SHARED_MEMORY = 227 * 1024  # bytes that a program may have on Hopper
Job = TypeVar("Job")

_DESCRIPTORS = """
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

def descriptor(kind, *block):
    bits = {"fp8e4nv": 8, "bf16": 16, "fp32": 32}[kind]
    swizzle = min(block[1] * bits // 8, 128) if len(block) > 1 else 0
    layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(block))
    return f"tensordesc<{kind}[{', '.join(map(str, block))}],{layout!r}>"
"""
# Compiles for sm_90 what `sources` yields for the json on stdin, and prints what came of each.
_ASSEMBLE = """
import json, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget

tools, found = sys.argv[1], []
for source, maxnreg in sources(json.load(sys.stdin)):
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, maxnreg=maxnreg))
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/k.ptx", "w") as file:
            file.write(made.asm["ptx"])
        command = [f"{tools}/ptxas", "-v", "--gpu-name=sm_90a", f"{folder}/k.ptx", "-o", f"{folder}/k.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [f"{tools}/cuobjdump", "-sass", f"{folder}/k.cubin"]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found.append(dict(said=said, code=code, shared=made.metadata.shared, ttgir=made.asm["ttgir"]))
print(json.dumps(found))
"""


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


def assembly_of(sources: str, kernels: Sequence[object], folder: Path) -> list[dict[str, Any]]:
    """What ptxas says of each kernel, its machine code, its bytes of shared memory and its ttgir.

    None waits for its products one by one, takes more shared memory than there is or has barriers that idle.
    ``sources`` is code that defines a function of that name: from ``kernels`` to Gluon sources with their registers,
    which may have ``descriptor(kind, *block)`` among their types.  Triton's cache lies in ``folder``.
    """
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not all((tools / name).exists() for name in ("ptxas", "cuobjdump")):
        pytest.skip("this Triton brings no ptxas")
    found = json_output_of(_DESCRIPTORS + sources + _ASSEMBLE, str(tools), folder=folder, said=kernels)
    for each in found:
        assert "C75" not in each["said"], each["said"]  # wgmma that ptxas waits for one by one
        assert int(each["shared"]) <= SHARED_MEMORY
        assert not idle_barriers(each["ttgir"])
    return found


def json_output_of(program: str, *arguments: str, folder: Path, said: object = None) -> Any:
    """What a program prints in JSON that reads ``said`` from stdin; its kernels are compiled into ``folder``."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join([SUPPORT, environment.get("PYTHONPATH", "")]).strip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], input=json.dumps(said), capture_output=True, text=True,
        env=environment | {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": paths}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


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
