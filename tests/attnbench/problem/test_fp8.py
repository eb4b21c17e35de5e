"""FP8 quantisation: rounding, shared scales, dequantised values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.errors import InputError
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.fp8 import LARGEST, Recipe, hadamard, quantise, quantise_with
from attnbench.problem.spec import GRANULARITIES

FORMATS = ("e4m3", "e5m2")
MANTISSA = {"e4m3": 3, "e5m2": 2}
SMALLEST = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}  # subnormal, OFP8 table 1


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def groups(shape, granularity):
    """The scale group of each token of each head, (B, H, S)."""
    b, h, s = shape
    head = torch.arange(b * h).view(b, h, 1)
    token = torch.arange(s).view(1, 1, s)
    return {
        "tensor": torch.zeros(b, h, s, dtype=torch.long),
        "head": head.expand(b, h, s),
        "block": head * 10_000 + token // 128,
        "token": head * 10_000 + token,
    }[granularity]


@settings(max_examples=30, deadline=None)
@given(
    granularity=st.sampled_from(GRANULARITIES),
    format=st.sampled_from(FORMATS),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 300), st.integers(1, 24)),
    exponent=st.integers(-30, 30),
    spread=st.sampled_from([0.0, 6.0]),
    seed=st.integers(0, 99),
)
def test_round_trip_stays_within_half_an_ulp(granularity, format, shape, exponent, spread, seed):
    x = normal(*shape, seed=seed) * torch.exp(spread * normal(*shape, seed=seed + 1)) * 10.0**exponent
    x = x.clamp(-1e37, 1e37)
    before = x.clone()
    got = quantise(x, Recipe(granularity, format))
    assert torch.equal(x, before)
    assert got.data.dtype == TO_TORCH[format]
    assert got.data.shape == x.shape
    assert got.descale.dtype == torch.float32
    assert (got.granularity, got.rotated, got.mean) == (granularity, False, None)
    descale = got.descale.double()
    error = (got.dequantised(torch.float64) - x.double()).abs()
    half_ulp = torch.maximum(x.double().abs() * 2.0 ** -(MANTISSA[format] + 1), descale * SMALLEST[format] / 2)
    assert (error <= half_ulp * (1 + 1e-5)).all()


@settings(max_examples=30, deadline=None)
@given(granularity=st.sampled_from(GRANULARITIES), format=st.sampled_from(FORMATS), exponent=st.integers(-45, -36))
def test_numbers_too_small_for_a_scale_do_not_become_nan(granularity, format, exponent):
    x = normal(1, 1, 5, 8) * 10.0**exponent
    x[0, 0, :, 0] = 0
    got = quantise(x, Recipe(granularity, format)).dequantised(torch.float64)
    assert got.isfinite().all()
    assert ((got - x.double()).abs() <= x.double().abs() * 2.0 ** -(MANTISSA[format] + 1) + 2e-38).all()


def test_hadamard_rows_mix_signs_and_size_zero_is_an_error():
    assert 32 < (hadamard(128)[:, 0] > 0).sum() < 96
    with pytest.raises(InputError, match="positive"):
        hadamard(0)


def rows(kind, shape, seed):
    """Rows (B, H, S, D): normal numbers, one dominant number, or a column of the rotation."""
    x = normal(*shape, seed=seed)
    if kind == "outlier":
        places = torch.randint(shape[3], (*shape[:3], 1), generator=torch.Generator().manual_seed(seed))
        return x.scatter(3, places, 1e5 * x.gather(3, places).sign())
    if kind == "tight":
        columns = hadamard(shape[3]).sign().mT
        return x[..., :1] * columns[torch.randint(shape[3], shape[:3], generator=torch.Generator().manual_seed(seed))]
    return x


@settings(max_examples=30, deadline=None)
@given(
    granularity=st.sampled_from(GRANULARITIES),
    format=st.sampled_from(FORMATS),
    kind=st.sampled_from(["normal", "outlier", "tight"]),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(2, 200), st.sampled_from([1, 8, 20, 64, 80, 81])),
    smoothing=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rotated_head_and_tensor_scales_are_bounds_and_others_exact(granularity, format, kind, shape, smoothing, seed):
    x = rows(kind, shape, seed)
    got = quantise(x, Recipe(granularity, format, "hadamard", smoothing), rotate=True, smooth=True)
    moved = x.double() - (0.0 if got.mean is None else got.mean.double())
    truth = (moved @ hadamard(shape[3]).double()).abs().amax(3)
    block = next(2**power for power in range(8, -1, -1) if shape[3] % 2**power == 0)
    bound = moved.abs().unflatten(3, (-1, block)).sum(4).amax(3) / block**0.5
    assert (bound >= truth * (1 - 1e-6)).all()
    if not smoothing and kind == "tight":
        torch.testing.assert_close(bound, truth)
    if not smoothing and kind == "outlier":
        assert (bound <= truth * 1.01).all()
    group = groups(shape[:3], granularity)
    reach = got.descale.double().expand(*shape[:3], 1)[..., 0] * LARGEST[format]
    for number in group.unique():
        member = group == number
        wanted = (bound if granularity in ("head", "tensor") else truth)[member].max()
        assert (reach[member] - wanted).abs().max() <= 1e-5 * wanted + (1e-6 * x.abs().max() if smoothing else 0)


def test_an_unknown_granularity_is_an_error():
    with pytest.raises(InputError, match="tensor, head, block, token"):
        quantise(normal(1, 1, 2, 2), Recipe("row"))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_quantisation_divides_by_tensors_on_the_same_device(granularity, format):
    """CUDA divides by a number or a one-element CPU tensor by multiplying with a rounded reciprocal.

    Copies from the host are not allowed during graph capture, so a number becomes a tensor by filling.
    """
    asked = []

    class DeviceRecorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            asked.append((func.overloadpacket.__name__, args))
            return func(*args, **(kwargs or {}))

    x = normal(1, 2, 140, 8)
    x[0, 1] = 0
    with DeviceRecorder():
        got = quantise(x, Recipe(granularity, format))
        quantise_with(x, 3.0, format)
    divisors = [args[1] for name, args in asked if name in ("div", "div_", "true_divide")]
    assert len(divisors) == 3
    assert all(isinstance(each, torch.Tensor) and each.device == x.device for each in divisors)
    assert not {"lift_fresh", "_local_scalar_dense"} & {name for name, _ in asked}
    amax = x.double().abs().amax() / LARGEST[format]
    assert got.descale[:, :1].max() == amax.to(torch.float32)


def test_a_scalar_scale_divides_16_bit_tensors_without_intermediate_rounding():
    x = torch.arange(1, 4000, dtype=torch.float32).to(torch.bfloat16) * 0.01
    for divisor in (3.0, 0.7, torch.tensor(3.0)):
        wanted = (x.float() / divisor).to(torch.float8_e4m3fn)
        assert torch.equal(quantise_with(x, divisor, "e4m3").view(torch.uint8), wanted.view(torch.uint8))


def test_the_cached_rotation_is_independent_of_inference_mode_and_default_dtype():
    """The rotation is cached, so the first caller's inference mode and default dtype must not affect the next."""
    with torch.inference_mode():
        hadamard(88)
    x = normal(1, 1, 4, 88).requires_grad_()
    (x @ hadamard(88)).sum().backward()
    assert torch.equal(x.grad, hadamard(88).sum(1).expand_as(x))
    torch.set_default_dtype(torch.float64)
    try:
        assert hadamard(104).dtype == torch.float32
        assert quantise(normal(1, 1, 4, 104).float(), Recipe(rotation="hadamard"), rotate=True).descale.dtype == (
            torch.float32
        )
    finally:
        torch.set_default_dtype(torch.float32)
