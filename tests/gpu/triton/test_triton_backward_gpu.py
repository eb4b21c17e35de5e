"""The FP8 backward on a GPU: dense FP64, determinism, evidence, and its time beside the best there is."""

from __future__ import annotations

import itertools
from dataclasses import replace

import dense
import pytest
import torch
from agreement_sweep import Sweep, Truth
from torch import Tensor

from attnbench import AttentionSpec, Mask, attention
from attnbench.backends.triton.backward import launch
from attnbench.backends.triton.backward.contract import KERNELS, TritonBackward
from attnbench.backends.triton.backward.tiles import Tile, Tiles
from attnbench.kernels.contract import Operands, Saved, gradient_dtype
from attnbench.problem.fp8 import Recipe, quantise

DEVICE = torch.device("cuda", 0)
END = "bottom-right"
# Every head dimension, group, kind of mask and granularity compiles anew: few of each, many lengths.
HEADS = [
    (64, 64, 1), (128, 128, 4), (128, 64, 1), (80, 80, 2), (40, 24, 8), (192, 128, 2), (192, 192, 2), (256, 256, 1),
]  # fmt: skip
LENGTHS = [(256, 256), (257, 257), (130, 333), (333, 130), (1, 200), (77, 1)]
MASKS = [Mask(), Mask(right=0), Mask(right=0, alignment=END), Mask(left=37, right=11), Mask(left=150, alignment=END)]
GRANULARITIES = ["head", "token"]


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
def test_the_backward_agrees_with_dense_fp64_on_its_operands(
    kernel: TritonBackward, heads: tuple[int, int, int]
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
    print(f"{heads}\n{sweep.report()}")
    assert not any(sweep.faults.values())
    assert sweep.served[f"{kernel.name} bwd"] > 10


def prepared_problem(spec: AttentionSpec, rotation: str = "none") -> tuple[Saved, Tensor]:
    """What ``emulated:fp8`` would leave at sizes that no dense truth is computed for: the log-sum-exp is torch's."""
    shape = (spec.batch, spec.seqlen_q, spec.heads, spec.head_dim)
    q, k, v, grad = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    operands = operands_of(spec, (q, k, v), "head", rotation)
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse = attend(*operands.tensors(torch.bfloat16), is_causal=spec.mask.kind == "causal")[:2]
    return Saved(operands, out, lse), grad


@pytest.mark.parametrize(
    ("head_dim", "backward"), [*((each, "triton:fp8") for each in (64, 96, 128, 192, 256)), (256, "triton:fp8-all")]
)
@pytest.mark.parametrize("heads", [13, 16])
def test_shares_of_a_group_sum_to_its_gradients(
    head_dim: int, backward: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same kernel with all query heads of the only key head in one program."""
    q, k, v, grad = (
        torch.randn(1, each, 4096, head_dim, device=DEVICE, dtype=torch.bfloat16) for each in (heads, 1, 1, heads)
    )
    leaves = [each.requires_grad_() for each in (q, k, v)]
    taken: list[int] = []
    own = launch.shares_of
    monkeypatch.setattr(launch, "shares_of", lambda *given: (taken.append(own(*given)), taken[-1])[1])
    found = [torch.autograd.grad(attention(*leaves, is_causal=True, backend=f"triton:fp8>{backward}"), leaves, grad)]
    monkeypatch.setattr(launch, "shares_of", lambda layout, block: 1)
    found += [torch.autograd.grad(attention(*leaves, is_causal=True, backend=f"triton:fp8>{backward}"), leaves, grad)]
    assert min(taken) > 1
    for shared, alone in zip(*found, strict=True):
        assert (shared - alone).float().norm() <= 0.005 * alone.float().norm()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("mask", [Mask(), Mask(right=0)], ids=str)
def test_the_backward_is_deterministic_bit_for_bit(kernel: TritonBackward, mask: Mask) -> None:
    spec = AttentionSpec.make(batch=2, heads=8, seqlen_q=3000, head_dim=128, mask=mask, direction="training")
    saved, grad = prepared_problem(spec)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        answers = [kernel.run(saved, grad) for _ in range(6)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(x).all() for x in answers[0])
    for answer in answers[1:]:
        assert all(torch.equal(x, y) for x, y in zip(answers[0], answer, strict=True))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_other_tiles_agree_with_fp64(kernel: TritonBackward) -> None:
    """If this fails for a single tile, the compiler's pipeline reads too early."""
    spec = AttentionSpec.make(batch=1, heads=4, seqlen_q=1000, head_dim=128, mask=Mask(right=0), direction="training")
    saved, grad = prepared_problem(spec)
    truth = dense.dense_gradients(*saved.operands.tensors(torch.float64), grad, spec)
    for m, n, warps in ((64, 128, 8), (64, 64, 4), (128, 64, 8), (32, 128, 8)):
        tile = Tile(m, n, warps, 2)
        other = TritonBackward(kernel.name, narrow=kernel.narrow, declared_error=0.1, tiles=Tiles(tile, tile))
        errors = [dense.relative_l2(x, y) for x, y in zip(other.run(saved, grad), truth, strict=True)]
        assert max(errors) < kernel.declared_error, (tile, errors)
