"""Fused quantisation on a GPU: the definition's bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from attnbench.problem.fp8 import LARGEST, Recipe, hadamard, quantise
from attnbench.problem.spec import GRANULARITIES

pytest.importorskip("triton")

from attnbench.backends.triton.quantise.launch import Request, quantised, quantised_together

DEVICE = torch.device("cuda", 0)
LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "bhds": (0, 1, 3, 2)}


def random_tensor(shape: Sequence[int], dtype: torch.dtype, layout: str = "bhsd", seed: int = 0) -> Tensor:
    """Normal numbers with a magnitude of its own for each token, in the named order of axes in memory."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device=DEVICE)
    x = (x * torch.exp(torch.randn(*shape[:3], 1, generator=generator, device=DEVICE))).to(dtype)
    axes = LAYOUTS[layout]
    return x.permute(axes).contiguous().permute([axes.index(axis) for axis in range(4)])


def undo_interleaving(x: Tensor) -> Tensor:
    """Each 16 tokens of an interleaved copy as they were."""
    places = torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15], device=x.device)
    return x.unflatten(3, (-1, 16))[..., places.argsort()].flatten(3)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).cpu()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantisation_equals_the_definition_bit_for_bit(granularity, dtype, layout):
    """Every copy with every other; shapes and formats take the two orders of the transposed copy in turns."""
    shapes = [(2, 4, 1, 64), (1, 4, 129, 80), (2, 2, 1000, 128), (1, 2, 300, 256), (1, 1, 4097, 96), (1, 3, 257, 20)]
    for index, shape in enumerate(shapes):
        x = random_tensor(shape, dtype, layout, index)
        if index % 2:  # few bits, so that quotients lie at or next to the middle between two FP8 numbers
            x = (x * 8).round().clamp(-96, 96) / 8
        for format in ("e4m3", "e5m2"):
            recipe = Recipe(granularity, format)
            wanted = quantise(x.cpu(), recipe)
            order = (format == "e4m3") == bool(index % 2)
            for rows, transposed in ((True, False), (True, True), (False, True)):
                found = quantised(x, recipe, rows=rows, transposed=transposed, interleaved=order)
                assert torch.equal(found.operand(recipe).descale.cpu(), wanted.descale), (shape, format)
                assert torch.equal(bits(found.data), bits(wanted.data)), (shape, format, rows, transposed)
                if found.transposed is not None:
                    turned = found.transposed.view(torch.uint8)
                    turned = undo_interleaving(turned) if order else turned
                    assert torch.equal(turned[..., : shape[2]].mT.cpu(), bits(wanted.data)), (shape, format, rows)
                    assert not turned[..., shape[2] :].any()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_definition_is_the_same_on_a_gpu_and_a_cpu(granularity, format, dtype):
    recipe = Recipe(granularity, format)
    for seed, shape in enumerate([(2, 4, 1000, 128), (1, 3, 257, 20)]):
        x = random_tensor(shape, dtype, seed=seed)
        here, there = quantise(x, recipe), quantise(x.cpu(), recipe)
        assert torch.equal(here.descale.cpu(), there.descale)
        assert torch.equal(bits(here.data), bits(there.data))


def test_random_quotients_round_like_a_division():
    for seed in range(4):
        x = random_tensor((1, 64, 4096, 128), torch.float32, seed=seed)
        assert torch.equal(bits(quantised(x, Recipe("token")).data), bits(quantise(x.cpu(), Recipe("token")).data))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 192, 256])
def test_rotated_and_smoothed_values_are_within_half_an_ulp(granularity, dtype, dim):
    for smoothing in (False, True):
        x = random_tensor((2, 2, 333, dim), dtype) + 2
        recipe = Recipe(granularity, rotation="hadamard", smoothing=smoothing)
        found = quantised(x, recipe, rotate=True, smooth=True, transposed=True)
        truth = x.double() - (0.0 if found.mean is None else found.mean.double())
        truth = truth @ hadamard(dim, DEVICE).double()
        descale = found.operand(recipe).descale.double()
        noise = 5e-6 * x.double().norm(dim=3, keepdim=True) + 1e-6 * descale * LARGEST["e4m3"]
        error = (found.data.double() * descale - truth).abs()
        assert torch.all(error <= torch.maximum(truth.abs() / 16, descale / 1024) + noise)
        assert torch.all(truth.abs() <= descale * LARGEST["e4m3"] + noise)
        assert torch.equal(bits(found.transposed[..., :333].mT), bits(found.data))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_nonfinite_values_affect_only_their_own_group(granularity, value):
    recipe = Recipe(granularity)
    x = random_tensor((1, 2, 300, 64), torch.bfloat16)
    x[0, 1, 290, 3] = value
    found, wanted = quantised(x, recipe).operand(recipe), quantise(x.cpu(), recipe)
    torch.testing.assert_close(found.descale.cpu(), wanted.descale, rtol=0, atol=0, equal_nan=True)
    ours, theirs = found.dequantised(torch.float32).cpu(), wanted.dequantised(torch.float32)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_groups_of_query_heads_share_a_scale():
    x = random_tensor((2, 8, 500, 128), torch.bfloat16, "bshd")
    found = quantised(x, Recipe("head"), group=4)
    wanted = quantise(x.cpu().reshape(2, 2, 2000, 128), Recipe("head"))
    assert torch.equal(found.descale.cpu(), wanted.descale.repeat_interleave(4, dim=1))
    assert torch.equal(bits(found.data), bits(wanted.data.reshape(x.shape)))


def test_more_elements_than_32_bits_can_index_are_supported():
    """(1, 128, 131072, 128) as a model lays it out: offsets beyond 2^31 on the way in and out."""
    x = torch.zeros(1, 131072 + 300, 128, 128, dtype=torch.bfloat16, device=DEVICE).transpose(1, 2)
    last = random_tensor((1, 1, 400, 128), torch.bfloat16)
    x[:, -1:, -400:] = last
    for granularity in ("token", "head"):
        recipe = Recipe(granularity)
        found, wanted = quantised(x, recipe, transposed=True), quantise(last.cpu(), recipe)
        assert torch.equal(bits(found.data[:, -1:, -400:]), bits(wanted.data))
        assert torch.equal(bits(found.transposed[:, -1:, :, x.shape[2] - 400 : x.shape[2]].mT), bits(wanted.data))
        assert not bits(found.data[:, -1, :-400]).any()


@pytest.mark.parametrize("moved", [False, True], ids=["plain", "rotated and smoothed"])
@pytest.mark.parametrize("granularity", ["head", "token"])
def test_quantisation_can_be_replayed_in_a_graph(granularity, moved):
    x = random_tensor((1, 4, 1000, 128), torch.bfloat16)
    other = random_tensor(x.shape, torch.bfloat16, seed=1)
    recipe = Recipe(granularity, rotation="hadamard" if moved else "none", smoothing=moved)
    requests = [Request(x, rotate=True, smooth=True), Request(x, transposed=True, rotate=True, interleaved=True)]
    quantised_together(requests, recipe)  # compiles, and copies the rotation to the device
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = quantised_together(requests, recipe)
    x.copy_(other)
    graph.replay()
    for each in results:
        back = each.operand(recipe).dequantised(torch.float32)
        assert (back - other.float()).norm() < 0.05 * other.float().norm()
        if not moved:
            assert torch.equal(bits(each.data), bits(quantise(other.cpu(), recipe).data))
    assert torch.equal(
        undo_interleaving(results[1].transposed.view(torch.uint8))[..., :1000].mT.cpu(), bits(results[1].data)
    )
