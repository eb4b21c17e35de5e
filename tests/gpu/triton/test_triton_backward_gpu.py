"""The FP8 backward on a GPU: dense FP64, determinism, evidence, and its time beside the best there is."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace

import dense
import pytest
import torch
from gpu_kernels import kernels_of
from sweep import Sweep, Truth
from torch import Tensor

from attnbench import AttentionSpec, Mask
from attnbench.backends.triton.backward.contract import KERNELS, TritonBackward
from attnbench.backends.triton.backward.tiles import Tile, Tiles
from attnbench.kernels.contract import Inputs, Operands, Saved, gradient_dtype
from attnbench.kernels.devices import describe
from attnbench.kernels.registry import registry
from attnbench.problem.fp8 import Recipe, quantise

DEVICE = torch.device("cuda", 0)
END = "bottom-right"
# Every head dimension, group, kind of mask and granularity compiles anew: few of each, many lengths.
HEADS = [(64, 64, 1), (128, 128, 4), (128, 64, 1), (80, 80, 2), (40, 24, 8), (192, 128, 2), (256, 256, 1)]
LENGTHS = [(256, 256), (257, 257), (130, 333), (333, 130), (1, 200), (77, 1)]
MASKS = [Mask(), Mask(right=0), Mask(right=0, alignment=END), Mask(left=37, right=11), Mask(left=150, alignment=END)]
GRANULARITIES = ["head", "token"]
PEERS = ("fa4:bf16", "cudnn:bf16", "te:fp8")


def specs(d: int, dv: int, group: int) -> list[AttentionSpec]:
    made = [
        AttentionSpec.make(batch=2, heads=8, kv_heads=8 // group, seqlen_q=sq, seqlen_kv=skv, head_dim=d, head_dim_v=dv,
                           mask=mask, direction="training", softcap=3.0 if i == 7 else 0.0)
        for i, ((sq, skv), mask) in enumerate(itertools.product(LENGTHS, MASKS))
    ]  # fmt: skip
    return list(dict.fromkeys(made))


def operands_of(spec: AttentionSpec, tensors: tuple[Tensor, ...], granularity: str, rotation: str) -> Operands:
    recipe = Recipe(granularity, rotation=rotation)
    return Operands(spec, *(quantise(x, recipe, rotate=each < 2) for each, x in enumerate(tensors)))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_it_agrees_with_dense_fp64_on_its_operands(
    kernel: TritonBackward, heads: tuple[int, int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = Sweep(DEVICE)
    for index, spec in enumerate(specs(*heads)):
        truth = Truth.of(spec, index, DEVICE)
        rotation = "hadamard" if index % 3 == 0 else "none"
        operands = operands_of(spec, truth.inputs[:3], GRANULARITIES[index // 2 % 2], rotation)
        tensors = operands.tensors(torch.float64)
        out, lse = dense.dense_attention(*tensors, spec)
        given = (*tensors, truth.inputs[3], spec)
        truth = replace(truth, gradients=dense.dense_gradients(*given), sizes=dense.gradient_sizes(*given))
        sweep.backward(kernel, truth, Saved(operands, out.to(gradient_dtype(spec)), lse.float()), factor=1.0)
    with capsys.disabled():
        print(f"\n{heads}\n{sweep.report()}")
    assert not any(sweep.faults.values())
    assert sweep.served[f"{kernel.name} bwd"] > 10


def prepared(spec: AttentionSpec, rotation: str = "none") -> tuple[Saved, Tensor]:
    """What ``emulated:fp8`` would leave at sizes that no dense truth is computed for: the log-sum-exp is torch's."""
    shape = (spec.batch, spec.seqlen_q, spec.heads, spec.head_dim)
    q, k, v, grad = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    operands = operands_of(spec, (q, k, v), "head", rotation)
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse = attend(*operands.tensors(torch.bfloat16), is_causal=spec.mask.kind == "causal")[:2]
    return Saved(operands, out, lse), grad


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("mask", [Mask(), Mask(right=0)], ids=str)
def test_it_is_deterministic_bit_for_bit(kernel: TritonBackward, mask: Mask) -> None:
    spec = AttentionSpec.make(batch=2, heads=8, seqlen_q=3000, head_dim=128, mask=mask, direction="training")
    saved, grad = prepared(spec)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        answers = [kernel.run(saved, grad) for _ in range(6)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(x).all() for x in answers[0])
    for answer in answers[1:]:
        assert all(torch.equal(x, y) for x, y in zip(answers[0], answer, strict=True))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_tiles_agree(kernel: TritonBackward) -> None:
    """Where this fails for one tile alone, it is the compiler's pipeline that reads too early."""
    spec = AttentionSpec.make(batch=1, heads=4, seqlen_q=1000, head_dim=128, mask=Mask(right=0), direction="training")
    saved, grad = prepared(spec)
    truth = dense.dense_gradients(*saved.operands.tensors(torch.float64), grad, spec)
    for m, n, warps in ((64, 128, 8), (64, 64, 4), (128, 64, 8), (32, 128, 8)):
        tile = Tile(m, n, warps, 2)
        other = TritonBackward(kernel.name, narrow=kernel.narrow, declared_error=0.1, tiles=Tiles(tile, tile))
        errors = [dense.relative_l2(x, y) for x, y in zip(other.run(saved, grad), truth, strict=True)]
        assert max(errors) < kernel.declared_error, (tile, errors)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_profiler_shows_these_kernels(kernel: TritonBackward) -> None:
    spec = AttentionSpec.make(batch=1, heads=8, seqlen_q=512, head_dim=128, direction="training")
    saved, grad = prepared(spec)
    kernel.run(saved, grad)
    names = kernels_of(lambda: kernel.run(saved, grad))
    assert any(re.search(kernel.evidence["cuda"], name) for name in names), names


def milliseconds(calls: dict[str, Callable[[], object]], rounds: int = 12) -> dict[str, float]:
    """Median device time of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 2):
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(3_000_000)  # the host is ahead, so that launches cost no device time
            start.record()
            call()
            stop.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(stop))
    return {name: sorted(kept[2:])[len(kept[2:]) // 2] for name, kept in times.items()}


def peers(spec: AttentionSpec) -> dict[str, Callable[[], object]]:
    """The backward passes of others on their own forward's results, those that are here and do not refuse."""
    calls: dict[str, Callable[[], object]] = {}
    known = registry()
    for name in PEERS:
        backend = name.partition(":")[0]
        if backend not in known.backends or not known.availability(backend).ok:
            continue
        forward, backward = known.forward(name), known.backward(name)
        if forward.refusals(spec, describe(DEVICE)) or backward.refusals(spec, describe(DEVICE)):
            continue
        shape = (spec.batch, spec.seqlen_q, spec.heads, spec.head_dim)
        q, k, v, grad = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
        operands = forward.prepare(Inputs(q, k, v), spec)
        saved = Saved(operands, *forward.run(operands))
        calls[name] = lambda backward=backward, saved=saved, grad=grad: backward.run(saved, grad)
    return calls


@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("seqlen", [4096, 8192, 16384])
@pytest.mark.parametrize("mask", [Mask(), Mask(right=0)], ids=str)
def test_what_each_piece_costs(head_dim: int, seqlen: int, mask: Mask, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints; holds that the whole is its pieces, so that no copy or synchronisation hides in our layer."""
    from attnbench.backends.triton.backward import launch as library

    spec = AttentionSpec.make(batch=16384 // seqlen, heads=2048 // head_dim, seqlen_q=seqlen, head_dim=head_dim,
                              mask=mask, direction="training")  # fmt: skip
    saved, grad = prepared(spec, "hadamard")
    operands = (saved.operands.q, saved.operands.k, saved.operands.v)
    calls: dict[str, Callable[[], object]] = {}
    for kernel in KERNELS:
        narrow = kernel.narrow
        tiles = kernel._tiles(spec, head_dim, DEVICE)
        given = library.prepared(spec, *operands, saved.out, saved.lse, grad, narrow, tiles)
        calls |= {
            kernel.name: lambda kernel=kernel: kernel.run(saved, grad),
            f"  {kernel.name} copies": lambda narrow=narrow, tiles=tiles: library.prepared(
                spec, *operands, saved.out, saved.lse, grad, narrow, tiles
            ),
            f"  {kernel.name} dK, dV": lambda given=given, tiles=tiles, narrow=narrow: library.run_keys(
                given, tiles.keys, narrow, torch.bfloat16
            ),
            f"  {kernel.name} dQ": lambda given=given, tiles=tiles, narrow=narrow: library.run_queries(
                given, tiles.queries, narrow, torch.bfloat16
            ),
        }
    took = milliseconds(calls | peers(spec))
    work = spec.flops * 2.5 / 3.5
    with capsys.disabled():
        print(f"\n{spec}")
        for name, each in took.items():
            print(f"  {name:28} {each:8.3f} ms {work / each / 1e9:6.0f} TFLOPS")
    for kernel in KERNELS:
        pieces = sum(took[f"  {kernel.name} {piece}"] for piece in ("copies", "dK, dV", "dQ"))
        assert took[kernel.name] <= 1.05 * pieces + 0.05
