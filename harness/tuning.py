"""What may be measured for a spec beside a running program, and by whom: memory, plans, one process at a time."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from attnbench.environment import Environment
from attnbench.errors import InputError, MalformedFileError, MisuseError, OutputError
from attnbench.plan import Plan, backend_of
from attnbench.spec import AttentionSpec
from attnbench.table import Table
from attnbench.table_binding import Binding
from attnbench.user_table import user_table_path

from .asked import input_bytes
from .bounded import Work
from .cases import Case
from .laboratory import Laboratory
from .sweep import tasks_of

__all__ = ["alone", "own_table", "plans_to_measure", "shortage"]

_POLL_SECONDS = 0.1
_CONTEXT = 2**29  # bytes of a GPU that a process takes before it has a tensor there
# Times the inputs: two families and the buffers, a plan's operands and results, and truths in
# FP64, which are four times as wide and of some of the heads.
_COPIES = 8


@contextmanager
def alone(path: Path, deadline: float) -> Iterator[bool]:
    """Keep other processes from measuring for this table; whether none was left at the deadline, waited for until then.

    The lock is the kernel's and ends with the process.  On a file system that has none, nobody is waited for.
    Raises OutputError where the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".measuring"), os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise OutputError(f"cannot write the table {path}: {error.strerror}") from None
    try:
        while not (ours := _taken(lock)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        yield ours
    finally:
        os.close(lock)


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def own_table(environment: Environment) -> Table:
    """What the user's table holds that may be used here; empty where there is none or it is damaged."""
    try:
        table = Table.load(user_table_path(environment))
    except (OSError, MalformedFileError, InputError):
        return Table(environment, {})
    return Binding.between(table, environment).usable(table)


def plans_to_measure(
    spec: AttentionSpec, laboratory: Laboratory, fp8: bool, names: Sequence[str], incumbents: Sequence[Plan]
) -> Work | str:
    """The spec as a case with the plans that can serve it, or why it cannot be one.

    What is chosen now is among them whatever the names keep: who is not measured cannot be found the faster one.
    """
    try:
        case = Case(str(spec), spec)
        tasks = tasks_of([case], laboratory.registry, laboratory.device, "fp8" if fp8 else spec.dtype, names)
    except MisuseError as error:  # FP8 tensors with descales; or nothing of what the names keep
        return str(error)
    return case, list(dict.fromkeys([*(task.plan for task in tasks if task.runs), *incumbents]))


def shortage(spec: AttentionSpec, plans: Sequence[Plan], laboratory: Laboratory) -> str | None:
    """What the GPU lacks of memory for the workers, each with a context and inputs of its own; None for nothing.

    What torch keeps for this process without using it is given back first.
    """
    device = laboratory.device
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    # A backend has one process, or one for each of its forwards where these compile.
    compiling = {name for name, backend in laboratory.registry.backends.items() if backend.compiles}
    processes = {plan.forward if backend_of(plan.forward) in compiling else backend_of(plan.forward) for plan in plans}
    need = len(processes) * (_CONTEXT + _COPIES * input_bytes(spec))
    if need <= free:
        return None
    return f"measuring it needs about {need / 1e9:.1f} GB of the GPU beside this program, {free / 1e9:.1f} GB are free"
