"""Descriptors that are made without Triton's checks: what Triton would have made, each of its own memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from attnbench.backends.triton.descriptors import Described, all_of
from attnbench.backends.triton.forward.hopper import launch as forward_hopper_launch


def _gluon(x: Tensor, block: list[int]) -> Any:
    pytest.importorskip("triton", minversion="3.6")
    return forward_hopper_launch._descriptor(x, block)


KINDS = {"plain": TensorDescriptor.from_tensor, "gluon": _gluon}
any_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
Make = Callable[[Tensor, list[int]], Any]


def _memory(aligned: bool = True) -> Tensor:
    """(2, 3, 64, 32) in bf16 that begins at a multiple of 16 bytes, or between two."""
    x = torch.zeros(2 * 3 * 64 * 32 + 16, dtype=torch.bfloat16)
    begin = -x.data_ptr() % 16 // 2 + (0 if aligned else 4)
    return x[begin : begin + 2 * 3 * 64 * 32].view(2, 3, 64, 32)


def _without_memory(made: Any) -> dict[str, Any]:
    said = {name: value for name, value in vars(made).items() if name != "base"}
    return {name: tuple(value) if isinstance(value, (list, tuple)) else value for name, value in said.items()}


@any_kind
def test_the_second_is_what_triton_makes_of_other_memory(make: Make) -> None:
    described = Described(make, (384, 32), (64, 32))
    strided = Described(make, (6, 2048), (4, 64), (2048, 1))
    described(_memory())
    strided(_memory())
    x = _memory()
    for made, view, block in ((described(x), x.view(384, 32), [64, 32]), (strided(x), x.view(6, 2048), [4, 64])):
        wanted = make(view, block)
        assert type(made) is type(wanted)
        assert _without_memory(made) == _without_memory(wanted)
        assert made.base.data_ptr() == x.data_ptr()
        assert made.base.dtype == x.dtype


@any_kind
def test_memory_that_tma_cannot_read_is_refused_at_any_call(make: Make) -> None:
    described = Described(make, (384, 32), (64, 32))
    for _ in range(2):
        with pytest.raises(AssertionError, match="16-byte aligned"):
            described(_memory(aligned=False))
        described(_memory())


def test_the_next_one_leaves_the_last_as_it_was() -> None:
    described = Described(TensorDescriptor.from_tensor, (384, 32), (64, 32))
    tensors = [_memory() for _ in range(3)]
    made = [described(x) for x in tensors]
    assert [each.base.data_ptr() for each in made] == [x.data_ptr() for x in tensors]


def test_no_thread_gets_another_s_memory() -> None:
    described = Described(TensorDescriptor.from_tensor, (384, 32), (64, 32))

    def work(_: int) -> bool:
        x, y = _memory(), _memory()
        found = all_of((described, described), (x, y))
        return all(found[i].base.data_ptr() == each.data_ptr() for i, each in enumerate((x, y)))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(400)))


def test_none_keeps_memory_alive() -> None:
    described = Described(TensorDescriptor.from_tensor, (384, 32), (64, 32))
    described(_memory())
    assert described._known is not None
    assert not any(isinstance(value, Tensor) for value in described._known[1].values())


@dataclass
class _Encoded:
    """Of a Triton that works on the address when a descriptor is made."""

    base: Tensor
    shape: tuple[int, ...]
    begin: int = field(init=False)

    def __post_init__(self) -> None:
        self.begin = self.base.data_ptr()


class _Slotted:
    __slots__ = ("base", "begin")

    def __init__(self, base: Tensor) -> None:
        self.base, self.begin = base, base.data_ptr()


@pytest.mark.parametrize("make", [lambda x, _: _Encoded(x, x.shape), lambda x, _: _Slotted(x)], ids=["field", "slots"])
def test_one_that_holds_what_it_made_of_the_address_is_made_anew_each_time(make: Make) -> None:
    described = Described(make, (384, 32), (64, 32))
    for x in [_memory() for _ in range(3)]:
        assert described(x).begin == x.data_ptr()
