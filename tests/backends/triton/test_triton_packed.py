"""Packed and padded batches: each sequence has the result that it has alone.

In the plain kernels, under Triton's interpreter, and in those for Hopper, emulated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dense import gradient_sizes
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from packed import Answer, Documents, answers, documents, starts

from attnbench import Mask
from attnbench.backends.triton import TritonForward, TritonOnePass, TritonWideScores
from attnbench.backends.triton.backward.contract import KERNELS, TritonBackward
from attnbench.kernels.contract import Inputs, Saved
from examples import examples

pytest.importorskip("triton", minversion="3.6")
from attnbench.backends.triton.interpreter import interpreted

if not interpreted():
    pytest.skip("kernels are compiled here, which the tests in tests/gpu run", allow_module_level=True)

from hopper_backward import on_cpu
from hopper_forward import forward_on_cpu

from attnbench.backends.triton import tile_map as maps
from attnbench.backends.triton.backward.copies import TOKENS, Source, copies_of, lay_out
from attnbench.backends.triton.backward.tiles import Ring, Tiles
from attnbench.backends.triton.backward.tiles import Tile as BackwardTile
from attnbench.backends.triton.blocks import Block, Piece, tensor_of
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
BATCHES = documents(
    50, MASKS, softcap=st.sampled_from([0.0, 2.0]), head_dim_v=st.sampled_from([24, 32]),
    padding=st.sampled_from([None, None, "left", "right"]),
)  # fmt: skip

PERSISTENT = Tile(128, 128, 4, 2, parts=2, interleaved=True, hopper=True, turns=True)
LONE = Tile(128, 64, 4, 3, interleaved=True, hopper=True, alone_from=0)
_RING = BackwardTile(64, 64, 4, 2, Ring(64, 2))
FUSED = TritonBackward("triton:fp8", narrow=False, declared_error=0.1, tiles=Tiles(_RING, _RING, fused=True))
IN_PIECES = TritonBackward(
    "triton:fp8", narrow=False, declared_error=0.1,
    tiles=Tiles(_RING, _RING, fused=True, values=BackwardTile(32, 64, 4, 2)),
)  # fmt: skip
# Empty ones on one side and on both, one token, ends within a block and at one, more keys than queries and fewer.
LENGTHS = ((130, 130), (0, 0), (1, 1), (64, 200), (0, 70), (128, 128), (90, 0), (200, 65))
SQUARE = ((130, 130), (0, 0), (1, 1), (256, 256), (33, 33))
_MODES = random.Random(0)

Pair = tuple[TritonForward, TritonBackward, dict[str, Any]]
PLAIN: Pair = FORWARDS[0], BACKWARDS[0], {}
WIDE = {"head_dim": 64, "head_dim_v": 64}
GROUPED: Pair = TritonForward("fp8-head", PERSISTENT), FUSED, {**WIDE, "heads": (2, 1)}
IN_PLACE: Pair = TritonForward("fp8-head", PERSISTENT), FUSED, {**WIDE, "heads": (2, 2)}
MLA: Pair = TritonForward("fp8-head", PERSISTENT), IN_PIECES, {"heads": (2, 2), "head_dim": 192, "head_dim_v": 128}
WIDEST: Pair = *MLA[:2], {"heads": (2, 1), "head_dim": 192, "head_dim_v": 192}
NARROW: Pair = TritonForward("fp8-head", PERSISTENT), FUSED, {"heads": (2, 1), "head_dim": 80, "head_dim_v": 80}
PAIRS = {
    "plain": PLAIN,
    "plain, e4m3 sums": (FORWARDS[0], BACKWARDS[1], {}),
    "hopper, grouped": GROUPED,
    "hopper, dQ in place": IN_PLACE,
    "hopper, left-padded": (*IN_PLACE[:2], {**IN_PLACE[2], "padding": "left"}),
    "hopper, MLA": MLA,
    "hopper, V of 192": WIDEST,
    "hopper, in pieces": NARROW,
}
by_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


@pytest.fixture
def hopper() -> Iterator[None]:
    def late() -> bool:
        return _MODES.random() < 0.5

    with forward_on_cpu(late), on_cpu(late):
        yield


def is_close(found: Answer, alone: Answer, off: float, sizes: tuple[float, ...] = (0.0, 0.0, 0.0)) -> bool:
    """Relative L2 at most ``off``, bitwise equal if that is 0; minus infinity at the same positions.

    Gradients that cancel are compared relative to a tenth of ``sizes``: with one key, dQ and dK are rounding errors.
    """
    for x, y, size in zip(found, alone, (0.0, 0.0, *sizes)[: len(found)], strict=True):
        hidden = y == -torch.inf
        if not torch.equal(x == -torch.inf, hidden):
            return False
        x, y = (each.float().masked_fill(hidden, 0) for each in (x, y))
        if not bool((x - y).norm() <= off * max(y.norm().item(), 0.1 * size) + off / 100):
            return False
    return True


def allowed_error(forward: TritonForward, narrow: bool = False) -> float:
    """A sequence of one token has one scale for all its keys when run alone, which rounds dS differently."""
    return 0.0 if forward.recipe.granularity in ("tensor", "head") else 0.06 if narrow else 0.01


def is_equal(found: Answer, wanted: Answer) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@settings(max_examples=examples(6, 100), deadline=None, phases=PHASES)
@given(BATCHES, st.sampled_from([*FORWARDS, TritonWideScores(TILE), TritonOnePass(TILE)]))
def test_each_sequence_has_the_result_that_it_has_alone(batch: Documents, forward: TritonForward) -> None:
    for found, alone in zip(answers(batch, forward), batch.run_alone(forward), strict=True):
        assert is_close(found, alone, allowed_error(forward))


@settings(max_examples=examples(6, 60), deadline=None, phases=PHASES)
@given(BATCHES, st.sampled_from(FORWARDS), st.sampled_from(BACKWARDS))
def test_each_sequence_has_the_gradients_that_it_has_alone(
    batch: Documents, forward: TritonForward, backward: TritonBackward
) -> None:
    results = zip(answers(batch, forward, backward), batch.run_alone(forward, backward), batch.parts(), strict=True)
    for (queries, keys), (found, alone, tensors) in zip(batch.lengths, results, strict=True):
        sizes = gradient_sizes(*tensors, batch.make(queries, keys)) if queries and keys else (0.0, 0.0, 0.0)
        assert is_close(found, alone, allowed_error(forward, backward.narrow), sizes)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("lengths", "mask", "forward", "how"),
    [
        (LENGTHS, Mask(60, 20, END), TritonOnePass(LONE), None),
        (LENGTHS, Mask(right=0, alignment=END), TritonForward("fp8", PERSISTENT), {"heads": (2, 1)}),
        (LENGTHS, Mask(right=0, alignment=END), TritonForward("fp8", PERSISTENT), {"heads": (2, 1), "head_dim_v": 80}),
        (LENGTHS, Mask(60, 20, END), TritonForward("fp8-head", PERSISTENT), {"heads": (2, 1), "head_dim": 192}),
        (SQUARE, Mask(right=0), TritonForward("fp8-head", PERSISTENT), {"heads": (2, 1), "head_dim": 192}),
        (LENGTHS, Mask(), TritonForward("fp8-head", PERSISTENT), {"heads": (2, 1), **WIDE}),
        (SQUARE, Mask(right=0), TritonForward("fp8-head", PERSISTENT), {"head_dim": 80, "head_dim_v": 96}),
        (SQUARE, Mask(right=0), TritonForward("fp8-head", LONE), {"heads": (2, 2)}),
        (SQUARE, Mask(right=0), TritonForward("fp8-head", LONE), {"heads": (2, 2), "padding": "left"}),
        *(
            pytest.param(LENGTHS, mask, TritonForward(name, tile), None, marks=pytest.mark.exhaustive)
            for mask, name, tile in (
                (Mask(), "fp8-head", LONE),
                (Mask(60, 20, END), "fp8", PERSISTENT),
                (Mask(right=0), "fp8-tensor", LONE),
            )
        ),
    ],
    ids=lambda x: str(x)[:30],
)
def test_hopper_kernels_give_each_sequence_the_result_that_it_has_alone(
    lengths: tuple[tuple[int, int], ...], mask: Mask, forward: TritonForward, how: dict[str, Any] | None
) -> None:
    """dQ is added up in bf16 in the order in which programs come.

    Of problems whose P is scaled up for one sequence as for several, or for neither: else it is rounded to other bits.
    """
    sizes = WIDE if how is None else {"head_dim": 128, "head_dim_v": 128, **how}
    batch = Documents(lengths, mask, **sizes)
    backward = None if how is None else IN_PIECES if sizes["head_dim"] > 128 else FUSED
    for found, alone in zip(answers(batch, forward, backward), batch.run_alone(forward, backward), strict=True):
        assert is_equal((*found[:2], *found[3:]), (*alone[:2], *alone[3:]))
        assert how is None or (found[2] - alone[2]).float().norm() <= 0.01 * alone[2].float().norm()


@pytest.mark.parametrize("kind", [TritonForward, TritonOnePass])
def test_sequences_are_isolated_when_the_plain_kernel_uses_a_hopper_tile(kind: type[TritonForward]) -> None:
    """V has slots of 256 keys then, and the plain kernel reads 128 at a time."""
    tile = Tile(128, 256, 4, 2, interleaved=True, hopper=True)
    forward = kind("fp8-head", tile) if kind is TritonForward else TritonOnePass(tile)
    batch = Documents(((20, 20), (130, 130), (9, 9)), Mask(right=0), softcap=2.0, heads=(1, 1))
    for found, alone in zip(answers(batch, forward), batch.run_alone(forward), strict=True):
        assert is_close(found, alone, allowed_error(forward))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("what", [torch.nan, pytest.param(torch.inf, marks=pytest.mark.exhaustive)])
@by_pair
def test_nonfinite_values_stay_in_their_sequence(pair: Pair, what: float) -> None:
    """Before it and behind it, where a block of keys or of queries goes on into it."""
    forward, backward, how = pair
    batch = Documents(((70, 70), (1, 1), (135, 135)), Mask(right=0, alignment=END), **how)
    whole, parts = answers(batch, forward, backward), batch.parts()
    for x in parts[1]:
        x.fill_(what)
    spoilt = answers(batch, forward, backward, parts)
    assert is_equal(spoilt[0], whole[0])
    assert is_equal(spoilt[2], whole[2])
    assert not torch.isfinite(spoilt[1][0]).all()


@pytest.mark.usefixtures("hopper")
@by_pair
def test_keys_without_queries_get_zero_gradients_and_have_no_effect(pair: Pair) -> None:
    """Whatever they hold."""
    forward, backward, how = pair
    batch = Documents(((70, 70), (0, 30), (65, 65)), **how)
    whole, parts = answers(batch, forward, backward), batch.parts()
    for x in parts[1]:
        x.fill_(torch.nan)
    spoilt = answers(batch, forward, backward, parts)
    assert not any(bool(x.count_nonzero()) for x in spoilt[1][3:])
    assert is_equal(spoilt[0], whole[0])
    assert is_equal(spoilt[2], whole[2])


@pytest.mark.usefixtures("hopper")
@by_pair
def test_what_lies_behind_a_sequence_has_no_weight_where_all_scores_are_low(pair: Pair) -> None:
    """A key of zeros would have one beyond FP32."""
    forward, backward, how = pair
    batch = Documents(((256, 256), (130, 130)), **how)
    parts = batch.parts()
    for q, k, *_ in parts:
        q.fill_(-8.0)
        k.fill_(8.0)
    assert all(bool(x.isfinite().all()) for answer in answers(batch, forward, backward, parts) for x in answer)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("spoilt", ["k", "v"])
def test_keys_after_a_sequence_are_not_read_as_part_of_it(spoilt: str) -> None:
    """The interpreter gives what is not finite a scale that is not, a GPU writes NaN in e4m3."""
    batch = Documents(((70, 70), (40, 40), (135, 135)), Mask(right=0), **WIDE)
    (q, k, v, grad), lengths, spec = batch.batched(batch.parts())
    forward = TritonForward("fp8-head", PERSISTENT)
    operands = forward.prepare(Inputs(q, k, v, lengths), spec)
    saved = Saved(operands.kept(), *forward.run(operands))
    whole = batch.split((q, q, *FUSED.run(saved, grad)))
    getattr(saved.operands, spoilt).data.view(torch.uint8)[:, :, 70:110] = 0x7F
    found = batch.split((q, q, *FUSED.run(saved, grad)))
    assert is_equal(found[0], whole[0])
    assert is_equal(found[2], whole[2])
    assert bool(found[1][2].isnan().any())


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("head_dim_v", [64, 80])
def test_queries_without_keys_give_zeros_for_any_values_in_their_slot(head_dim_v: int) -> None:
    """The kernel reads one block of a sequence that has none, with weights of 0."""
    batch = Documents(((70, 70), (30, 0)), Mask(), head_dim=64, head_dim_v=head_dim_v)
    (q, k, v, _), lengths, spec = batch.batched(batch.parts())
    forward = TritonForward("fp8", PERSISTENT)
    operands = forward.prepare(Inputs(q, k, v, lengths), spec)
    operands.native.given.v.view(torch.uint8)[..., 128:] = 0x7F  # NaN from the second slot on
    out, lse = batch.split(forward.run(operands)[:2])[1]
    assert torch.equal(out, torch.zeros_like(out))
    assert bool((lse == -torch.inf).all())


def test_no_scale_is_read_behind_those_of_the_last_tokens() -> None:
    """Where a last sequence without queries begins, nothing is the batch's any more."""
    q = torch.ones(1, 2, 70, 64).to(torch.float8_e4m3fn)
    scales = torch.tensor([3.0] * 140 + [torch.nan])
    tiled = maps.Tiled("q", TOKENS, (128, 128), (70, 70), whole=True)
    source = Source(q.shape, q.stride(), q.dtype, True, 64, wide=True, sequences=(2, tiled), scaled=(140, 70, 1))
    copies = copies_of([source])
    block = Block(copies.wanted)
    memory = block.memory(q.device)
    places = [None if part is None else Piece(memory, part) for part in block.parts]
    table = maps.tile_map(Lengths("packed", starts((70, 0)), starts((70, 0)), 70, 70), 1, tiled, q.device)
    (laid,) = lay_out(copies, [q], places, [None], [table], [scales[:-1].view(1, 2, 70, 1)], q.device)
    assert isinstance(laid.wide, Piece)
    wide = tensor_of(laid.wide)
    assert torch.equal(wide[:, :, :70], torch.full((1, 2, 70, 64), 3.0, dtype=torch.bfloat16))
    assert not wide[:, :, 70:256].count_nonzero()


@pytest.mark.usefixtures("hopper")
def test_programs_restore_the_table_of_tiles() -> None:
    """Programs take tiles from the table, and the next launch takes them again."""
    batch = Documents(((130, 130), (3, 3)), Mask(right=0), **WIDE)
    (q, k, v, _), lengths, spec = batch.batched(batch.parts())
    forward = TritonForward("fp8-head", PERSISTENT)
    operands = forward.prepare(Inputs(q, k, v, lengths), spec)
    first, again = forward.run(operands), forward.run(operands)
    assert is_equal(first[:2], again[:2])
    assert operands.native.tiles[0, :3].tolist() == [3, 0, 0]


def test_the_table_of_tiles_is_cached_until_the_lengths_change() -> None:
    cu = torch.tensor([0, 40, 40, 41, 41, 300], dtype=torch.int32)
    lengths, tiled = Lengths("packed", cu, cu, 259, 259), maps.Tiled("q", 64, (128, 128), (300, 300))
    table = maps.tile_map(lengths, 1, tiled, cu.device)
    assert maps.tile_map(Lengths("packed", cu, cu, 259, 259), 1, tiled, cu.device) is table
    other = cu.clone()
    assert maps.tile_map(Lengths("packed", cu, other, 259, 259), 1, tiled, cu.device) is not table
    cu[1] = 30
    changed = maps.tile_map(lengths, 1, tiled, cu.device)
    assert changed[1 : 1 + int(changed[0, 0]), 3].tolist().count(30) == 1
