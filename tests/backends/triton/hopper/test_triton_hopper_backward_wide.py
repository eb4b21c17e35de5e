"""The Hopper kernel of heads wider than 128 on a CPU, with dV by the plain kernel: FP64, and who is served."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from backward_problems import check, make, rounded_to_e4m3, saved
from hopper_backward import on_cpu, sums_off
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from attnbench import AttentionSpec, Mask
from attnbench.kernels.contract import gradient_dtype
from attnbench.problem.fp8 import Recipe
from examples import examples

pytest.importorskip("triton", minversion="3.6")

from attnbench.backends.triton.backward import launch
from attnbench.backends.triton.backward.contract import TritonBackward
from attnbench.backends.triton.backward.hopper.launch import serves
from attnbench.backends.triton.backward.tiles import MLA, Tile
from attnbench.backends.triton.interpreter import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="the passes before the kernel run here")
HEAD = Recipe("head")
ALLOWED = 0.01  # as for the plain kernels with sums in bf16
TILE = Tile(32, 64, 4, 2)
KERNEL = TritonBackward(
    "triton:fp8", narrow=False, declared_error=0.1, tiles=MLA._replace(keys=TILE, queries=TILE, values=TILE)
)
LAUNCHED: list[str] = []
_MODES = random.Random(0)


@pytest.fixture(scope="module", autouse=True)
def _on_cpu() -> Iterator[None]:
    """Emulates the Hopper kernels; ``LAUNCHED`` records which were launched."""
    with on_cpu(lambda: _MODES.random() < 0.5, lambda name, given: LAUNCHED.append(name)):
        yield


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    """Up to two blocks long, of every mask and grouping."""
    kv_heads, seqlen_q = draw(st.integers(1, 2)), draw(st.integers(1, 150))
    side = st.one_of(st.none(), st.just(0), st.integers(0, 200))
    return AttentionSpec.make(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        seqlen_kv=draw(st.one_of(st.just(seqlen_q), st.integers(1, 150))),
        head_dim=draw(st.sampled_from([192, 161])),
        head_dim_v=draw(st.sampled_from([128, 64, 100])),
        dtype=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        mask=draw(st.builds(Mask, side, side, st.sampled_from(["top-left", "bottom-right"]))),
        direction="training",
    )


@settings(
    max_examples=examples(4, 40), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target]
)
@given(spec=specs(), granularity=st.sampled_from(["head", "tensor"]), seed=st.integers(0, 2**31))
def test_any_small_problem_agrees_with_fp64_on_its_operands(spec: AttentionSpec, granularity: str, seed: int) -> None:
    generator, dtype = torch.Generator().manual_seed(seed), gradient_dtype(spec)
    by_query, by_key = (spec.heads, spec.seqlen_q), (spec.kv_heads, spec.seqlen_kv)
    sizes = [(*by_query, spec.head_dim), (*by_key, spec.head_dim), (*by_key, spec.head_dim_v)]
    q, k, v, grad_out = (
        torch.randn(spec.batch, *size, generator=generator).to(dtype) for size in (*sizes, (*by_query, spec.head_dim_v))
    )
    LAUNCHED.clear()
    check(KERNEL, saved(spec, q, k, v, (Recipe(granularity),) * 3), rounded_to_e4m3(grad_out), ALLOWED + sums_off(spec))
    assert LAUNCHED == ["run_all"]


@pytest.mark.parametrize("length", [pytest.param(64, id="dQ in sums"), pytest.param(128, id="dQ in place")])
def test_shares_of_a_group_and_dq_in_place(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "shares_of", lambda layout, block: 2)
    spec, (q, k, v, grad_out) = make(length, 70, heads=4, kv_heads=1, head_dim=192, head_dim_v=128, mask=Mask(right=20))
    LAUNCHED.clear()
    check(KERNEL, saved(spec, q, k, v, (HEAD,) * 3), grad_out, ALLOWED + sums_off(spec))
    assert LAUNCHED == ["run_all"]


@pytest.mark.parametrize(
    "how",
    [
        {"head_dim": 160},  # its pieces are 128 and 32
        {"head_dim_v": 192},
        {"softcap": 20.0},
        {"scale": -0.1},
        {"rotated": True},
        {"per_token": True},
    ],
    ids=str,
)
def test_other_problems_are_left_to_the_plain_kernels(how: dict[str, float]) -> None:
    more = {"head_dim": 192, "head_dim_v": 128, **how}
    scales = {name: bool(more.pop(name, False)) for name in ("per_token", "rotated")}
    plain = {"per_token": False, "rotated": False}
    make_spec = lambda fields: AttentionSpec.make(batch=1, heads=2, seqlen_q=64, direction="training", **fields)  # noqa: E731
    assert serves(make_spec({"head_dim": 192, "head_dim_v": 128}), **plain)
    assert not serves(make_spec(more), **scales)
