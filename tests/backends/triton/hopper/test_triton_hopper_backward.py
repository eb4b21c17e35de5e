"""The backward's Hopper kernels without a GPU: emulated and compared with FP64, and the specs that they serve.

The emulator runs the very functions that Gluon compiles; what it leaves out, layouts and the pipelines of matrix
products, is asked of the compiler in test_triton_hopper_backward_compiled.py and of a GPU in tests/gpu.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from backward_problems import LONG, check, make, rounded_to_e4m3, saved
from gluon_partitions import DeadlockError
from hopper_backward import ROUNDED, on_cpu, sums_off
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnbench import AttentionSpec, Mask
from attnbench.kernels.contract import Saved, gradient_dtype
from attnbench.problem.fp8 import Recipe
from examples import every_pair, examples

pytest.importorskip("triton", minversion="3.6")

from attnbench.backends.triton import interpreter
from attnbench.backends.triton.backward.contract import TritonBackward
from attnbench.backends.triton.backward.hopper import launch as hopper
from attnbench.backends.triton.backward.tiles import TILES, Ring, Tile, Tiles

HEAD = Recipe("head")
ALLOWED = {False: 0.01, True: 0.06}  # by whether the sums are e4m3, as for the plain kernels
SAME = 0.005  # of the plain kernels' answers in e4m3, where a rounding may fall the other way
needs_interpreter = pytest.mark.skipif(not interpreter.interpreted(), reason="the passes before the kernels run here")


LAUNCHED: list[str] = []
_MODES = random.Random(0)


@pytest.fixture(scope="module", autouse=True)
def _on_cpu() -> Iterator[None]:
    """Emulates the Hopper kernels; ``LAUNCHED`` records which were launched."""
    with on_cpu(lambda: _MODES.random() < 0.5, lambda name, given: LAUNCHED.append(name)):
        yield


def kernel(
    keys: Ring | None = Ring(64, 4),  # noqa: B008
    queries: Ring | None = Ring(64, 4),  # noqa: B008
    narrow: bool = False,
    fused: bool = False,
) -> TritonBackward:
    tiles = Tiles(Tile(64, 64, 4, 2, keys), Tile(64, 64, 4, 2, queries), fused)
    return TritonBackward("triton:fp8", narrow=narrow, declared_error=0.1, tiles=tiles)


def check_on_hopper(given_: Saved, grad_out: Tensor, by: TritonBackward | None = None) -> None:
    by = by or kernel()
    assert by.tiles is not None
    LAUNCHED.clear()
    check(by, given_, grad_out, ALLOWED[by.narrow] + (sums_off(given_.spec) if by.tiles.fused else 0.0))
    rings = {"run_keys": by.tiles.keys.hopper, "run_queries": by.tiles.queries.hopper}
    assert (["run_all"] if by.tiles.fused else [name for name, ring in rings.items() if ring]) == LAUNCHED


def check_against_plain(given_: Saved, grad_out: Tensor, by: TritonBackward) -> None:
    """In e4m3, where what FP64 allows hides half a rounding."""
    plain = kernel(None, None, narrow=True).run(given_, grad_out)
    for x, wanted in zip(by.run(given_, grad_out), plain, strict=True):
        assert (x.float() - wanted.float()).norm() <= SAME * wanted.float().norm() + 1e-6


WAYS: dict[str, dict[str, bool]] = {"bf16 sums": {}, "e4m3 sums": {"narrow": True}, "fused": {"fused": True}}
any_way = pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    """Up to three blocks long, of every mask, grouping and head dimension that the kernels serve."""
    kv_heads, seqlen_q = draw(st.integers(1, 2)), draw(st.integers(1, 200))
    side = st.one_of(st.none(), st.just(0), st.integers(0, 200))
    return AttentionSpec.make(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        seqlen_kv=draw(st.one_of(st.just(seqlen_q), st.integers(1, 200))),
        head_dim=draw(st.sampled_from([64, 128, 40, 100])),
        head_dim_v=draw(st.sampled_from([64, 128, 33])),
        dtype=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        mask=draw(st.builds(Mask, side, side, st.sampled_from(["top-left", "bottom-right"]))),
        direction="training",
    )


@needs_interpreter
@settings(
    max_examples=examples(6, 60), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target]
)
@given(
    spec=specs(),
    recipe=st.builds(Recipe, st.sampled_from(["head", "tensor"]), rotation=st.sampled_from(["none", "hadamard"])),
    how=st.sampled_from(list(WAYS.values())),
    more=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_any_small_problem_agrees_with_fp64_on_its_operands(
    spec: AttentionSpec, recipe: Recipe, how: dict[str, bool], more: int, seed: int
) -> None:
    generator, dtype = torch.Generator().manual_seed(seed), gradient_dtype(spec)
    by_query, by_key = (spec.heads, spec.seqlen_q), (spec.kv_heads, spec.seqlen_kv)
    sizes = [
        (*by_query, spec.head_dim),
        (*by_key, spec.head_dim),
        (*by_key, spec.head_dim_v),
        (*by_query, spec.head_dim_v),
    ]
    q, k, v, grad_out = (torch.randn(spec.batch, *size, generator=generator).to(dtype) for size in sizes)
    given_ = saved(spec, q, k, v, (recipe,) * 3)
    least = (4, 4) if how.get("narrow") else (2, 3)
    rings = (Ring(64, stages + more) for stages in least)
    check_on_hopper(given_, rounded_to_e4m3(grad_out), kernel(*rings, **how))


@needs_interpreter
@pytest.mark.parametrize(("problem", "way"), every_pair(LONG, list(WAYS)))
def test_blocks_are_skipped_and_masked_as_the_mask_requires(problem: tuple[int, int, Mask], way: str) -> None:
    (seqlen_q, seqlen_kv, mask), how = problem, WAYS[way]
    spec, (q, k, v, grad_out) = make(seqlen_q, seqlen_kv, mask=mask, head_dim=64)
    given_ = saved(spec, q, k, v, (HEAD,) * 3)
    check_on_hopper(given_, grad_out, kernel(**how))
    if how.get("narrow"):
        check_against_plain(given_, grad_out, kernel(narrow=True))


@needs_interpreter
@pytest.mark.parametrize("fused", [False, True])
def test_padding_keys_have_no_effect_when_all_scores_are_very_negative(fused: bool) -> None:
    """Theirs are 0, and so far above the log-sum-exp that fp32 has no such P."""
    spec, (q, k, v, grad_out) = make(90, 70, head_dim=64)
    q, k = q / 8 + 4, k / 8 - 4
    given_ = saved(spec, q, k, v, (HEAD,) * 3)
    assert given_.lse is not None
    assert given_.lse.max() < -100
    check_on_hopper(given_, grad_out, kernel(fused=fused))


@needs_interpreter
@any_way
def test_each_head_of_a_group_has_its_own_scale(how: dict[str, bool]) -> None:
    spec, (q, k, v, grad_out) = make(90, 70, heads=3, head_dim=64)
    q = q * torch.tensor([1.0, 30.0, 0.01])[:, None, None].to(q.dtype)
    check_on_hopper(saved(spec, q, k, v, (HEAD,) * 3), grad_out, kernel(**how))


def _deterministic(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)


def _many_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hopper, "MOST_SUMMED", 89)


def _without_additions_by_tma(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("triton._C.libtriton.gluon_ir.GluonOpBuilder", object)


@needs_interpreter
@pytest.mark.parametrize("change", [None, _deterministic, _many_keys, _without_additions_by_tma])
def test_dq_is_summed_in_memory_only_where_that_is_supported_and_accurate(
    change: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, (q, k, v, grad_out) = make(70, 90, head_dim=64)
    if change is not None:
        change(monkeypatch)
    hopper.adds.cache_clear()
    LAUNCHED.clear()
    check(kernel(fused=True), saved(spec, q, k, v, (HEAD,) * 3), grad_out, ALLOWED[False] + sums_off(spec))
    hopper.adds.cache_clear()
    assert (["run_all"] if change is None else ["run_keys", "run_queries"]) == LAUNCHED


@needs_interpreter
def test_rounding_errors_of_dq_sums_grow_like_a_random_walk() -> None:
    """The two kernels sum in FP32, and round dS once; here P and its factor are rounded before.

    Half the bound is what sums that are random themselves leave.  All scales are powers of two.
    """
    off = []
    for seqlen_kv in (128, 512, 4096):
        spec, (q, k, v, grad_out) = make(64, seqlen_kv, heads=1, kv_heads=1, head_dim=64, dtype="fp32")
        k, v = (x.float() * (3.5 / x.abs().amax().float()) for x in (k, v))
        given_ = saved(spec, q, k, v, (HEAD,) * 3)
        dq, wanted = (kernel(fused=fused).run(given_, grad_out)[0].double() for fused in (True, False))
        off.append(float((dq - wanted).norm() / wanted.norm()) / math.hypot(sums_off(spec), ROUNDED, ROUNDED))
    assert min(off) >= 0.4
    assert max(off) <= 1


@needs_interpreter
@any_way
def test_each_block_of_queries_has_its_own_descale(how: dict[str, bool]) -> None:
    """Powers of two, so that the gradient of the output stays exact."""
    spec, (q, k, v, grad_out) = make(270, 70, head_dim=64)
    larger = 2.0 ** (torch.arange(270) // 128 * 3)[:, None]
    given_, grad_out = saved(spec, q, k, v, (HEAD,) * 3), (grad_out * larger).to(q.dtype)
    check_on_hopper(given_, grad_out, kernel(**how))
    if how.get("narrow"):
        check_against_plain(given_, grad_out, kernel(narrow=True))


@needs_interpreter
@pytest.mark.parametrize("rings", [(Ring(64, 4), None), (None, Ring(64, 4))], ids=["keys", "queries"])
def test_hopper_and_plain_kernels_can_be_combined(rings: tuple[Ring | None, Ring | None]) -> None:
    """In e4m3 each reads transposed copies in its own order."""
    spec, (q, k, v, grad_out) = make(70, 150, head_dim=64)
    check_on_hopper(saved(spec, q, k, v, (HEAD,) * 3), grad_out, kernel(*rings, narrow=True))


@needs_interpreter
def test_blocks_of_128_agree_with_fp64() -> None:
    spec, (q, k, v, grad_out) = make(200, 300, mask=Mask(left=150, right=0, alignment="bottom-right"), head_dim=64)
    check_on_hopper(saved(spec, q, k, v, (HEAD,) * 3), grad_out, kernel(Ring(128, 2), Ring(128, 3)))


@needs_interpreter
@any_way
def test_uninitialised_memory_does_not_affect_the_gradients(
    how: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums begin at zero and padding is zero, even in reused memory."""
    spec, (q, k, v, grad_out) = make(70, 90, head_dim=64, head_dim_v=40)
    given_, empty = saved(spec, q, k, v, (HEAD,) * 3), torch.empty

    def used(*args: Any, **more: Any) -> Tensor:
        x = empty(*args, **more)
        if x.is_floating_point() and x.ndim:
            x.view(torch.uint8).fill_(0xFF)  # no number in any type
        return x

    monkeypatch.setattr(torch, "empty", used)
    check_on_hopper(given_, grad_out, kernel(**how))


@needs_interpreter
def test_a_deadlock_between_partitions_is_detected() -> None:
    """Three blocks of keys are in use at a time, more than two stages hold."""
    spec, (q, k, v, grad_out) = make(70, 400, head_dim=64)
    with pytest.raises(DeadlockError):
        kernel(queries=Ring(64, 2)).run(saved(spec, q, k, v, (HEAD,) * 3), grad_out)


@needs_interpreter
@pytest.mark.parametrize(
    ("more", "recipes", "narrow"),
    [
        ({}, (Recipe("token"), HEAD, HEAD), False),
        ({}, (HEAD, Recipe("token"), HEAD), False),
        ({}, (HEAD, HEAD, Recipe("block")), False),
        ({}, (Recipe("token"), HEAD, HEAD), True),
        ({"softcap": 3.0}, (HEAD,) * 3, False),
        ({"scale": -0.1}, (HEAD,) * 3, False),
        ({"head_dim": 32}, (HEAD,) * 3, False),
        ({"head_dim_v": 32}, (HEAD,) * 3, False),
    ],
)
def test_the_plain_kernels_serve_what_the_hopper_kernels_do_not(
    more: dict[str, Any], recipes: tuple[Recipe, ...], narrow: bool
) -> None:
    spec, (q, k, v, grad_out) = make(20, 30, **{"head_dim": 64, **more})
    LAUNCHED.clear()
    check(kernel(narrow=narrow), saved(spec, q, k, v, recipes), grad_out, ALLOWED[narrow])
    assert not LAUNCHED


def test_every_committed_ring_has_enough_stages_for_its_blocks() -> None:
    """With fewer stages its partitions deadlock."""
    for key, tiles in TILES.items():
        for tile, stages in ((tiles.keys, 2), (tiles.queries, 3)):
            if tile.hopper is not None:
                assert tile.hopper.stages >= stages
                assert tile.hopper.block * tile.hopper.stages >= (256 if key.narrow else 128)
                assert tile.hopper.block in (64, 128)
