"""The Hopper kernels for the gradients of heads wider than 128, emulated: against FP64 on the operands."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from backwards import LONG, check, make, saved
from hopper_backward import on_cpu, sums_off
from packed import Documents, answers
from torch import Tensor

from attnbench import Mask
from attnbench.problem.fp8 import Recipe

pytest.importorskip("triton", minversion="3.6")

from attnbench.backends.triton import TritonForward
from attnbench.backends.triton.backward.contract import KERNELS
from attnbench.backends.triton.interpreter import interpreted
from attnbench.backends.triton.launching import Launch

pytestmark = pytest.mark.skipif(not interpreted(), reason="the passes before the kernels run here")
HEAD, ROTATED = Recipe("head"), Recipe("head", rotation="hadamard")
END = "bottom-right"
WIDE = KERNELS[0]
ALLOWED = 0.01  # as for the plain kernels with sums in bf16
_MODES = random.Random(0)


@pytest.fixture(autouse=True)
def ran() -> Iterator[list[str]]:
    """The Hopper kernels that ran."""
    found: list[str] = []
    with on_cpu(lambda: _MODES.random() < 0.5, lambda name, given: found.append(name)):
        yield found


def checked(ran: list[str], seqlen_q: int, seqlen_kv: int, recipe: Recipe, **more: Any) -> None:
    spec, (q, k, v, grad_out) = make(seqlen_q, seqlen_kv, **more)
    check(WIDE, saved(spec, q, k, v, (recipe, recipe, HEAD)), grad_out, ALLOWED + sums_off(spec))
    assert ran == ["run_all"]


def test_three_chunks_of_a_rotated_head_whose_sums_are_taken_back(
    ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory that held no number before: in dK's, what is behind a head's columns is never written."""
    empty, launched, start = torch.empty, [], Launch.__call__

    def used(*said: Any, **named: Any) -> Tensor:
        x = empty(*said, **named)
        if x.is_floating_point() and x.ndim:
            x.view(torch.uint8).fill_(0xFF)
        return x

    def starting(launch: Launch, *said: Any) -> None:
        launched.append(launch.kernel.__name__)
        start(launch, *said)

    monkeypatch.setattr(torch, "empty", used)
    monkeypatch.setattr(Launch, "__call__", starting)
    checked(ran, 70, 140, ROTATED, heads=1, head_dim=192, head_dim_v=128, mask=Mask(right=0, alignment=END))
    assert launched[2:] == ["score_gradients_hopper", "value_gradients_hopper"] + 2 * ["finish_gradients"]


def test_four_chunks_where_every_head_has_scales_of_its_own(ran: list[str]) -> None:
    spec, (q, k, v, grad_out) = make(70, 40, heads=2, mask=Mask(left=30, right=9), head_dim=256)
    q = q * torch.tensor([1.0, 30.0])[:, None, None].to(q.dtype)
    check(WIDE, saved(spec, q, k, v, (HEAD,) * 3), grad_out, ALLOWED + sums_off(spec))
    assert ran == ["run_all"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("problem", LONG)
@pytest.mark.parametrize(
    ("sizes", "recipe"),
    [((192, 128), HEAD), ((256, 256), ROTATED), ((160, 40), ROTATED), ((130, 250), HEAD)],
    ids=lambda x: str(x)[:20],
)
def test_blocks_are_skipped_and_masked_as_the_mask_says(
    problem: tuple[int, int, Mask], sizes: tuple[int, int], recipe: Recipe, ran: list[str]
) -> None:
    seqlen_q, seqlen_kv, mask = problem
    checked(ran, seqlen_q, seqlen_kv, recipe, mask=mask, head_dim=sizes[0], head_dim_v=sizes[1], heads=4, kv_heads=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fp8", "fp8-head"])
def test_each_sequence_of_a_packed_batch_has_the_gradients_that_it_has_alone(name: str) -> None:
    lengths = ((130, 130), (0, 0), (1, 1), (64, 200), (0, 70), (90, 0))
    batch = Documents(lengths, Mask(right=0, alignment=END), heads=(2, 1), head_dim=192, head_dim_v=128)
    forward = TritonForward(name)
    for found, alone in zip(answers(batch, forward, WIDE), batch.alone(forward, WIDE), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(found[3:], alone[3:], strict=True))
        assert (found[2] - alone[2]).float().norm() <= 0.01 * alone[2].float().norm()


@pytest.mark.parametrize("more", [{"head_dim": 64, "head_dim_v": 192}, {"softcap": 3.0}], ids=str)
def test_what_they_do_not_serve_the_plain_kernels_do(more: dict[str, Any], ran: list[str]) -> None:
    spec, (q, k, v, grad_out) = make(20, 30, **{"heads": 1, "head_dim": 192, "head_dim_v": 64, **more})
    check(WIDE, saved(spec, q, k, v, (HEAD,) * 3), grad_out, ALLOWED)
    assert not ran
