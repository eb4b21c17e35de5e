"""Launches that skip Triton's inspection of arguments, and their caches: no call gets another call's memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.6")

from triton.tools.tensor_descriptor import TensorDescriptor

from attnbench.backends.triton import launching
from attnbench.backends.triton.blocks import Block, Wanted
from attnbench.backends.triton.descriptors import Described, all_of
from attnbench.backends.triton.forward.hopper import launch as forward_hopper_launch
from attnbench.backends.triton.launching import Launch, Launches

GRID = 3, 1, 1
Make = Callable[[Tensor, list[int]], Any]


class Kernel:
    """A stand-in for ``JITFunction``: launches return the compiled kernel, which can be launched too."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.started: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> Any:
            self.asked.append((grid, arguments, options))
            return {GRID: lambda *arguments: self.started.append(arguments)}

        return launch


def test_launches_are_cached_for_each_gpu_unless_memory_is_unaligned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, kernel = [0], Kernel()
    monkeypatch.setattr(launching, "_current_device", lambda: device[0])
    launch = Launch(kernel, GRID, (7, True), {"num_warps": 4})
    calls = ("odd first", 264, 0), ("first", 256, 0), ("second", 512, 0), ("odd", 264, 0), ("there", 256, 1)
    for name, address, device[0] in (*calls, ("there again", 256, 1)):
        launch((name,), address)
    asked = ("odd first", "first", "odd", "there")
    assert kernel.asked == [(GRID, (name, 7, True), {"num_warps": 4}) for name in asked]
    assert kernel.started == [("second", 7, True), ("there again", 7, True)]


def test_launches_are_cached_by_everything_but_memory_and_bounded_in_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = Launches(Kernel())
    first = launches(GRID, (7,), (torch.float32,), num_warps=4)
    assert launches(GRID, (7,), (torch.float32,), num_warps=4) is first
    others = [
        launches((4, 1, 1), (7,), (torch.float32,), num_warps=4),
        launches(GRID, (8,), (torch.float32,), num_warps=4),
        launches(GRID, (7,), (torch.bfloat16,), num_warps=4),
        launches(GRID, (7,), (torch.float32,), num_warps=8),
    ]
    assert len({id(each) for each in (first, *others)}) == 5
    monkeypatch.setattr(launching, "_MOST", 3)
    for number in range(10):
        launches(GRID, (number,), ())
    assert len(launches._made) <= 3


def memory(aligned: bool = True) -> Tensor:
    """(2, 3, 64, 32) in bf16 that begins at a multiple of 16 bytes, or between two."""
    x = torch.zeros(2 * 3 * 64 * 32 + 16, dtype=torch.bfloat16)
    begin = -x.data_ptr() % 16 // 2 + (0 if aligned else 4)
    return x[begin : begin + 2 * 3 * 64 * 32].view(2, 3, 64, 32)


def facts_of(made: Any) -> dict[str, Any]:
    """All fields of a descriptor except its memory."""
    return {name: tuple(x) if isinstance(x, list) else x for name, x in vars(made).items() if name != "base"}


@pytest.mark.parametrize(
    "make", [TensorDescriptor.from_tensor, forward_hopper_launch._descriptor], ids=["plain", "gluon"]
)
@pytest.mark.parametrize(("shape", "strides", "block"), [((384, 32), None, [64, 32]), ((6, 2048), (2048, 1), [4, 64])])
def test_a_descriptor_equals_tritons_for_the_memory_of_each_call(
    make: Make, shape: tuple[int, ...], strides: tuple[int, ...] | None, block: list[int]
) -> None:
    described = Described(make, shape, block, strides)
    tensors = [memory() for _ in range(3)]
    made = [described(x) for x in tensors]
    for each, x in zip(made, tensors, strict=True):
        wanted = make(x.view(shape), block)
        assert type(each) is type(wanted)
        assert facts_of(each) == facts_of(wanted)
        assert (each.base.data_ptr(), each.base.dtype) == (x.data_ptr(), x.dtype)
    with pytest.raises(AssertionError, match="16-byte aligned"):
        described(memory(aligned=False))
    assert not any(isinstance(value, Tensor) for value in described._known[1].values()), "memory is kept alive"


def test_descriptors_are_not_shared_between_threads() -> None:
    described = Described(TensorDescriptor.from_tensor, (384, 32), (64, 32))

    def work(_: int) -> bool:
        x, y = memory(), memory()
        found = all_of((described, described), (x, y))
        return all(found[i].base.data_ptr() == each.data_ptr() for i, each in enumerate((x, y)))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(400)))


@dataclass
class _Encoded:
    """The descriptor of a Triton version that encodes the address on creation."""

    base: Tensor
    begin: int = field(init=False)

    def __post_init__(self) -> None:
        self.begin = self.base.data_ptr()


def test_a_descriptor_that_encodes_the_address_is_recreated_for_each_call() -> None:
    described = Described(lambda x, _: _Encoded(x), (384, 32), (64, 32))
    for x in [memory() for _ in range(3)]:
        assert described(x).begin == x.data_ptr()


def test_workspace_parts_are_aligned_and_zeroed_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "empty", lambda *sizes, **named: torch.full(sizes, 255, **named))
    block = Block(
        [
            Wanted((3, 5), torch.float8_e4m3fn),
            Wanted((7,), torch.float32, zeros=True),
            Wanted((2, 16), torch.int32, zeros=True, width=13),
            Wanted((1,), torch.float32),
        ]
    )
    made = block.memory(torch.device("cpu"))
    tensors = [made.of(part) for part in block.parts]
    assert [tuple(x.shape) for x in tensors] == [(3, 5), (7,), (2, 13), (1,)]
    assert [bool(x.float().any()) for x in tensors] == [True, False, False, True]
    for x, part in zip(tensors, block.parts, strict=True):
        assert x.data_ptr() == made.address + part.begin
        assert part.begin % 256 == 0
        x.copy_(torch.ones(x.shape))
    assert all(bool((x.float() == 1).all()) for x in tensors), "one wrote into another's"
