"""Tensors cached between calls are allocated in a separate thread: during warm-up for graph capture torch allocates
for the caller's thread in the graph's pool, and refuses to capture while such memory is held."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnbench import attention, graph_pools
from attnbench.api import forget_choices
from attnbench.errors import RefusedError
from attnbench.graph_pools import permanent
from attnbench.problem.fp8 import hadamard
from attnbench.problem.mask import Mask

CPU = torch.device("cpu")


class Allocations(TorchDispatchMode):
    """Records the memory that operators of this thread return, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, StorageWeakRef]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in given:  # no view, not in place
                self.found.append((str(function), StorageWeakRef(each.untyped_storage())))
        return out

    def held(self) -> list[str]:
        gc.collect()
        return [name for name, storage in self.found if not storage.expired()]


@contextmanager
def pool() -> Iterator[Allocations]:
    """Asserts that no memory that this thread allocates in the block outlives it."""
    with Allocations() as allocations:
        yield allocations
    assert allocations.found
    assert not allocations.held()


def tensors(length: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(1, 2, length, 24, dtype=torch.bfloat16).requires_grad_() for _ in range(3))


def step(x: tuple[Tensor, ...], plan: str) -> None:
    out = attention(*x, window=(5, 1), backend=plan)
    torch.autograd.grad(out.sum(), x)


PLANS = ["sdpa-flash", "emulated:fp8-hadamard>emulated:fp8-hadamard", "triton:fp8>triton:fp8"]


@pytest.mark.parametrize("plan", PLANS)
def test_a_first_call_keeps_no_memory_of_the_callers_pool(plan: str) -> None:
    x = tensors(5 + PLANS.index(plan))  # of a length that no other test has asked for
    try:
        with pool():
            step(x, plan)
    except RefusedError as error:
        pytest.skip(str(error))


def test_a_cached_flex_mask_is_not_in_the_callers_memory_pool() -> None:
    from attnbench.backends.flex.blocks import block_mask

    with Allocations() as allocations:
        made = block_mask(Mask(left=7, right=0), 300, 310, CPU)
    assert not allocations.held()
    assert block_mask(Mask(left=7, right=0), 300, 310, CPU) is made


def test_scale_history_does_not_keep_memory_of_earlier_steps() -> None:
    from attnbench.backends.te.history import History

    history = []
    with pool():
        history.append(History(2, CPU))
        bounds = torch.ones(2)
        for _ in range(3):
            history[0].note(bounds * 0.5, bounds)
            history[0].scales(bounds, 4.0)
        del bounds


def test_cached_tensors_are_made_on_an_unrecorded_stream_and_synchronised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Simulated without a GPU: torch returns four streams in turn, the first of which is being captured."""
    made_on, finished = [], []

    class Stream:
        count = 0

        def __init__(self, device: torch.device) -> None:
            self.number = Stream.count % 4
            Stream.count += 1

        def synchronize(self) -> None:
            finished.append(self.number)

    current = [None]

    @contextmanager
    def stream(entered: Stream) -> Iterator[None]:
        current.append(entered.number)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == 0)
    graph_pools._side_stream.cache_clear()
    try:
        found = permanent(lambda device: made_on.append((current[-1], list(finished))) or "made")(torch.device("cuda"))
    finally:
        graph_pools._side_stream.cache_clear()
    assert found == "made"
    assert made_on == [(1, [])]
    assert finished == [1]


def test_forgetting_choices_keeps_tensors_that_a_graph_may_have_recorded() -> None:
    before = hadamard(12, CPU)
    forget_choices()
    assert hadamard(12, CPU) is before
