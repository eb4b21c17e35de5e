"""Packed batches on a Hopper GPU: each sequence as it is alone, isolation, the kernels that ran, and times."""

from __future__ import annotations

import pytest
import torch
from packed import Documents, answers
from torch import Tensor

from attnbench import Mask, attention
from attnbench.backends.triton import TritonForward
from attnbench.backends.triton.backward.contract import KERNELS
from attnbench.backends.triton.forward.tiles import tile_of

DEVICE = "cuda"
END = "bottom-right"
WIDE, NARROW = KERNELS
UNEQUAL = ((1000, 1000), (0, 0), (1, 1), (300, 700), (0, 70), (128, 128), (900, 0), (700, 300), (257, 255))
MASKS = [Mask(), Mask(right=0), Mask(right=0, alignment=END), Mask(200, 50, END)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(
    ("name", "size", "size_v"),
    [
        ("fp8", 128, 128), ("fp8-head", 128, 128), ("fp8", 64, 64), ("fp8-token", 128, 128),
        ("fp8-head", 96, 72), ("fp8-head", 192, 128), ("fp8-head", 192, 192),
    ],
)  # fmt: skip
def test_each_sequence_has_the_result_that_it_has_alone(name: str, size: int, size_v: int, mask: Mask) -> None:
    """The forward with the same tile to the bit; the fused kernel adds dQ up in bf16 in any order.

    Its dK and dV may be sums of more shares, each of them in bf16, of one sequence than of several.  Of one length the
    sums in e4m3 have Hopper kernels, packed the plain ones, which round dS in other blocks.
    """
    batch = Documents(UNEQUAL, mask, heads=(8, 2), head_dim=size, head_dim_v=size_v, device=DEVICE)
    *_, spec = batch.batched(batch.parts())
    forward = TritonForward(name, tile_of(spec, (9, 0), per_key=name == "fp8-token"))
    for backward in (WIDE, NARROW):
        summed = 0.03 if backward is NARROW else 0.01
        for i, (found, alone) in enumerate(
            zip(answers(batch, forward, backward), batch.run_alone(forward, backward), strict=True)
        ):
            off = 0.0 if name != "fp8-token" else 0.06
            for which, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, alone, strict=True):
                hidden = y == -torch.inf
                assert torch.equal(x == -torch.inf, hidden), (which, i)
                x, y = (each.float().masked_fill(hidden, 0) for each in (x, y))
                most = max(off, {"dq": 0.03, "dk": summed, "dv": summed}.get(which, 0.0))
                assert bool((x - y).norm() <= most * y.norm() + most / 100), (which, i, backward.name)


def test_nonfinite_values_stay_in_their_sequence() -> None:
    lengths, wide = ((300, 300), (1, 1), (77, 77), (1000, 1000)), (128, 128)
    for name, heads, (size, size_v) in (
        ("fp8", (8, 2), wide), ("fp8-head", (8, 2), wide), ("fp8-head", (4, 4), wide), ("fp8-token", (8, 2), wide),
        ("fp8-head", (4, 4), (192, 128)), ("fp8-head", (4, 2), (192, 192)), ("fp8-head", (8, 2), (80, 96)),
    ):  # fmt: skip
        batch = Documents(lengths, Mask(right=0), heads=heads, head_dim=size, head_dim_v=size_v, device=DEVICE)
        forward, parts = TritonForward(name), batch.parts()
        whole = answers(batch, forward, WIDE)
        for x in parts[1] + parts[2]:
            x.fill_(torch.nan)
        spoilt = answers(batch, forward, WIDE, parts)
        for index in (0, 3):
            for x, y in zip(spoilt[index], whole[index], strict=True):
                assert bool(torch.isfinite(x).all())
                assert bool((x - y).float().norm() <= 0.02 * y.float().norm())


def test_packed_calls_do_not_synchronise_and_a_graph_replays_other_lengths() -> None:
    """A replay computes its tables from the current lengths."""
    cu = torch.tensor([0, 500, 1024], dtype=torch.int32, device=DEVICE)
    q, k, v = (torch.randn(1024, heads, 128, device=DEVICE, dtype=torch.bfloat16) for heads in (8, 2, 2))

    def call() -> Tensor:
        out = attention(q, k, v, layout="thd", cu_seqlens_q=cu, max_seqlen_q=1024, is_causal=True, backend="triton:fp8")
        assert isinstance(out, Tensor)
        return out

    compiled = torch.compile(call, fullgraph=True)
    assert torch.equal(compiled(), call())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
        compiled()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = call()
    cu.copy_(torch.tensor([0, 100, 1024], dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(recorded, call())
