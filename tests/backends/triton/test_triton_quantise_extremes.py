"""Fused quantisation of zeros, nonfinite values and numbers at the limits of their formats."""

import math

import pytest
import torch
from quantise_inputs import bits, bound, laid_out

from attnbench.backends.triton.quantise.launch import quantised
from attnbench.problem.fp8 import LARGEST, Recipe, hadamard, quantise
from attnbench.problem.spec import GRANULARITIES
from examples import every_pair

SHARED = ("head", "tensor")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter's arithmetic with infinities
@pytest.mark.parametrize(
    ("granularity", "rotation", "value"),
    every_pair(["head", "block", "token"], ["none", "hadamard"], [math.inf, -math.inf, math.nan]),
)
def test_nonfinite_values_affect_only_their_own_group(granularity, rotation, value):
    x = laid_out((1, 2, 140, 24), "bhsd", torch.float32)
    x[0, 1, 135, 3] = value
    recipe = Recipe(granularity, rotation=rotation)
    found, wanted = quantised(x, recipe, rotate=True).operand(recipe), quantise(x, recipe, rotate=True)
    sound = wanted.descale.isfinite()
    assert torch.equal(found.descale.isfinite(), sound)
    rounding = 0 if rotation == "none" else 1e-6
    torch.testing.assert_close(found.descale[sound], wanted.descale[sound], rtol=rounding, atol=0)
    sound = sound.expand(x.shape)
    assert not sound.all()
    assert (bits(found.data) != bits(wanted.data))[sound].double().mean() <= 1e3 * rounding
    assert not found.dequantised(torch.float32)[~sound].isfinite().any()


@pytest.mark.parametrize(("granularity", "magnitude"), every_pair(GRANULARITIES, [1e30, 3e38, 2.0**-149, 2.0**-140]))
def test_zeros_and_extreme_fp32_values_are_quantised_correctly(granularity, magnitude):
    x = torch.randn(1, 2, 130, 16, generator=torch.Generator().manual_seed(0)).clamp(-1, 1) * magnitude
    x[0, 0, :5] = 0
    x[0, 1] = 0
    recipe = Recipe(granularity)
    found, wanted = quantised(x, recipe).operand(recipe), quantise(x, recipe)
    assert torch.equal(found.descale.expand(1, 2, 130, 1), wanted.descale.expand(1, 2, 130, 1))
    assert torch.equal(bits(found.data.contiguous()), bits(wanted.data))
    assert found.dequantised(torch.float64).isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what is larger than fp32's numbers
@pytest.mark.parametrize(
    ("granularity", "dtype", "dim", "kind"),
    every_pair(
        SHARED, [torch.bfloat16, torch.float32], [16, 24, 128],
        ["one way", "either way", "a row of the rotation", "its largest alone"],
    ),
)  # fmt: skip
def test_rotated_numbers_beyond_fp32_saturate(granularity, dim, dtype, kind):
    """Sums that overflow have finite scales, and no NaN comes of infinities that are taken from each other."""
    x = torch.full((1, 2, 70, dim), torch.finfo(dtype).max, dtype=dtype)
    x *= {
        "one way": torch.ones(dim),
        "either way": torch.randn(70, dim, generator=torch.Generator().manual_seed(0)).sign(),
        "a row of the rotation": hadamard(dim)[:, 3].sign(),
        "its largest alone": torch.arange(dim) == 2,
    }[kind].to(dtype)
    recipe = Recipe(granularity, rotation="hadamard")
    found, wanted = quantised(x, recipe, rotate=True).operand(recipe), quantise(x, recipe, rotate=True)
    largest = bound(x.double()).max().clamp_max(torch.finfo(torch.float32).max)
    for each in (found, wanted):
        assert torch.all((each.descale.double() * 448 / largest - 1).abs() < 1e-6)
        truth = (x.double() @ hadamard(dim).double() / each.descale).clamp(-448, 448)
        assert torch.all((each.data.double() - truth).abs() <= truth.abs() / 16 + 2.0**-10 + 448e-6)
        assert not each.dequantised(torch.float32).isnan().any()


@pytest.mark.parametrize(("granularity", "format"), every_pair(GRANULARITIES, ["e4m3", "e5m2"]))
def test_values_that_rounding_pushes_beyond_the_scale_saturate(granularity, format):
    """Of numbers that are all but equal to their mean little is left, which the rotation's rounding is larger than.

    Two elements differ from zero, and the mean is exact.  In whatever order a CPU adds, a rotated number of token 7 is
    rounded once: three quarters of the last bit of the large element become a whole one.
    """
    x = torch.zeros(1, 1, 128, 64)
    x[..., 0] = 1.5 * 2.0**40
    x[:, :, 7, 5] = 0.75 * torch.finfo(torch.float32).eps * 2.0**40
    recipe = Recipe(granularity, format, "hadamard", True)
    found = quantised(x, recipe, rotate=True, smooth=True, transposed=True)
    wanted = torch.zeros(x.shape)
    wanted[:, :, 7] = LARGEST[format] * hadamard(64)[5].sign()
    assert torch.equal(found.data.float(), wanted)
    tight = torch.randn(1, 10, 8, 1, generator=torch.Generator().manual_seed(0)) * hadamard(64)[:, 3].sign()
    recipe = Recipe(granularity, format, "hadamard")
    found, wanted = quantised(tight, recipe, rotate=True), quantise(tight, recipe, rotate=True)
    for each in (found, wanted):
        assert each.data.float().isfinite().all()
        assert each.data.float().abs().max() == LARGEST[format]
