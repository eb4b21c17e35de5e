"""Programs that share the query heads of a key head: their gradients sum to the whole group's."""

from __future__ import annotations

import pytest
import torch
from backward_problems import check, make, saved
from packed import Documents, answers

from attnbench import AttentionSpec, Mask
from attnbench.problem.fp8 import Recipe

pytest.importorskip("triton", minversion="3.6")
from attnbench.backends.triton.interpreter import interpreted

if not interpreted():
    pytest.skip("kernels are compiled here", allow_module_level=True)

from hopper_backward import on_cpu

from attnbench.backends.triton import TritonForward
from attnbench.backends.triton.backward import launch, shares
from attnbench.backends.triton.backward.contract import KERNELS, TritonBackward
from attnbench.backends.triton.backward.hopper import launch as hopper_launch
from attnbench.backends.triton.backward.tiles import Ring, Tile, Tiles

HEAD = Recipe("head")
RING = Tile(64, 64, 4, 2, Ring(64, 2))
FUSED = TritonBackward("triton:fp8", narrow=False, declared_error=0.1, tiles=Tiles(RING, RING, fused=True))
PLAIN, E4M3_SUMS = (
    TritonBackward(each.name, narrow=each.narrow, declared_error=each.declared_error, tiles=Tiles(tile, tile))
    for each, tile in zip(KERNELS, (Tile(32, 32, 4, 2), Tile(32, 64, 4, 2)), strict=True)
)
ALLOWED = {FUSED: 0.02, PLAIN: 0.01, E4M3_SUMS: 0.1}


@pytest.fixture(params=[2, 3])
def share(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many shares of each group; launches that were made before have another number."""
    for module in (launch, hopper_launch):
        monkeypatch.setattr(module, "shares_of", lambda spec, programs: request.param)
    for kept in (hopper_launch._all, launch._for_keys_plain):
        kept.cache_clear()
    yield request.param
    for kept in (hopper_launch._all, launch._for_keys_plain):
        kept.cache_clear()


@pytest.mark.parametrize("kernel", ALLOWED, ids=["fused", "plain", "e4m3 sums"])
def test_gradients_of_shares_sum_to_those_of_the_group(kernel: TritonBackward, share: int) -> None:
    """Each head of another magnitude, so that none is left out or counted twice unnoticed."""
    spec, (q, k, v, grad) = make(90, 150, batch=2, heads=12, kv_heads=2, head_dim=64, mask=Mask(right=70))
    q = q * (2.0 ** (torch.arange(12) % 4 - 2))[:, None, None].to(q.dtype)
    grad = grad * (2.0 ** (torch.arange(12) % 5 - 2))[:, None, None].to(grad.dtype)
    with on_cpu(lambda: False):
        check(kernel, saved(spec, q, k, v, (HEAD,) * 3), grad, ALLOWED[kernel])


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("kernel", [FUSED, PLAIN], ids=["fused", "plain"])
def test_gradients_of_shares_in_sequences_of_unequal_length(
    kernel: TritonBackward, share: int, padding: str | None
) -> None:
    batch = Documents(
        ((70, 70), (0, 30), (130, 130)), Mask(right=0), heads=(12, 2), head_dim=64, head_dim_v=64, padding=padding
    )
    forward = TritonForward("fp8-head")
    with on_cpu(lambda: False):
        found, alone = answers(batch, forward, kernel), batch.run_alone(forward, kernel)
    for one, other in zip(found, alone, strict=True):
        for x, y in zip(one[2:], other[2:], strict=True):
            assert (x - y).float().norm() <= 0.01 * y.float().norm()


def spec_of(heads: int, kv_heads: int, seqlen: int, mask: Mask) -> AttentionSpec:
    return AttentionSpec.make(
        batch=1, heads=heads, kv_heads=kv_heads, seqlen_q=seqlen, head_dim=128, mask=mask, direction="training"
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "seqlen", "mask", "programs", "expected"),
    [
        (32, 8, 16384, Mask(right=0), 1024, 1),  # enough programs as it is
        (8, 1, 8192, Mask(right=0), 64, 8),
        (8, 1, 8192, Mask(), 64, 4),
        (12, 2, 8192, Mask(right=0), 200, 3),  # a divisor of the group
        (4, 1, 1024, Mask(right=0), 8, 1),  # too little to do
        (4, 1, 2048, Mask(right=0), 16, 2),
        (16, 16, 1024, Mask(right=0), 128, 1),  # nothing to share
    ],
)
def test_a_group_is_shared_where_programs_are_few_and_long(
    heads: int, kv_heads: int, seqlen: int, mask: Mask, programs: int, expected: int
) -> None:
    assert shares.shares_of(spec_of(heads, kv_heads, seqlen, mask), programs) == expected
