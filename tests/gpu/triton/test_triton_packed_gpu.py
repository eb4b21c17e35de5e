"""Packed batches on a Hopper GPU: each sequence as it is alone, isolation, the kernels that ran, and times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from packed import Documents, answers
from torch import Tensor

from attnbench import AttentionSpec, Mask, attention
from attnbench.backends.triton import TritonForward
from attnbench.backends.triton.backward.contract import KERNELS
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.kernels.devices import describe
from attnbench.kernels.plan import Plan
from attnbench.kernels.registry import registry
from attnbench.problem.lengths import Lengths
from attnbench.problem.lengths_kind import LengthsKind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
]
DEVICE = "cuda"
END = "bottom-right"
WIDE, NARROW = KERNELS
PEERS = ("fa3:bf16>fa4:bf16", "fa4:bf16>fa4:bf16", "cudnn:bf16>cudnn:bf16")
UNEQUAL = ((1000, 1000), (0, 0), (1, 1), (300, 700), (0, 70), (128, 128), (900, 0), (700, 300), (257, 255))
MASKS = [Mask(), Mask(right=0), Mask(right=0, alignment=END), Mask(200, 50, END)]
# Of a lognormal distribution with mean 4,096 and sigma 1, cut to 64k tokens together.
LOGNORMAL = (13718, 9466, 7404, 6070, 5095, 4330, 3704, 3176, 2718, 2314, 1950, 1616, 1302, 1002, 706, 395, 570)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("name", "size"), [("fp8", 128), ("fp8-head", 128), ("fp8", 64), ("fp8-token", 128)], ids=str)
def test_each_sequence_is_what_it_is_alone(name: str, size: int, mask: Mask) -> None:
    """The forward and the fused kernel's dK and dV to the bit; dQ is added up in bf16 in any order.

    Of one length the sums in e4m3 have Hopper kernels, packed the plain ones, which round dS in other blocks.
    """
    batch = Documents(UNEQUAL, mask, heads=(8, 2), head_dim=size, head_dim_v=size, device=DEVICE)
    forward = TritonForward(name)
    for backward in (WIDE, NARROW):
        for i, (found, alone) in enumerate(
            zip(answers(batch, forward, backward), batch.alone(forward, backward), strict=True)
        ):
            off = 0.0 if name != "fp8-token" else 0.06
            for which, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, alone, strict=True):
                hidden = y == -torch.inf
                assert torch.equal(x == -torch.inf, hidden), (which, i)
                x, y = (each.float().masked_fill(hidden, 0) for each in (x, y))
                most = max(off, 0.03) if which == "dq" or (backward is NARROW and which in ("dk", "dv")) else off
                assert bool((x - y).norm() <= most * y.norm() + most / 100), (which, i, backward.name)


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    lengths, sizes = ((300, 300), (1, 1), (77, 77), (1000, 1000)), {"head_dim": 128, "head_dim_v": 128}
    for name, heads in (("fp8", (8, 2)), ("fp8-head", (8, 2)), ("fp8-head", (4, 4)), ("fp8-token", (8, 2))):
        batch = Documents(lengths, Mask(right=0), heads=heads, device=DEVICE, **sizes)
        forward, parts = TritonForward(name), batch.parts()
        whole = answers(batch, forward, WIDE)
        for x in parts[1] + parts[2]:
            x.fill_(torch.nan)
        spoilt = answers(batch, forward, WIDE, parts)
        for index in (0, 3):
            for x, y in zip(spoilt[index], whole[index], strict=True):
                assert bool(torch.isfinite(x).all())
                assert bool((x - y).float().norm() <= 0.02 * y.float().norm())


def test_nothing_waits_for_the_device_and_a_graph_replays_other_lengths() -> None:
    """A replay computes its tables of the lengths that are there then."""
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


def _packed(
    lengths: tuple[int, ...], heads: tuple[int, int], longest: int
) -> tuple[list[Tensor], Lengths, AttentionSpec]:
    total = sum(lengths)
    cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    parts = [torch.randn(total, h, 128, device=DEVICE).bfloat16().transpose(0, 1)[None] for h in (*heads, heads[1])]
    kind = LengthsKind(batch="packed", square=True, total_q=total, total_kv=total)
    spec = AttentionSpec.make(
        batch=len(lengths), heads=heads[0], kv_heads=heads[1], seqlen_q=longest, head_dim=128, mask=Mask(right=0),
        direction="training", lengths=kind,
    )  # fmt: skip
    return parts, Lengths("packed", cu, cu, longest, longest), spec


def _step(
    forward: ForwardKernel, backward: BackwardKernel, inputs: Inputs, spec: AttentionSpec, grad_out: Tensor
) -> dict[str, Callable[[], object]]:
    """A forward with preparing, the kernel alone, and both passes."""
    operands = forward.prepare(inputs, spec)

    def both() -> object:
        made = forward.prepare(inputs, spec)
        result = forward.run(made)
        return backward.run(Saved(made.kept(), result.out, result.lse, result.state), grad_out)

    return {
        "kernel": lambda: forward.run(operands),
        "forward": lambda: forward.run(forward.prepare(inputs, spec)),
        "both": both,
    }


@pytest.mark.parametrize("heads", [(16, 16), (16, 4)], ids=str)
def test_times_beside_dense_and_the_best_of_16_bits(heads: tuple[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    """64k tokens, D = 128, causal: 16 times 4k packed and dense; lognormal lengths beside all that serve in 16 bits."""
    equal, length = (4096,) * 16, 4096
    calls: dict[str, Callable[[], object]] = {}
    for name in ("fp8", "fp8-head"):
        forward = TritonForward(name)
        parts, lengths, spec = _packed(equal, heads, length)
        grad = torch.randn_like(parts[0])
        for what, call in _step(forward, WIDE, Inputs(*parts, lengths), spec, grad).items():
            calls[f"{name} packed {what}"] = call
        rows = [x[0].unflatten(1, (16, length)).transpose(0, 1) for x in (*parts, grad)]
        dense = spec.replace(seqlen_q=length, seqlen_kv=length, lengths=None)
        for what, call in _step(forward, WIDE, Inputs(*rows[:3]), dense, rows[3]).items():
            calls[f"{name} dense {what}"] = call
        parts, lengths, spec = _packed(LOGNORMAL, heads, max(LOGNORMAL))
        grad = torch.randn_like(parts[0])
        for what, call in _step(forward, WIDE, Inputs(*parts, lengths), spec, grad).items():
            calls[f"{name} lognormal {what}"] = call
    q, k, v = (x[0].transpose(0, 1).detach().requires_grad_() for x in parts)
    cu, do = lengths.q, grad[0].transpose(0, 1)
    for plan in map(Plan.parse, PEERS):
        if not registry().reasons(plan, spec, describe(torch.device(DEVICE, 0)))[1]:
            calls[f"{plan} lognormal both"] = lambda plan=plan: torch.autograd.grad(
                attention(q, k, v, layout="thd", cu_seqlens_q=cu, is_causal=True, backend=str(plan)), (q, k, v), do
            )
    times = _interleaved(calls)
    with capsys.disabled():
        print(f"\n{heads}")
        for name, ms in times.items():
            print(f"  {name:40} {ms:8.3f} ms")
    for name in ("fp8", "fp8-head"):
        for what in ("kernel", "forward", "both"):
            assert times[f"{name} packed {what}"] <= 1.03 * times[f"{name} dense {what}"], (name, what)


def _interleaved(calls: dict[str, Callable[[], object]], rounds: int = 20) -> dict[str, float]:
    """Median milliseconds of each, in turns, with a cold L2."""
    cold = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 3):
        for name, call in calls.items():
            cold.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(3_000_000)  # the host is ahead
            start.record()
            call()
            stop.record()
            torch.cuda.synchronize()
            if number >= 3:
                times[name].append(start.elapsed_time(stop))
    found = {name: statistics.median(taken) for name, taken in times.items()}
    assert all(math.isfinite(ms) for ms in found.values())
    return found
