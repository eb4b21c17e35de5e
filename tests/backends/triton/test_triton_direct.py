"""Direct launches by Triton's C function: the same arguments as Triton's launcher, or no direct launch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

import triton
from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from attnbench.backends.triton import direct, launching
from attnbench.backends.triton.descriptors import Described
from attnbench.backends.triton.launching import Launch

pytestmark = pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="the stand-ins are Triton 3.6's")


GRID = 3, 2, 1
CONSTANTS = 7, 0.5, (3, (True, None)), "head"
META = {"swizzle": 3, "elem_size": 2, "elem_type": 5, "block_size": [64, 32], "fp4_padded": False}
DESCRIBED = Described(TensorDescriptor.from_tensor, (384, 32), (64, 32))


def memory(count: int = 1) -> list[torch.Tensor]:
    return [torch.zeros(384, 32, dtype=torch.bfloat16) for _ in range(count)]


def addresses(x: Any) -> Any:
    """The arguments of tensors and descriptors in ``again``."""
    if isinstance(x, tuple):
        return tuple(map(addresses, x))
    return x.data_ptr() if hasattr(x, "data_ptr") else x.base.data_ptr() if hasattr(x, "base") else x


class Compiled(CompiledKernel):
    """Of Triton's own, the part that launches; ``started`` has the arguments of its C function."""

    def __init__(self, kinds: tuple[str, ...], started: list[Any], meta: Any = META, **others: Any) -> None:
        descriptors = sum(kind.startswith("tensordesc") for kind in kinds)
        signature = dict(enumerate(kinds))

        def launch(*given: Any) -> None:
            started.append(addresses(given))

        launcher: Any = CudaLauncher.__new__(CudaLauncher)
        vars(launcher).update(
            {
                "launch": wrap_handle_tensordesc(launch, signature, [meta] * descriptors), "num_ctas": 1,
                "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0,
                "profile_scratch_align": 1, "launch_cooperative_grid": False, "launch_pdl": True,
            } | others
        )  # fmt: skip
        self.module, self.function, self.packed_metadata, self._run = 1, 4711, (4, 1, 1024), launcher
        self.name, self.src = "kernel", None


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that encodes descriptors as their arguments."""

    def encode(address: int, *how: Any) -> Any:
        return ("map", address, *(tuple(x) if isinstance(x, list) else x for x in how))

    active = SimpleNamespace(
        get_current_device=lambda: 1, get_current_stream=lambda device: 100 + device,
        utils=SimpleNamespace(fill_tma_descriptor=encode),
    )  # fmt: skip
    monkeypatch.setattr(driver, "_active", active)


PLAIN = "*bf16", "*bf16", "i32", "fp32", "constexpr", "constexpr"
WITH_MAPS = "tensordesc<bf16[64, 32]>", "tensordesc<bf16[64, 32]>", *PLAIN[1:]


@pytest.mark.parametrize("kinds", [PLAIN, WITH_MAPS, (("*bf16", ("*bf16", "i32")), *PLAIN[2:])])
def test_the_c_function_gets_the_arguments_that_triton_passes(
    kinds: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    compiled = Compiled(tuple(map(str, kinds)), started)

    def first() -> tuple[Any, ...]:
        x, y, z = memory(3)
        if kinds is WITH_MAPS:
            return DESCRIBED(x), DESCRIBED(y), z
        return (x, y) if kinds is PLAIN else ((x, (y, 9)),)

    monkeypatch.setattr(direct, "_MAPS", 2)
    start = direct.starter(compiled, GRID, first(), CONSTANTS)
    assert start is not None
    for given in (first(), first(), first()):
        compiled[GRID](*given, *CONSTANTS)
        assert start(addresses(given))
    theirs, ours = started[::2], started[1::2]
    # Triton's own hands over a chain of hooks without any hook, and metadata for them.
    hooks = slice(10, 13)
    assert [each[: hooks.start] + each[hooks.stop :] for each in theirs] == [
        each[: hooks.start] + each[hooks.stop :] for each in ours
    ]
    assert all(each[hooks] == (None, None, None) for each in ours)
    assert theirs[0] != theirs[1], "the addresses differ"


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_launches_with_profiler_hooks_are_left_to_triton(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = direct.starter(Compiled(PLAIN, []), GRID, tuple(memory(2)), CONSTANTS)
    assert start is not None
    chain = getattr(triton.knobs.runtime, name)
    assert start((16, 32))
    chain.add(print)
    try:
        assert not start((16, 32))
    finally:
        chain.remove(print)
    assert start((16, 32))
    monkeypatch.setattr(triton.knobs.runtime, name, print)
    assert not start((16, 32))


def _unknown_argument(compiled: Compiled) -> None:
    compiled._run = lambda *given: None


CHANGES: dict[str, tuple[Callable[[Compiled], None], Any]] = {
    "another launcher": (_unknown_argument, META),
    "no function of Python around the C function": (lambda compiled: vars(compiled.run).update(launch=len), META),
    "memory of its own": (lambda compiled: vars(compiled.run).update(global_scratch_size=8), META),
    "memory for a profiler": (lambda compiled: vars(compiled.run).update(profile_scratch_size=8), META),
    "descriptors that the kernel takes apart": (lambda compiled: None, None),
    "padded FP4": (lambda compiled: None, {**META, "fp4_padded": True}),
}


@pytest.mark.parametrize(("change", "meta"), [(None, META), *CHANGES.values()], ids=["as known", *CHANGES])
def test_unsupported_launches_are_left_to_triton(change: Callable[[Compiled], None] | None, meta: Any) -> None:
    compiled = Compiled(WITH_MAPS, [], meta)
    x, y, z = memory(3)
    if change is not None:
        change(compiled)
    start = direct.starter(compiled, GRID, (DESCRIBED(x), DESCRIBED(y), z), CONSTANTS)
    assert (start is None) == (change is not None)


def test_an_unknown_release_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "9.9.0")
    assert direct.starter(Compiled(PLAIN, []), GRID, tuple(memory(2)), CONSTANTS) is None


def test_a_direct_launch_needs_a_kernel_compiled_for_its_memory_and_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Addresses on 16 bytes, on the GPU that it was compiled for, after Triton has launched it once."""
    monkeypatch.setattr(launching, "_current_device", lambda: 1)
    started, by_triton = [], []
    compiled = Compiled(PLAIN, started)
    kernel = SimpleNamespace(launch=lambda *given, **_: (by_triton.append(addresses(given)), compiled)[1])
    launch = Launch({GRID: kernel.launch}, GRID, CONSTANTS, {})
    (x, y), off, gpu = memory(2), torch.zeros(9, dtype=torch.bfloat16)[1:], torch.device("cuda", 1)
    for pair in ((x, off), (x, y), (y, x), (y, off)):
        launch.on(gpu, pair)
    assert by_triton == [addresses((*pair, *CONSTANTS)) for pair in ((x, off), (x, y), (y, off))]
    assert [each[13:] for each in started] == [addresses((y, x, *CONSTANTS))]
    assert not launch.again(0, 0, (16, 32))
    assert not launch.again(1, 8, (16, 40))
