"""Packed and padded batches in the plain kernels: every sequence is what it is alone, whatever lies beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from packed import Answer, Documents, answers, documents

from attnbench import Mask
from attnbench.backends.triton import TritonForward, TritonOnePass, TritonWideScores
from attnbench.backends.triton.backward.contract import KERNELS, TritonBackward
from examples import examples

pytest.importorskip("triton")
from attnbench.backends.triton.interpreter import interpreted

if not interpreted():
    pytest.skip("kernels are compiled here, which the tests in tests/gpu run", allow_module_level=True)

from attnbench.backends.triton import tile_map as maps
from attnbench.backends.triton.backward.tiles import Tile as BackwardTile
from attnbench.backends.triton.backward.tiles import Tiles
from attnbench.backends.triton.forward.tiles import Tile
from attnbench.problem.lengths import Lengths

END = "bottom-right"
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.target]  # a smaller failure takes minutes to find
MASKS = st.sampled_from(
    [Mask(), Mask(right=0), Mask(right=0, alignment=END), Mask(9, 3), Mask(9, 3, END), Mask(left=9, alignment=END)]
)
TILE = Tile(16, 32, 4, 2, interleaved=True)
TILES = Tiles(BackwardTile(32, 32, 4, 2), BackwardTile(32, 32, 4, 2))
FORWARDS = [TritonForward(name, TILE) for name in ("fp8", "fp8-head", "fp8-tensor", "fp8-block", "fp8-token-hadamard")]
BACKWARDS = [TritonBackward(x.name, narrow=x.narrow, declared_error=x.declared_error, tiles=TILES) for x in KERNELS]
CU = torch.tensor([0, 40, 40, 41, 41, 300], dtype=torch.int32)


def alike(found: Answer, alone: Answer, off: float) -> bool:
    """Relative L2 at most ``off``, and the same bits where that is 0; minus infinity at the same places."""
    for x, y in zip(found, alone, strict=True):
        hidden = y == -torch.inf
        if not torch.equal(x == -torch.inf, hidden):
            return False
        x, y = (each.float().masked_fill(hidden, 0) for each in (x, y))
        if not bool((x - y).norm() <= off * y.norm() + off / 100):
            return False
    return True


def allowed(forward: TritonForward, narrow: bool = False) -> float:
    """A sequence of one token alone has a scale for all its keys, not one for each: other roundings of dS."""
    return 0.0 if forward.recipe.granularity in ("tensor", "head") else 0.06 if narrow else 0.01


BATCHES = documents(
    50, MASKS, softcap=st.sampled_from([0.0, 2.0]), head_dim_v=st.sampled_from([24, 32]),
    padding=st.sampled_from([None, None, "left", "right"]),
)  # fmt: skip


@settings(max_examples=examples(6, 100), deadline=None, phases=PHASES)
@given(
    BATCHES,
    st.sampled_from([*FORWARDS, TritonWideScores(TILE), TritonOnePass(TILE)]),
)
def test_each_sequence_is_answered_as_if_it_were_alone(batch: Documents, forward: TritonForward) -> None:
    for found, alone in zip(answers(batch, forward), batch.alone(forward), strict=True):
        assert alike(found, alone, allowed(forward))


@pytest.mark.parametrize("kind", [TritonForward, TritonOnePass])
def test_sequences_stay_apart_where_a_hopper_kernels_tile_serves_the_plain_one(kind: type[TritonForward]) -> None:
    """V has slots of 256 keys then, and the plain kernel reads 128 at a time."""
    tile = Tile(128, 256, 4, 2, interleaved=True, hopper=True)
    forward = kind("fp8-head", tile) if kind is TritonForward else TritonOnePass(tile)
    batch = Documents(((20, 20), (130, 130), (9, 9)), Mask(right=0), softcap=2.0, heads=(1, 1))
    for found, alone in zip(answers(batch, forward), batch.alone(forward), strict=True):
        assert alike(found, alone, allowed(forward))


@settings(max_examples=examples(6, 60), deadline=None, phases=PHASES)
@given(
    BATCHES,
    st.sampled_from(FORWARDS),
    st.sampled_from(BACKWARDS),
)
def test_each_sequence_has_the_gradients_that_it_has_alone(
    batch: Documents, forward: TritonForward, backward: TritonBackward
) -> None:
    for found, alone in zip(answers(batch, forward, backward), batch.alone(forward, backward), strict=True):
        assert alike(found, alone, allowed(forward, backward.narrow))


@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_sequence(what: float) -> None:
    """Before it and behind it, where a block of keys or of queries goes on into it."""
    batch = Documents(((20, 20), (1, 1), (35, 35)), Mask(right=0, alignment=END))
    whole = answers(batch, FORWARDS[0], BACKWARDS[0])
    parts = batch.parts()
    for x in parts[1]:
        x.fill_(what)
    spoilt = answers(batch, FORWARDS[0], BACKWARDS[0], parts)
    for index in (0, 2):
        assert all(torch.equal(x, y) for x, y in zip(spoilt[index], whole[index], strict=True))
    assert not torch.isfinite(spoilt[1][0]).all()


@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda each: each.name)
def test_keys_that_no_query_asks_for_get_no_gradient_whatever_they_hold(backward: TritonBackward) -> None:
    batch = Documents(((20, 20), (0, 9), (35, 35)))
    parts = batch.parts()
    for x in parts[1]:
        x.fill_(torch.nan)
    for x in answers(batch, FORWARDS[0], backward, parts)[1][3:]:
        assert torch.equal(x, torch.zeros_like(x))


def test_a_table_is_kept_until_its_lengths_change() -> None:
    cu = CU.clone()
    lengths, tiled = Lengths("packed", cu, cu, 259, 259), maps.Tiled("q", 64, (128, 128), (300, 300))
    table = maps.tile_map(lengths, 1, tiled, cu.device)
    assert maps.tile_map(Lengths("packed", cu, cu, 259, 259), 1, tiled, cu.device) is table
    other = cu.clone()
    assert maps.tile_map(Lengths("packed", cu, other, 259, 259), 1, tiled, cu.device) is not table
    cu[1] = 30
    changed = maps.tile_map(lengths, 1, tiled, cu.device)
    assert changed[1 : 1 + int(changed[0, 0]), 3].tolist().count(30) == 1
