"""The checks that GPU tests use for the backward's Hopper kernels, run emulated or with kernels that hang."""

from __future__ import annotations

import re
from typing import Any

import dense
import failing_work
import hopper_backward
import pytest
import torch
from hopper_backward import Job, Kind, check_all, problem_of, wrong
from supervised_work import ItemDone, ItemLost, ItemStarted, run_one_by_one

pytest.importorskip("triton", minversion="3.6")

from attnbench.backends.triton.backward.tiles import Ring, Tile

PATIENCE = 30.0  # seconds for one case with all of its truth; the kernels take milliseconds
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what is emulated where there is no GPU")


SMALL = [Job("keys", "few tokens", Ring(64, 4), True)]
LARGER = [
    Job("keys", "one block", Ring(64, 3)), Job("queries", "odd", Ring(64, 4)),
    Job("queries", "one block", Ring(64, 4), True), Job("all", "few tokens", Ring(64, 2)),
]  # fmt: skip


@without_gpu
@pytest.mark.parametrize(
    "right", [SMALL, pytest.param(LARGER, marks=pytest.mark.exhaustive)], ids=["a small case", "larger ones"]
)
def test_the_checks_run_emulated_and_name_a_hanging_kernel(right: list[Job]) -> None:
    """The emulator finds that two stages do not hold the three blocks of keys that are in use at a time."""
    hung = Job("queries", "odd", Ring(64, 2))
    found = run_one_by_one(check_all, [right[0], hung, *right[1:]], patience=PATIENCE)
    (line,) = wrong([*right, hung], found)
    assert line.startswith("queries, odd, Ring(block=64, stages=2): DeadlockError")


@without_gpu
@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ([1.2] * 4, r"dv is off by 0\.19\d* from FP64, 0\.07 allowed"),
        ([1.0, 1.0, 1.0, 1.001], r"dk is off by 0\.0009\d* when it runs again; dv is off by"),
    ],
    ids=["off", "not the same"],
)
def test_each_kind_of_error_is_described(factors: list[float], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain kernel replaces the Hopper one, with results scaled by a factor each time."""
    exact, left = hopper_backward.run, iter(factors)

    def scaled_run(given: Any, kind: Kind, tile: Tile, *more: Any) -> tuple[torch.Tensor, ...]:
        factor = next(left) if tile.hopper else 1.0
        return tuple(x.float() * factor for x in exact(given, kind, tile._replace(hopper=None), *more))

    monkeypatch.setattr(hopper_backward, "run", scaled_run)
    monkeypatch.setattr(dense, "visible", hopper_backward.visible)
    hopper_backward._known.cache_clear()
    assert re.search(message, str(problem_of(Job("keys", "one block", Ring(64, 3)))))


def test_a_job_that_hangs_dies_or_raises_does_not_affect_others() -> None:
    messages: list[Any] = []
    items = ["a", "hangs", "b", "dies", "slow", "raises", "c"]
    found = run_one_by_one(failing_work.run_items, items, patience=1.5, on_message=messages.append)
    assert found == {
        **{item: item.upper() for item in ("a", "b", "c", "slow")},
        "hangs": ItemLost("silent for 2 s, and killed"),
        "dies": ItemLost("its process died, exit code 9"),
        "raises": ItemLost("ValueError: the first line"),
    }
    assert messages[:3] == [ItemStarted("a"), ItemDone("a", "A"), ItemStarted("hangs")]
