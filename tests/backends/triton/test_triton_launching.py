"""Launches that go around Triton's look at every argument: when they may, and that they start the same."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton")

from attnbench.backends.triton import launching
from attnbench.backends.triton.launching import Launch, Launches, on


class Kernel:
    """Stands for a ``JITFunction``: its launches answer with what was compiled, which can be launched as well."""

    def __init__(self) -> None:
        self.asked, self.started = [], []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.asked.append((grid, arguments, options))
            return Compiled(self)

        return launch


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.started.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launching, "_current_device", lambda: device[0])
    return Kernel()


device = [0]
GRID = 3, 1, 1


def test_the_second_launch_asks_nothing_and_has_the_memory_of_its_own_call(kernel):
    launch = Launch(kernel, GRID, (7, True), {"num_warps": 4})
    launch(("first",), 256)
    launch(("second",), 512)
    assert kernel.asked == [(GRID, ("first", 7, True), {"num_warps": 4})]
    assert kernel.started == [(GRID, ("second", 7, True))]


@pytest.mark.parametrize("compiled_before", [False, True])
def test_memory_that_is_not_aligned_is_triton_s_to_look_at(kernel, compiled_before):
    launch = Launch(kernel, GRID, (7,), {})
    if compiled_before:
        launch(("aligned",), 256)
    launch(("odd",), 256 + 8)
    launch(("aligned again",), 512)
    assert [call[1][0] for call in kernel.asked][-2 if not compiled_before else -1 :] == (
        ["odd"] if compiled_before else ["odd", "aligned again"]
    )
    assert all(call[1][0] != "odd" for call in kernel.started)


def test_another_gpu_has_a_program_of_its_own(kernel):
    launch = Launch(kernel, GRID, (), {})
    launch(("here",), 256)
    device[0] = 1
    try:
        launch(("there",), 256)
        launch(("there again",), 256)
    finally:
        device[0] = 0
    assert [call[1] for call in kernel.asked] == [("here",), ("there",)]
    assert [call[1] for call in kernel.started] == [("there again",)]


def test_launches_that_differ_in_anything_but_memory_are_different_ones(kernel):
    launches = Launches(kernel)
    first = launches(GRID, (7,), (torch.float32,), num_warps=4)
    assert launches(GRID, (7,), (torch.float32,), num_warps=4) is first
    others = [
        launches((4, 1, 1), (7,), (torch.float32,), num_warps=4),
        launches(GRID, (8,), (torch.float32,), num_warps=4),
        launches(GRID, (7,), (torch.bfloat16,), num_warps=4),
        launches(GRID, (7,), (torch.float32,), num_warps=8),
    ]
    assert len({id(each) for each in (first, *others)}) == 5


def test_no_more_launches_are_kept_than_a_program_repeats(kernel, monkeypatch):
    monkeypatch.setattr(launching, "_MOST", 3)
    launches = Launches(kernel)
    for number in range(10):
        launches(GRID, (number,), ())
        assert len(launches._made) <= 3


def test_threads_that_share_a_launch_start_it_with_their_own_memory(kernel):
    launch = Launch(kernel, GRID, (7,), {})
    launch(("first",), 256)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: launch((number,), 256), range(200)))
    assert sorted(arguments[0] for _, arguments in kernel.started) == list(range(200))


def test_the_gpu_is_changed_only_where_it_is_another(monkeypatch):
    monkeypatch.setattr(launching, "_current", lambda: 1)
    with on(torch.device("cuda", 1)), on(torch.device("cpu")):
        pass  # without a GPU any change would fail
    changed = on(torch.device("cuda", 0))
    assert isinstance(changed, torch.cuda.device)
    assert changed.idx == 0
