"""As much of Gluon for Hopper as our kernels use, on a CPU: partitions are threads, and barriers make them wait.

``emulated()`` puts it in Triton's place: a kernel that is imported meanwhile runs when it is launched.  Numbers are
those of torch.  What is asynchronous happens as early as a GPU may do it or as late: copies to shared memory when they
are asked for or when their barrier is waited for, matrix products when they are started or when they are waited for.
So a barrier that is missing or passed too early is a wrong result, and partitions that all wait are an error.
What a partition writes to shared memory nobody sees before its fence.
Layouts, swizzles and registers are not emulated, nor what Triton makes of Python's names and loops: a compiler
and a GPU have to be asked about those.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__all__ = ["DeadlockError", "emulated"]

_STATE = threading.local()  # of the thread that runs a partition: program, mode, products under way


class DeadlockError(Exception):
    """Every partition of a program waits."""


class Block:
    """A tensor in registers, or a number that all threads share."""

    def __init__(self, data: Any) -> None:
        self.data = data if isinstance(data, Tensor) else torch.tensor(data)
        if self.data.dtype == torch.float64:
            self.data = self.data.float()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype) -> Block:
        return Block(self.data.to(dtype))

    def reshape(self, *shape: Any) -> Block:
        return Block(self.data.reshape(*shape))

    def permute(self, *order: int) -> Block:
        return Block(self.data.permute(*order))

    def __getitem__(self, place: Any) -> Block:
        return Block(self.data[place])

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)


def _data(x: Any) -> Tensor:
    if isinstance(x, _Product):
        raise AssertionError("a product is read before it is waited for")
    return x.data if isinstance(x, Block) else torch.tensor(x)


def _elementwise(name: str, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
    setattr(Block, f"__{name}__", lambda x, y: Block(operation(x.data, _data(y))))
    setattr(Block, f"__r{name}__", lambda x, y: Block(operation(_data(y), x.data)))


def _compared(name: str, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
    setattr(Block, f"__{name}__", lambda x, y: Block(operation(x.data, _data(y))))


for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "rshift"):
    _elementwise(_name, getattr(torch.Tensor, f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _compared(_name, getattr(torch, _name))
# As in C, and so in Triton: towards zero.
_elementwise("floordiv", lambda x, y: torch.div(x, y, rounding_mode="trunc"))
_elementwise("mod", torch.fmod)


class _Pointer:
    """A place in a tensor in global memory, or a block of places."""

    def __init__(self, memory: Tensor, place: Any = 0) -> None:
        self.memory, self.place = memory, place
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> _Pointer:
        return _Pointer(self.memory, Block(_data(self.place) + _data(more)))


class _Descriptor:
    """A TMA descriptor: blocks of a contiguous tensor, zeros outside."""

    def __init__(self, memory: Tensor, block: Sequence[int]) -> None:
        self.memory, self.dtype, self.layout = memory, memory.dtype, None
        self.block_type = SimpleNamespace(shape=tuple(block), nbytes=memory.element_size() * torch.Size(block).numel())

    def read(self, place: Sequence[int]) -> Tensor:
        found = torch.zeros(self.block_type.shape, dtype=self.dtype)
        ranges = [
            (max(0, start), min(length, start + size))
            for start, size, length in zip(place, found.shape, self.memory.shape, strict=True)
        ]
        if all(start < stop for start, stop in ranges):
            inside = tuple(slice(a - start, b - start) for (a, b), start in zip(ranges, place, strict=True))
            found[inside] = self.memory[tuple(slice(*each) for each in ranges)]
        return found


class _Shared:
    """Shared memory; what nobody wrote is no number."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.shape = data, tuple(data.shape)

    def index(self, place: Any) -> _Shared:
        assert 0 <= int(place) < self.shape[0]
        return _Shared(self.data[int(place)])

    def slice(self, start: int, length: int, dim: int) -> _Shared:
        assert 0 <= start <= start + length <= self.shape[dim]
        return _Shared(self.data.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> _Shared:
        return _Shared(self.data.permute(*order))

    def load(self, layout: Any) -> Block:
        return Block(self.data.clone())

    def store(self, x: Block) -> None:
        assert self.shape == x.shape
        _STATE.stores.append(partial(self.data.copy_, x.data))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> _Shared:
        size = torch.Size(shape).numel() * dtype.itemsize
        return _Shared(self.data.view(torch.uint8).flatten()[:size].view(dtype).view(*shape))


class _Program:
    """The partitions of one program, of which no more than one runs at a time."""

    def __init__(self, late: bool) -> None:
        self.late, self.changed, self.running = late, threading.Condition(), 0
        self.waiting, self.failed = 0, False


class _Barrier:
    """An mbarrier (PTX ISA): a phase ends when everybody arrived and all bytes that were announced are there."""

    def __init__(self) -> None:
        self.program: _Program = _STATE.program
        self.count = self.pending = self.bytes = self.phase = 0
        self.copies: list[Callable[[], None]] = []

    def index(self, place: Any) -> _Barrier:
        assert int(place) == 0
        return self

    def update(self, arrivals: int = 0, announced: int = 0, copied: int = 0) -> None:
        with self.program.changed:
            self.pending -= arrivals
            self.bytes += announced - copied
            assert self.pending >= 0, "more arrive than the barrier was made for"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.program.waiting = 0  # those who wait look again
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


class _Barriers:
    def __init__(self, length: int) -> None:
        self.each = [_Barrier() for _ in range(length)]

    def index(self, place: Any) -> _Barrier:
        assert 0 <= int(place) < len(self.each)
        return self.each[int(place)]


class _Product:
    """A matrix product under way; nobody may read it."""

    def __init__(self, a: Any, b: _Shared, acc: Any) -> None:
        self.a, self.b, self.acc, self.result = a, b, acc, None

    def finish(self) -> None:
        if self.result is None:
            acc = self.acc.result if isinstance(self.acc, _Product) else self.acc
            made = self.a.data.float() @ self.b.data.float()
            self.result = Block(made if acc is None else acc.data + made)


def _multiply(a: Any, b: _Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
    made = _Product(a, b, acc if use_acc else None)
    _STATE.products.append(made)
    if not _STATE.program.late:
        made.finish()
    return made if is_async else _await_products(0, [made])


def _await_products(outstanding: int, deps: Sequence[Any]) -> Any:
    while len(_STATE.products) > outstanding:
        _STATE.products.pop(0).finish()
    found = [x.result if isinstance(x, _Product) and x not in _STATE.products else x for x in deps]
    return found[0] if len(found) == 1 else tuple(found)


def _copy(source: _Descriptor, place: Sequence[Any], barrier: _Barrier, target: _Shared) -> None:
    assert target.shape[-len(source.block_type.shape) :] == source.block_type.shape

    def copy(place: list[int]) -> None:
        target.data.copy_(source.read(place))
        barrier.update(copied=source.block_type.nbytes)

    task = partial(copy, [int(x) for x in place])
    if barrier.program.late:  # so that nobody sees it who does not wait
        with barrier.program.changed:
            barrier.copies.append(task)
            barrier.program.waiting = 0
            barrier.program.changed.notify_all()
    else:
        task()


def _specialize(partitions: Sequence[Any], warps: Sequence[int], registers: Sequence[int]) -> None:
    assert len(warps) == len(registers) == len(partitions) - 1
    program, place, errors = _STATE.program, _STATE.place, []
    program.running = len(partitions)

    def run(function: Callable[..., None], given: tuple[Any, ...]) -> None:
        _STATE.program, _STATE.place, _STATE.products, _STATE.stores = program, place, [], []
        try:
            function(*given)
            assert not _STATE.products, "products are under way when a partition ends"
            assert not _STATE.stores, "what is written to shared memory has no fence behind it"
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
    if errors:
        raise next((each for each in errors if not isinstance(each, DeadlockError)), errors[0])


class _Kernel:
    def __init__(self, function: Callable[..., Any], late: Callable[[], bool]) -> None:
        self.function, self.late, self.__name__ = function, late, function.__name__

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, maxnreg: int, **constants: Any) -> None:
            given = [_Pointer(x.view(-1)) if isinstance(x, Tensor) else Block(x) if isinstance(x, (int, float)) else x
                     for x in args]  # fmt: skip
            for place in product(*(range(size) for size in grid)):
                _STATE.program, _STATE.place = _Program(self.late()), (place, grid)
                self.function(*given, **constants)

        return launch


def _load(pointer: _Pointer) -> Block:
    place = _data(pointer.place)
    assert bool(((place >= 0) & (place < pointer.memory.numel())).all()), "a load outside of its tensor"
    return Block(pointer.memory[place])


def _store(pointer: _Pointer, x: Block, mask: Block) -> None:
    place, data, inside = torch.broadcast_tensors(_data(pointer.place), x.data, mask.data)
    place = place[inside]
    assert bool(((place >= 0) & (place < pointer.memory.numel())).all()), "a store outside of its tensor"
    pointer.memory[place] = data[inside]


def _add(pointer: _Pointer, x: Block, sem: str) -> None:
    place, data = torch.broadcast_tensors(_data(pointer.place), x.data)
    assert bool(((place >= 0) & (place < pointer.memory.numel())).all()), "an addition outside of its tensor"
    with _STATE.program.changed:
        pointer.memory.index_put_((place,), data, accumulate=True)


def _fence() -> None:
    while _STATE.stores:
        _STATE.stores.pop(0)()


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
    if layout == "barrier":
        return _Barriers(shape[0]) if len(shape) > 1 else _Barrier()
    size = torch.Size(shape).numel() * dtype.itemsize
    nothing = 0x7F if dtype.itemsize == 1 else 0xFF  # NaN in e4m3, and in every longer type
    return _Shared(torch.full((size,), nothing, dtype=torch.uint8).view(dtype).view(*shape))


def _init(barrier: _Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _two(operation: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Block]:
    return lambda x, y: Block(operation(_data(x), _data(y)))


# What our kernels say in PTX, by an instruction in it.
_ASSEMBLY: dict[str, Callable[[Tensor], Tensor]] = {
    "cvt.rn.satfinite.e4m3x2.f32": lambda x: x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn),
    "rcp.approx.ftz.f32": torch.reciprocal,
}


def _assembled(text: str, constraints: str, args: Sequence[Block], **said: Any) -> Block:
    (operation,) = (each for name, each in _ASSEMBLY.items() if name in text)
    return Block(operation(args[0].data))


def _language() -> ModuleType:
    gl = ModuleType("language")
    nothing = lambda *args: None  # noqa: E731
    gl.__dict__.update(
        constexpr=lambda x: x, static_range=range, program_id=lambda axis: Block(_STATE.place[0][axis]),
        num_programs=lambda axis: Block(_STATE.place[1][axis]),
        arange=lambda start, stop, layout: Block(torch.arange(start, stop)),
        zeros=lambda shape, dtype, layout: Block(torch.zeros(*shape, dtype=dtype)),
        where=lambda sees, x, y: Block(torch.where(_data(sees), _data(x), _data(y))),
        minimum=_two(torch.minimum), maximum=_two(torch.maximum), exp2=lambda x: Block(torch.exp2(x.data)),
        abs=lambda x: Block(x.data.abs()), max=lambda x, axis: Block(x.data.amax(axis)),
        inline_asm_elementwise=_assembled, float8e4nv=torch.float8_e4m3fn,
        cdiv=_two(lambda x, y: torch.div(x + y - 1, y, rounding_mode="trunc")), load=_load, store=_store,
        atomic_add=_add,
        convert_layout=lambda x, layout, assert_trivial=False: x, allocate_shared_memory=_allocate,
        warp_specialize=_specialize, SliceLayout=nothing, NVMMADistributedLayout=nothing, DotOperandLayout=nothing,
        NVMMASharedLayout=lambda **said: None, float32=torch.float32, bfloat16=torch.bfloat16, int64=torch.int64,
    )  # fmt: skip
    return gl


@contextmanager
def emulated(late: Callable[[], bool], *modules: str) -> Iterator[None]:
    """Gluon is this one meanwhile, and ``modules``, which hold kernels, are imported anew.

    ``late`` says of each program when what is asynchronous happens.
    """
    gluon, nvidia = ModuleType("gluon"), ModuleType("nvidia")
    gluon.__dict__.update(language=_language(), nvidia=nvidia)
    gluon.__dict__["jit"] = lambda *args, **said: (
        _Kernel(args[0], late) if args else lambda function: _Kernel(function, late)
    )
    hopper = ModuleType("hopper")
    hopper.__dict__.update(
        warpgroup_mma=_multiply,
        warpgroup_mma_wait=_await_products,
        fence_async_shared=_fence,
        tma=SimpleNamespace(async_copy_global_to_shared=_copy),
        mbarrier=SimpleNamespace(
            MBarrierLayout=lambda: "barrier",
            init=_init,
            expect=lambda barrier, size: barrier.update(arrivals=1, announced=size),
            arrive=lambda barrier, count=1, pred=True: barrier.update(arrivals=count) if pred else None,
            wait=lambda barrier, phase: barrier.wait(int(phase)),
        ),
        TensorDescriptor=SimpleNamespace(from_tensor=lambda x, block, layout: _Descriptor(x, block)),
    )
    experimental = ModuleType("experimental")
    experimental.__dict__["gluon"] = gluon
    name = "triton.experimental"
    replaced = {
        name: experimental, f"{name}.gluon": gluon, f"{name}.gluon.language": gluon.__dict__["language"],
        f"{name}.gluon.language.nvidia": nvidia, f"{name}.gluon.language.nvidia.hopper": hopper,
        f"{name}.gluon.nvidia": nvidia, f"{name}.gluon.nvidia.hopper": hopper,
    }  # fmt: skip
    before = {each: sys.modules.pop(each) for each in (*replaced, *modules) if each in sys.modules}
    sys.modules.update(replaced)
    try:
        yield
    finally:
        for each in (*replaced, *modules):
            sys.modules.pop(each, None)
        sys.modules.update(before)
