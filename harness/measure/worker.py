"""The process in which one backend runs, so that what it breaks is contained and detected.

It reads requests from a connection and answers each.  Both ends belong to attnbench: nothing from a file is unpickled.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from attnbench.text.failure import in_one_line

if TYPE_CHECKING:
    import torch

    from .timing import Timer

__all__ = ["Answer", "Setting", "is_out_of_memory", "main"]

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


@dataclass(frozen=True)
class Setting:
    """The first message to a worker: the registry (``module:function``), how to time, torch's threads on the CPU."""

    source: str
    timer: Timer
    threads: int


class Answer(NamedTuple):
    """``done`` with the value, or the status and reason of a failure; after ``fatal`` the process must end."""

    status: Literal["done", "oom", "error", "crashed"]
    value: object
    fatal: bool = False


def main(descriptor: int, parent: int, made: Callable[[Any], object] | None = None) -> None:
    """Serve the inherited connection ``descriptor`` until the process ``parent`` closes it, or dies.

    The first message is the setting; ``made`` makes the served object from it, by default a bench.
    """
    _die_with(parent)
    faulthandler.enable()
    os.set_inheritable(descriptor, False)  # programs that a library starts must not have it
    connection: Connection[Any, Any] = Connection(descriptor)
    # A child forked by a library would keep this end open, and the worker's death would go unnoticed.
    os.register_at_fork(after_in_child=connection.close)
    _serve(connection, made or _bench)
    # No destructors: after a fault those of a vendor's library may hang, and nothing needs to be saved.
    sys.stdout.flush()
    os._exit(0)


def _die_with(parent: int) -> None:
    """Have the system kill this process when its parent dies, whatever a kernel is doing then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl was called
        os._exit(1)


def _bench(setting: Setting) -> object:
    import torch

    from .bench import Bench

    torch.set_num_threads(setting.threads)
    return Bench(setting.source, setting.timer)


def _serve(connection: Connection[Any, Any], made: Callable[[Any], object]) -> None:
    served = made(connection.recv())
    # Plain tuples: the other end may be another version of attnbench.
    connection.send(tuple(Answer("done", None)))
    state = _State.now()
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:  # the sweep has ended
            return
        answer = _answer(served, method, arguments)
        state.restore()  # a backend must not change it for later plans, inputs and truths
        connection.send(tuple(answer))
        if answer.fatal:
            return


@dataclass(frozen=True)
class _State:
    """Settings of torch that one plan may change for all that runs after it in this process."""

    dtype: torch.dtype
    threads: int
    grad: bool
    deterministic: tuple[bool, bool]

    @classmethod
    def now(cls) -> _State:
        import torch

        return cls(
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        )

    def restore(self) -> None:
        import torch

        if self == _State.now():
            return
        torch.set_default_dtype(self.dtype)
        torch.set_num_threads(self.threads)
        torch.set_grad_enabled(self.grad)
        torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])


def _answer(served: object, method: str, arguments: tuple[object, ...]) -> Answer:
    """Call the method.  A kernel may raise anything; it costs only its own row, unless it broke the device."""
    try:
        return Answer("done", getattr(served, method)(*arguments))
    except BaseException as error:
        message, lost = in_one_line(error), is_out_of_memory(error)
    # Outside the except block, where the traceback no longer keeps the failed call's tensors alive.
    broken = _broken()
    if broken is not None:
        return Answer("crashed", message if message == broken else f"{message}; then {broken}", fatal=True)
    return Answer("oom" if lost else "error", message)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or a CPU had too little memory."""
    import torch

    # torch has no class of its own for a failed CPU allocation.
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def _broken() -> str | None:
    """Why the device accepts no more work from this process, as after an illegal memory access; None if it does."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:  # whatever it is, it is the reason
        return in_one_line(error)
    return None
