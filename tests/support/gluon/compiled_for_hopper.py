"""Compiles Triton kernels for Hopper with their real launch arguments, on any machine and without running them.

The compiled kernels are in Triton's disk cache afterwards, where a process with a GPU can load them.
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
# Compiles for sm_90 the sources that `sources` yields for the JSON on stdin, and prints the result of each.
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
        stderr = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [f"{tools}/cuobjdump", "-sass", f"{folder}/k.cubin"]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found.append(dict(stderr=stderr, code=code, shared=made.metadata.shared, ttgir=made.asm["ttgir"]))
print(json.dumps(found))
"""


class Program(NamedTuple):
    """The result of a job: bytes of shared memory, seconds of compilation, and its problem or None."""

    shared: int
    seconds: float
    problem: str | None


@contextmanager
def compiling() -> Iterator[list[Any]]:
    """Makes launches of the ``triton`` backend only compile for Hopper; yields the compiled kernels.

    The operands may be on the device ``meta``: only their dtypes, shapes and alignments are read.
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
    """The messages of ptxas, machine code, bytes of shared memory and ttgir of each kernel.

    Asserts that no kernel serialises its wgmma, exceeds the shared memory or has unused barriers.
    ``sources`` is code that defines a function of that name: it maps ``kernels`` to Gluon sources with their
    registers, which may have ``descriptor(kind, *block)`` among their types.  Triton's cache lies in ``folder``.
    """
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not all((tools / name).exists() for name in ("ptxas", "cuobjdump")):
        pytest.skip("this Triton has no ptxas")
    found = json_output_of(_DESCRIPTORS + sources + _ASSEMBLE, str(tools), folder=folder, stdin=kernels)
    for each in found:
        assert "C75" not in each["stderr"], each["stderr"]  # ptxas's warning that it serialises wgmma
        assert int(each["shared"]) <= SHARED_MEMORY
        assert not idle_barriers(each["ttgir"])
    return found


def json_output_of(program: str, *arguments: str, folder: Path, stdin: object = None) -> Any:
    """The JSON output of a program that reads ``stdin`` as JSON; its kernels are compiled into ``folder``."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join([SUPPORT, environment.get("PYTHONPATH", "")]).strip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], input=json.dumps(stdin), capture_output=True, text=True,
        env=environment | {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": paths}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def idle_barriers(ttgir: str) -> list[str]:
    """The barriers of a warp-specialised kernel that are passed to none of its partitions.

    The compiler reuses their memory, and the GPU may still write barrier state there.
    """
    made = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<[\dx]*xi64,", ttgir)
    (given,) = re.findall(r"ttg\.warp_specialize\(([^)]*)\)", ttgir)
    assert made, "no barriers were found in a warp-specialised kernel"
    return [each for each in made if each not in given.split(", ")]


def compiled(
    launch: Callable[[Job], object], jobs: Sequence[Job], processes: int, ends: float = float("inf")
) -> dict[Job, Program]:
    """The results of ``launch(job)`` for each job, in many processes, until ``ends`` on the monotonic clock.

    ``launch`` is a function of a module.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(processes, len(jobs)) or 1, mp_context=context)
    futures = {pool.submit(_compile, launch, job): job for job in jobs}
    done, late = wait(futures, timeout=None if ends == float("inf") else max(0.0, ends - time.monotonic()))
    found = {futures[future]: Program(0, 0.0, "no time left to compile it") for future in late}
    for future in done:
        broken = future.exception()  # a compiler ended the process
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
            problem = f"takes {shared} bytes of shared memory, {SHARED_MEMORY} is available"
    except Exception as error:  # a candidate may fail in any way, and is then excluded
        problem = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
    return Program(shared, time.monotonic() - begun, problem)
