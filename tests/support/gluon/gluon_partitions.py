"""Runs the partitions of a Gluon program on a CPU: they are threads that wait at barriers.

What is asynchronous happens as early as a GPU may do it or as late: copies to shared memory when they are asked for or
when their barrier is waited for, matrix products and additions to global memory when they are started or when they are
waited for.  So a barrier that is missing or passed too early is a wrong result, and partitions that all wait are an
error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any

from gluon_data import STATE, Block, Descriptor, Pointer, Shared
from torch import Tensor


class DeadlockError(Exception):
    """Every partition of a program waits."""


class Program:
    """How many partitions of one program run, each in a thread, and how many of these wait."""

    def __init__(self, late: bool) -> None:
        self.late, self.changed, self.running = late, threading.Condition(), 0
        self.waiting, self.failed = 0, False
        self.shared = 0  # bytes of shared memory
        self.released: dict[Any, Any] = {}  # stores without a fence that are visible behind a barrier, by place


class Barrier:
    """An mbarrier (PTX ISA): a phase ends after all arrivals and when all announced bytes were copied."""

    def __init__(self) -> None:
        self.program: Program = STATE.program
        self.count = self.pending = self.bytes = self.phase = 0
        self.copies: list[Callable[[], None]] = []

    def index(self, place: Any) -> Barrier:
        assert int(place) == 0
        return self

    def update(self, arrivals: int = 0, announced: int = 0, copied: int = 0) -> None:
        with self.program.changed:
            self.pending -= arrivals
            if arrivals:
                self.program.released.update(STATE.stores)
            self.bytes += announced - copied
            assert self.pending >= 0, "more arrive than the barrier was made for"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.program.waiting = 0  # waiting partitions check again
                self.program.changed.notify_all()

    def wait(self, parity: int) -> None:
        program = self.program
        with program.changed:
            while self.phase % 2 == parity:
                while self.copies:
                    self.copies.pop(0)()
                if self.phase % 2 != parity:
                    break
                program.waiting += 1
                if program.waiting >= program.running or program.failed:
                    program.failed = True
                    program.changed.notify_all()
                    raise DeadlockError("every partition waits")
                program.changed.wait()


class Barriers:
    def __init__(self, length: int) -> None:
        self.each = [Barrier() for _ in range(length)]

    def index(self, place: Any) -> Barrier:
        assert 0 <= int(place) < len(self.each)
        return self.each[int(place)]


class Product(Block):
    """The result of a pending matrix product; it must not be read yet."""

    def __init__(self, a: Any, b: Shared, acc: Any) -> None:
        self.a, self.b, self.acc = a, b, acc
        self.result: Block | None = None

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        raise AssertionError("a product is read before it is waited for")

    def finish(self) -> None:
        if self.result is None:
            acc = self.acc.result if isinstance(self.acc, Product) else self.acc
            made = self.a.data.float() @ self.b.data.float()
            self.result = Block(made if acc is None else acc.data + made)


def multiply(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
    made = Product(a, b, acc if use_acc else None)
    STATE.products.append(made)
    if not STATE.program.late:
        made.finish()
    return made if is_async else await_products(0, [made])


def await_products(outstanding: int, deps: Sequence[Any]) -> Any:
    while len(STATE.products) > outstanding:
        STATE.products.pop(0).finish()
    under_way = {id(x) for x in STATE.products}
    found = [x.result if isinstance(x, Product) and id(x) not in under_way else x for x in deps]
    return found[0] if len(found) == 1 else tuple(found)


def copy(source: Descriptor, place: Sequence[Any], barrier: Barrier, target: Shared) -> None:
    assert target.shape[-len(source.block_type.shape) :] == source.block_type.shape

    def write(place: list[int]) -> None:
        target.data.copy_(source.read(place))
        barrier.update(copied=source.block_type.nbytes)

    task = partial(write, [int(x) for x in place])
    if barrier.program.late:  # so that partitions that do not wait read old data
        with barrier.program.changed:
            barrier.copies.append(task)
            barrier.program.waiting = 0
            barrier.program.changed.notify_all()
    else:
        task()


def add(target: Descriptor, place: Sequence[int], source: Shared) -> None:
    """Starts an addition, a group of its own as Triton has it; when it happens, shared memory is read."""

    STATE.own.add(source.addresses)

    def read_and_add() -> None:
        target.add(place, source.data)

    if STATE.program.late:
        STATE.additions.append(read_and_add)
    else:
        read_and_add()


def await_additions(outstanding: int) -> None:
    while len(STATE.additions) > outstanding:
        STATE.additions.pop(0)()


def specialize(partitions: Sequence[Any], warps: Sequence[int], registers: Sequence[int]) -> None:
    assert len(warps) == len(registers) == len(partitions) - 1
    program, place, errors = STATE.program, STATE.place, []
    owned: list[set[tuple[int, int]]] = []
    program.running = len(partitions)

    def run(function: Callable[..., None], given: tuple[Any, ...]) -> None:
        STATE.program, STATE.place = program, place
        STATE.products, STATE.stores, STATE.additions, STATE.own = [], {}, [], set()
        owned.append(STATE.own)
        try:
            function(*given)
            assert not STATE.products, "products are under way when a partition ends"
            assert not STATE.additions, "additions may still read shared memory when a partition ends"
            unseen = [place for place, stored in STATE.stores.items() if not stored.loaded]
            assert not unseen, "what is written to shared memory has no fence behind it"
        except Exception as error:
            errors.append(error)
            program.failed = True
        with program.changed:
            program.running -= 1
            if program.running and program.waiting >= program.running:
                program.failed = True
            program.waiting = 0
            program.changed.notify_all()

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in combinations(owned, 2):
        shared = [(a, b) for a in one for b in other if a[0] < b[1] and b[0] < a[1]]
        assert not shared or errors, "two partitions pass something through the same shared memory"
    if errors:
        raise next((each for each in errors if not isinstance(each, DeadlockError)), errors[0])


class Kernel:
    """A jitted function; a launch runs its programs one after the other."""

    def __init__(self, function: Callable[..., Any], late: Callable[[], bool]) -> None:
        self.function, self.late, self.__name__ = function, late, function.__name__

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, maxnreg: int, **constants: Any) -> None:
            given = [Pointer(x.view(-1)) if isinstance(x, Tensor) else Block(x) if isinstance(x, (int, float)) else x
                     for x in args]  # fmt: skip
            for place in product(*(range(size) for size in grid)):
                STATE.program, STATE.place = Program(self.late()), (place, grid)
                self.function(*given, **constants)

        return launch
