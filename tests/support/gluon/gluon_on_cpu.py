"""The subset of Gluon for Hopper that our kernels use, on a CPU: partitions are threads that wait at barriers.

``emulated()`` puts it in Triton's place: a kernel that is imported meanwhile runs when it is launched.  What kernels
compute with is in ``gluon_data.py``, how their partitions run in ``gluon_partitions.py``.
Layouts, swizzles and registers are not emulated, nor what Triton makes of Python's names and loops: a compiler
and a GPU have to be asked about those.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from compiled_for_hopper import SHARED_MEMORY
from gluon_data import STATE, Block, Descriptor, Shared, atomic_add, data_of, fence, load, store
from gluon_partitions import (
    Barrier,
    Barriers,
    Kernel,
    add,
    await_additions,
    await_products,
    copy,
    multiply,
    specialize,
)
from torch import Tensor


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
    if layout == "barrier":
        return Barriers(shape[0]) if len(shape) > 1 else Barrier()
    made = Shared.allocate(dtype, shape)
    STATE.program.shared += made.data.nbytes
    assert STATE.program.shared <= SHARED_MEMORY
    return made


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _two(operation: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Block]:
    return lambda x, y: Block(operation(*_alike(data_of(x), data_of(y))))


def _extreme(
    operation: Callable[[Tensor, Tensor], Tensor], propagating: Callable[[Tensor, Tensor], Tensor]
) -> Callable[..., Block]:
    """Ignores NaN unless the kernel asks to propagate it."""

    def of(x: Any, y: Any, propagate_nan: Any = None) -> Block:
        return _two(operation if propagate_nan is None else propagating)(x, y)

    return of


def _alike(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A Python number takes the dtype of the tensor operand."""
    if x.is_floating_point() and y.is_floating_point() and x.dtype != y.dtype:
        return (x.to(y.dtype), y) if x.dim() == 0 else (x, y.to(x.dtype))
    return x, y


def _multiplied_and_added(x: Any, y: Any, z: Any) -> Block:
    """Rounded once: a product of fp32's numbers is exact in fp64."""
    return Block((data_of(x).double() * data_of(y).double() + data_of(z).double()).float())


def _layout(**options: Any) -> None:
    """Does nothing: layouts are not emulated."""


# What our kernels say in PTX, by an instruction in it.
_ASSEMBLY: dict[str, Callable[..., Tensor]] = {
    "cvt.rn.satfinite.e4m3x2.f32": lambda x: x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn),
    "rcp.approx.ftz.f32": torch.reciprocal,
    # To 11 bits, as the instruction is said to be (PTX ISA, tanh).
    "tanh.approx.f32": lambda x: torch.where(x.abs() < 2**-12, x, torch.tanh(x).half().float()),
    "mul.rn.bf16x2": lambda half, x: half * x.to(torch.bfloat16),
}


def _assembled(text: str, constraints: str, args: Sequence[Block], **options: Any) -> Block:
    (operation,) = (each for name, each in _ASSEMBLY.items() if name in text)
    return Block(operation(*(each.data for each in args)))


def _reduce(kind: Any, target: Descriptor, place: Sequence[int], source: Shared) -> None:
    assert kind.name == "ADD"
    add(target, place, source)


# What a kernel's own builtins ask of Gluon's compiler.
_SEMANTIC = SimpleNamespace(
    _convert_to_ir_values=lambda place, require_i64: [int(x) for x in place],
    builder=SimpleNamespace(create_async_tma_reduce=_reduce),
)


def _language() -> ModuleType:
    gl = ModuleType("language")
    nothing = lambda *args: None  # noqa: E731
    gl.__dict__.update(
        constexpr=lambda x: x, static_range=range, program_id=lambda axis: Block(STATE.place[0][axis]),
        num_programs=lambda axis: Block(STATE.place[1][axis]),
        arange=lambda start, stop, layout: Block(torch.arange(start, stop)),
        zeros=lambda shape, dtype, layout: Block(torch.zeros(*shape, dtype=dtype)),
        full=lambda shape, x, dtype, layout: Block(torch.full(shape, data_of(x).item(), dtype=dtype)),
        where=lambda sees, x, y: Block(torch.where(data_of(sees), data_of(x), data_of(y))),
        minimum=_extreme(torch.fmin, torch.minimum), maximum=_extreme(torch.fmax, torch.maximum),
        exp2=lambda x: Block(torch.exp2(x.data)), fma=_multiplied_and_added, log2=lambda x: Block(torch.log2(x.data)),
        sum=lambda x, axis: Block(x.data.sum(axis)),
        abs=lambda x: Block(x.data.abs()), max=lambda x, axis: Block(x.data.amax(axis)),
        inline_asm_elementwise=_assembled, float8e4nv=torch.float8_e4m3fn,
        cdiv=_two(lambda x, y: torch.div(x + y - 1, y, rounding_mode="trunc")), load=load, store=store,
        atomic_add=atomic_add, thread_barrier=nothing,
        convert_layout=lambda x, layout, assert_trivial=False: x, allocate_shared_memory=_allocate,
        warp_specialize=specialize, SliceLayout=nothing, NVMMADistributedLayout=nothing, DotOperandLayout=nothing,
        BlockedLayout=nothing, NVMMASharedLayout=_layout, SwizzledSharedLayout=_layout, int32=torch.int32,
        float32=torch.float32, bfloat16=torch.bfloat16, int8=torch.int8, int16=torch.int16, int64=torch.int64,
    )  # fmt: skip
    return gl


@contextmanager
def emulated(late: Callable[[], bool], *modules: str) -> Iterator[None]:
    """Replaces Gluon in the block and reimports ``modules``, which contain kernels.

    ``late`` says of each program when what is asynchronous happens.
    """
    gluon, nvidia = ModuleType("gluon"), ModuleType("nvidia")
    gluon.__dict__.update(language=_language(), nvidia=nvidia)
    core = ModuleType("_core")
    core.__dict__["builtin"] = lambda function: partial(function, _semantic=_SEMANTIC)
    gluon.__dict__["jit"] = lambda *args, **options: (
        Kernel(args[0], late) if args else lambda function: Kernel(function, late)
    )
    hopper = ModuleType("hopper")
    hopper.__dict__.update(
        warpgroup_mma=multiply,
        warpgroup_mma_wait=await_products,
        fence_async_shared=fence,
        tma=SimpleNamespace(async_copy_global_to_shared=copy, store_wait=await_additions),
        mbarrier=SimpleNamespace(
            MBarrierLayout=lambda: "barrier",
            init=_init,
            expect=lambda barrier, size: barrier.update(arrivals=1, announced=size),
            arrive=lambda barrier, count=1, pred=True: barrier.update(arrivals=count) if pred else None,
            wait=lambda barrier, phase: barrier.wait(int(phase)),
        ),
        TensorDescriptor=SimpleNamespace(from_tensor=lambda x, block, layout: Descriptor(x, block)),
    )
    experimental = ModuleType("experimental")
    experimental.__dict__["gluon"] = gluon
    name = "triton.experimental"
    replaced = {
        name: experimental, f"{name}.gluon": gluon, f"{name}.gluon.language": gluon.__dict__["language"],
        f"{name}.gluon.language._core": core, f"{name}.gluon.language.nvidia": nvidia,
        f"{name}.gluon.language.nvidia.hopper": hopper,
        f"{name}.gluon.nvidia": nvidia, f"{name}.gluon.nvidia.hopper": hopper,
    }  # fmt: skip
    before = {each: sys.modules.pop(each) for each in (*replaced, *modules) if each in sys.modules}
    sys.modules.update(replaced)
    _forget()
    try:
        yield
    finally:
        for each in (*replaced, *modules):
            sys.modules.pop(each, None)
        sys.modules.update(before)
        _forget()


def _forget() -> None:
    """Clears the caches of launches, which are valid only for either Gluon or the emulator."""
    for name, module in list(sys.modules.items()):
        if name.startswith("attnbench.backends.triton."):
            for kept in vars(module).values():
                if callable(getattr(kept, "cache_clear", None)):
                    kept.cache_clear()
