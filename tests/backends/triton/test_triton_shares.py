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

import triton
import triton.language as tl
from hopper_backward import on_cpu

from attnbench.backends.triton import TritonForward
from attnbench.backends.triton.backward import launch, place
from attnbench.backends.triton.backward.contract import KERNELS, TritonBackward
from attnbench.backends.triton.backward.operands import Layout
from attnbench.backends.triton.backward.shares import shares_of
from attnbench.backends.triton.backward.tiles import Ring, Tile, Tiles

HEAD = Recipe("head")
RING = Tile(64, 64, 4, 2, Ring(64, 2))
FUSED = TritonBackward("triton:fp8", narrow=False, declared_error=0.1, tiles=Tiles(RING, RING, fused=True))
PLAIN, E4M3_SUMS = (
    TritonBackward(each.name, narrow=each.narrow, declared_error=each.declared_error, tiles=Tiles(tile, tile))
    for each, tile in zip(KERNELS, (Tile(32, 32, 4, 2), Tile(32, 64, 4, 2)), strict=True)
)
_HEADS = {2: 12, 3: 12, 4: 14, 6: 12}  # of two groups, by the number of shares: 4 of 7 query heads are 2, 2, 2 and 1
ALLOWED = {FUSED: 0.02, PLAIN: 0.01, E4M3_SUMS: 0.1}


@pytest.fixture(params=[2, 3, 4, 6])
def share(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many shares of each group."""
    monkeypatch.setattr(launch, "shares_of", lambda layout, block: request.param)
    return request.param


@pytest.mark.parametrize("kernel", ALLOWED, ids=["fused", "plain", "e4m3 sums"])
def test_gradients_of_shares_sum_to_those_of_the_group(kernel: TritonBackward, share: int) -> None:
    """Each head of another magnitude, so that none is left out or counted twice unnoticed."""
    heads = _HEADS[share]
    spec, (q, k, v, grad) = make(90, 150, batch=2, heads=heads, kv_heads=2, head_dim=64, mask=Mask(right=70))
    q = q * (2.0 ** (torch.arange(heads) % 4 - 2))[:, None, None].to(q.dtype)
    grad = grad * (2.0 ** (torch.arange(heads) % 5 - 2))[:, None, None].to(grad.dtype)
    with on_cpu(lambda: False):
        check(kernel, saved(spec, q, k, v, (HEAD,) * 3), grad, ALLOWED[kernel])


@pytest.mark.parametrize("share", [3, 4], indirect=True)
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("kernel", [FUSED, PLAIN], ids=["fused", "plain"])
def test_gradients_of_shares_in_sequences_of_unequal_length(
    kernel: TritonBackward, share: int, padding: str | None
) -> None:
    heads = _HEADS[share], 2
    batch = Documents(
        ((20, 20), (0, 30), (70, 70)), Mask(right=0), heads=heads, head_dim=64, head_dim_v=64, padding=padding
    )
    forward = TritonForward("fp8-head")
    with on_cpu(lambda: False):
        found, alone = answers(batch, forward, kernel), batch.run_alone(forward, kernel)
    for one, other in zip(found, alone, strict=True):
        for x, y in zip(one[2:], other[2:], strict=True):
            assert (x - y).float().norm() <= 0.01 * y.float().norm()


CAUSAL = Mask(right=0)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "seqlen", "mask", "expected"),
    [  # the fewest of nearly the shortest time that an H200 took, but for the last four
        (1, 16, 1, 8192, CAUSAL, 4),  # 64 programs, whose mean takes half as long as the longest
        (2, 16, 1, 8192, CAUSAL, 2),
        (1, 32, 2, 8192, CAUSAL, 2),
        (2, 32, 2, 8192, CAUSAL, 1),  # 256 programs: while the longest runs, another has two short ones
        (2, 32, 2, 8192, Mask(), 1),
        (1, 32, 2, 8192, Mask(), 1),  # 128 programs of the same time
        (1, 14, 2, 8192, CAUSAL, 2),  # of 4 and 3 query heads
        (8, 71, 1, 2048, CAUSAL, 2),  # of 36 and 35: the mean takes half as long as the longest
        (2, 24, 2, 8192, Mask(left=4095, right=0), 2),
        (1, 512, 4, 8448, Mask(), 3),  # more would be faster, but 264 programs are split into 1,024 at most
        (1, 8, 8, 8192, CAUSAL, 1),  # nothing to share
        (1, 4, 1, 128, CAUSAL, 1),  # the sums would take longer than they save
        (64, 32, 8, 8192, CAUSAL, 1),
    ],
)
def test_a_group_is_shared_where_the_longest_program_would_be_waited_for(
    batch: int, heads: int, kv_heads: int, seqlen: int, mask: Mask, expected: int
) -> None:
    spec = AttentionSpec.make(
        batch=batch, heads=heads, kv_heads=kv_heads, seqlen_q=seqlen, head_dim=128, mask=mask, direction="training"
    )
    one = (1, 1, 1, 1), (0, 0, 0, 0)
    assert shares_of(Layout(spec, False, True, (one,) * 3), 128) == expected


@pytest.mark.parametrize(("blocks", "heads"), [(64, 5), (1, 3), (200, 2), (48, 7)])
def test_the_order_of_programs_is_the_kernels(blocks: int, heads: int) -> None:
    found = torch.full((blocks * heads,), -1, dtype=torch.int32)
    _blocks_in_order[blocks, heads](found)
    assert found.tolist() == list(place.in_order(blocks, heads))


@triton.jit
def _blocks_in_order(out):
    block, _ = place.block_and_head()
    tl.store(out + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), block)
