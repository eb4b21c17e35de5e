"""Packed batches in the Hopper kernels, emulated: every sequence is what it is alone, whatever lies beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hopper_backward import on_cpu
from hopper_forward import forward_on_cpu
from packed import Documents, answers

from attnbench import Mask
from attnbench.kernels.contract import Inputs, Saved

pytest.importorskip("triton", minversion="3.6")
from attnbench.backends.triton.interpreter import interpreted

if not interpreted():
    pytest.skip("kernels are compiled here, which the tests in tests/gpu run", allow_module_level=True)

from attnbench.backends.triton import TritonForward, TritonOnePass
from attnbench.backends.triton.backward.contract import TritonBackward
from attnbench.backends.triton.backward.tiles import Ring, Tiles
from attnbench.backends.triton.backward.tiles import Tile as BackwardTile
from attnbench.backends.triton.forward.tiles import Tile

END = "bottom-right"
PERSISTENT = Tile(128, 128, 4, 2, parts=2, interleaved=True, hopper=True, turns=True)
LONE = Tile(128, 64, 4, 3, interleaved=True, hopper=True, alone_from=0)
_FUSED = BackwardTile(64, 64, 4, 2, Ring(64, 2))
BACKWARD = TritonBackward("triton:fp8", narrow=False, declared_error=0.1, tiles=Tiles(_FUSED, _FUSED, fused=True))
# Empty ones on one side and on both, one token, ends within a block and at one, more keys than queries and fewer.
LENGTHS = ((130, 130), (0, 0), (1, 1), (64, 200), (0, 70), (128, 128), (90, 0), (200, 65))
SQUARE = ((130, 130), (0, 0), (1, 1), (256, 256), (33, 33))
_MODES = random.Random(0)


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    def late() -> bool:
        return _MODES.random() < 0.5

    with forward_on_cpu(late), on_cpu(late):
        yield


CASES = [
    (LENGTHS, Mask(right=0, alignment=END), PERSISTENT, "fp8"),
    (SQUARE, Mask(right=0), LONE, "fp8-head"),
    (LENGTHS, Mask(60, 20, END), LONE, "onepass"),
    *(
        pytest.param(*each, marks=pytest.mark.exhaustive)
        for each in (
            (LENGTHS, Mask(), LONE, "fp8-head"),
            (LENGTHS, Mask(60, 20, END), PERSISTENT, "fp8"),
            (LENGTHS, Mask(right=0), LONE, "fp8-tensor"),
        )
    ),
]


@pytest.mark.parametrize(("lengths", "mask", "tile", "name"), CASES, ids=lambda x: str(x)[:30])
def test_each_sequence_is_answered_as_if_it_were_alone(
    lengths: tuple[tuple[int, int], ...], mask: Mask, tile: Tile, name: str
) -> None:
    batch = Documents(lengths, mask, heads=(2, 1), head_dim=64, head_dim_v=64)
    forward = TritonOnePass(tile) if name == "onepass" else TritonForward(name, tile)
    for found, alone in zip(answers(batch, forward), batch.alone(forward), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(found, alone, strict=True))


def test_programs_leave_a_table_as_it_was() -> None:
    """They draw its tiles, and the next launch draws them again."""
    batch = Documents(((130, 130), (3, 3)), Mask(right=0), heads=(2, 1), head_dim=64, head_dim_v=64)
    (q, k, v, _), lengths, spec = batch.together(batch.parts())
    forward = TritonForward("fp8-head", PERSISTENT)
    operands = forward.prepare(Inputs(q, k, v, lengths), spec)
    first, again = forward.run(operands), forward.run(operands)
    assert torch.equal(first.out, again.out)
    assert torch.equal(first.lse, again.lse)
    assert operands.native.tiles[0, :3].tolist() == [3, 0, 0]


@pytest.mark.parametrize(
    ("case", "how"),
    [
        (CASES[0], {"heads": (2, 1)}),
        (CASES[0], {"heads": (2, 1), "head_dim_v": 80}),
        (CASES[1], {"heads": (2, 2)}),
        (CASES[1], {"heads": (2, 2), "padding": "left"}),
    ],
    ids=["grouped", "copied", "dQ in place", "left-padded"],
)
def test_each_sequence_has_the_gradients_that_it_has_alone(
    case: tuple[tuple[tuple[int, int], ...], Mask, Tile, str], how: dict[str, Any]
) -> None:
    """dQ is added up in bf16 in the order in which programs come."""
    lengths, mask, tile, name = case
    batch = Documents(lengths, mask, **{"head_dim": 64, "head_dim_v": 64, **how})
    forward = TritonForward(name, tile)
    for found, alone in zip(answers(batch, forward, BACKWARD), batch.alone(forward, BACKWARD), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(found[3:], alone[3:], strict=True))
        assert (found[2] - alone[2]).float().norm() <= 0.01 * alone[2].float().norm()


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("heads", [(2, 1), (2, 2)], ids=["grouped", "dQ in place"])
def test_what_is_not_finite_stays_in_its_sequence(heads: tuple[int, int], padding: str | None) -> None:
    batch = Documents(
        ((70, 70), (40, 40), (135, 135)), Mask(right=0), heads=heads, head_dim=64, head_dim_v=64, padding=padding
    )
    forward = TritonForward("fp8-head", PERSISTENT)
    whole, parts = answers(batch, forward, BACKWARD), batch.parts()
    for x in parts[1]:
        x.fill_(torch.nan)
    spoilt = answers(batch, forward, BACKWARD, parts)
    for index in (0, 2):
        assert all(torch.equal(x, y) for x, y in zip(spoilt[index], whole[index], strict=True))
    assert all(bool(x.isnan().any()) for x in spoilt[1])


@pytest.mark.parametrize("spoilt", ["k", "v"])
def test_keys_behind_a_sequence_are_not_read_as_its_own(spoilt: str) -> None:
    """The interpreter gives what is not finite a scale that is not, a GPU writes NaN in e4m3."""
    batch = Documents(((70, 70), (40, 40), (135, 135)), Mask(right=0), head_dim=64, head_dim_v=64)
    (q, k, v, grad), lengths, spec = batch.together(batch.parts())
    forward = TritonForward("fp8-head", PERSISTENT)
    operands = forward.prepare(Inputs(q, k, v, lengths), spec)
    saved = Saved(operands.kept(), *forward.run(operands))
    whole = batch.apart((q, q, *BACKWARD.run(saved, grad)))
    getattr(saved.operands, spoilt).data.view(torch.uint8)[:, :, 70:110] = 0x7F
    found = batch.apart((q, q, *BACKWARD.run(saved, grad)))
    for index in (0, 2):
        assert all(torch.equal(x, y) for x, y in zip(found[index], whole[index], strict=True))
    assert bool(found[1][2].isnan().any())


@pytest.mark.parametrize("heads", [(2, 1), (2, 2)], ids=["grouped", "dQ in place"])
def test_keys_that_no_query_asks_for_get_no_gradient_and_give_none(heads: tuple[int, int]) -> None:
    """Whatever they hold."""
    batch = Documents(((70, 70), (0, 30), (65, 65)), heads=heads, head_dim=64, head_dim_v=64)
    forward, parts = TritonForward("fp8-head", PERSISTENT), batch.parts()
    whole = answers(batch, forward, BACKWARD)
    for x in parts[1]:
        x.fill_(torch.nan)
    spoilt = answers(batch, forward, BACKWARD, parts)
    assert not any(bool(x.count_nonzero()) for x in spoilt[1][3:])
    for index in (0, 2):
        assert all(torch.equal(x, y) for x, y in zip(spoilt[index], whole[index], strict=True))


@pytest.mark.parametrize("head_dim_v", [64, 80])
def test_queries_without_keys_are_answered_with_zeros_whatever_lies_in_their_slot_of_values(head_dim_v: int) -> None:
    """The kernel reads one block of a sequence that has none, with weights of 0."""
    batch = Documents(((70, 70), (30, 0)), Mask(), head_dim=64, head_dim_v=head_dim_v)
    parts = batch.parts()
    parts[1][0].fill_(torch.nan)
    whole, lengths, spec = batch.together(parts)
    forward = TritonForward("fp8", PERSISTENT)
    operands = forward.prepare(Inputs(*whole[:3], lengths), spec)
    values = operands.native.given.v
    values.view(torch.uint8)[..., 128:] = 0x7F  # NaN from the second slot on
    out, lse = batch.apart(forward.run(operands)[:2])[1]
    assert torch.equal(out, torch.zeros_like(out))
    assert bool((lse == -torch.inf).all())
