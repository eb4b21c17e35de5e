"""The Hopper kernel of heads in two pieces on a CPU: FP64 on its operands, and who is served."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from backward_problems import check, make, rounded_to_e4m3, saved
from hopper_backward import on_cpu, sums_off
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnbench import AttentionSpec, Mask
from attnbench.kernels.contract import Saved, gradient_dtype
from attnbench.problem.fp8 import Recipe
from attnbench.problem.lengths_kind import LengthsKind
from examples import examples

pytest.importorskip("triton", minversion="3.6")

from attnbench.backends.triton.backward import launch
from attnbench.backends.triton.backward.contract import TritonBackward
from attnbench.backends.triton.backward.hopper.launch import pieces_of, serves
from attnbench.backends.triton.backward.operands import Prepared
from attnbench.backends.triton.backward.tiles import MLA, Tile
from attnbench.backends.triton.interpreter import interpreted

needs_interpreter = pytest.mark.skipif(not interpreted(), reason="the passes before the kernel run here")
HEAD = Recipe("head")
ALLOWED = 0.01  # as for the plain kernels with sums in bf16
TILE = Tile(32, 64, 4, 2)
TILES = MLA._replace(keys=TILE, queries=TILE, values=TILE)
KERNEL = TritonBackward("triton:fp8", narrow=False, declared_error=0.1, tiles=TILES)
RAN: list[tuple[str, int, int, int]] = []
_MODES = random.Random(0)


@pytest.fixture(scope="module", autouse=True)
def _on_cpu() -> Iterator[None]:
    """Emulates the Hopper kernels; ``RAN`` records them, which columns of Q, and how many of V, lay in pieces."""

    def ran(name: str, given: Prepared) -> None:
        RAN.append((name, given.layout.head_dim, given.layout.rest, given.layout.rest_v))

    with on_cpu(lambda: _MODES.random() < 0.5, ran):
        yield


def check_in_pieces(given_: Saved, grad_out: Tensor) -> None:
    RAN.clear()
    check(KERNEL, given_, grad_out, ALLOWED + sums_off(given_.spec))
    if given_.spec.head_dim <= 96:
        assert RAN == [("run_all", 64, 32, 32)]
    else:
        more = 64 if given_.spec.head_dim_v > 128 else 0
        assert [("run_all", 128, 64, more), ("run_values", 128, 64, more)] == RAN


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    """Up to two blocks long, of every mask and grouping."""
    kv_heads, seqlen_q = draw(st.integers(1, 2)), draw(st.integers(1, 150))
    side = st.one_of(st.none(), st.just(0), st.integers(0, 200))
    head_dim, head_dim_v = draw(
        st.sampled_from(
            [(192, 128), (192, 64), (161, 100), (192, 192), (170, 185), (96, 96), (80, 80), (65, 96), (96, 72)]
        )
    )
    return AttentionSpec.make(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        seqlen_kv=draw(st.one_of(st.just(seqlen_q), st.integers(1, 150))),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        mask=draw(st.builds(Mask, side, side, st.sampled_from(["top-left", "bottom-right"]))),
        direction="training",
    )


@needs_interpreter
@settings(
    max_examples=examples(6, 80), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target]
)
@given(spec=specs(), granularity=st.sampled_from(["head", "tensor"]), seed=st.integers(0, 2**31))
def test_any_small_problem_agrees_with_fp64_on_its_operands(spec: AttentionSpec, granularity: str, seed: int) -> None:
    generator, dtype = torch.Generator().manual_seed(seed), gradient_dtype(spec)
    by_query, by_key = (spec.heads, spec.seqlen_q), (spec.kv_heads, spec.seqlen_kv)
    sizes = [(*by_query, spec.head_dim), (*by_key, spec.head_dim), (*by_key, spec.head_dim_v)]
    q, k, v, grad_out = (
        torch.randn(spec.batch, *size, generator=generator).to(dtype) for size in (*sizes, (*by_query, spec.head_dim_v))
    )
    check_in_pieces(saved(spec, q, k, v, (Recipe(granularity),) * 3), rounded_to_e4m3(grad_out))


@needs_interpreter
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (192, 192), (96, 96)])
@pytest.mark.parametrize(
    ("length", "shares"), [pytest.param(64, 4, id="dQ in sums"), pytest.param(128, 2, id="dQ in place")]
)
def test_shares_of_a_group_and_dq_in_place(
    length: int, shares: int, head_dim: int, head_dim_v: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "shares_of", lambda layout, block: shares)
    sizes = {"heads": 4, "kv_heads": 1, "head_dim": head_dim, "head_dim_v": head_dim_v}
    spec, (q, k, v, grad_out) = make(length, 70, mask=Mask(right=20), **sizes)
    check_in_pieces(saved(spec, q, k, v, (HEAD,) * 3), grad_out)


def spec_of(**more: Any) -> AttentionSpec:
    return AttentionSpec.make(**{"batch": 1, "heads": 2, "seqlen_q": 64, "direction": "training", **more})


MLA_SIZES = {"head_dim": 192, "head_dim_v": 128}


@pytest.mark.parametrize(
    ("more", "served"),
    [
        (MLA_SIZES, True),
        ({**MLA_SIZES, "head_dim": 161}, True),
        ({**MLA_SIZES, "head_dim": 160}, False),  # 128 and 32
        ({**MLA_SIZES, "head_dim_v": 192}, True),
        ({**MLA_SIZES, "head_dim_v": 160}, False),
        ({"head_dim": 128, "head_dim_v": 192}, False),
        ({**MLA_SIZES, "softcap": 20.0}, False),
        ({**MLA_SIZES, "scale": -0.1}, False),
        ({**MLA_SIZES, "lengths": LengthsKind(batch="padded")}, True),
    ],
    ids=str,
)
def test_which_problems_of_wide_heads_are_served(more: dict[str, Any], served: bool) -> None:
    assert serves(spec_of(**more), per_token=False, rotated=False) == served
    assert not serves(spec_of(**more), per_token=False, rotated=True)
    assert not serves(spec_of(**more), per_token=True, rotated=False)


@pytest.mark.parametrize(
    ("more", "pieces"),
    [
        ({"head_dim": 96}, (64, 32)),
        ({"head_dim": 65}, (64, 32)),
        ({"head_dim": 64}, None),
        ({"head_dim": 97}, None),
        ({"head_dim": 96, "head_dim_v": 64}, None),
        ({"head_dim": 96, "lengths": LengthsKind(batch="padded")}, (64, 32)),
        ({"head_dim": 192}, (128, 64)),
        ({"head_dim": 161, "head_dim_v": 192}, (128, 64)),
        ({"head_dim": 160}, None),
        (MLA_SIZES, None),  # of Q and K alone
    ],
    ids=str,
)
def test_which_heads_lie_in_pieces(more: dict[str, Any], pieces: tuple[int, int] | None) -> None:
    assert pieces_of(spec_of(**more), rotated=False) == pieces
    assert pieces_of(spec_of(**more), rotated=True) is None
