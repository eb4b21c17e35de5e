"""Fused quantisation under Triton's interpreter, against ``attnbench.problem.fp8`` bit for bit and against FP64."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantise_inputs import bits, bound, laid_out

from attnbench.backends.triton.quantise import layout as quantise_layout
from attnbench.backends.triton.quantise.launch import Request, Tiles, quantised, quantised_together
from attnbench.errors import InputError
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.fp8 import BLOCK, LARGEST, Recipe, hadamard, quantise
from attnbench.problem.spec import GRANULARITIES
from examples import every_pair, examples

SHARED = ("head", "tensor")
HALF_ULP = {"e4m3": (2.0**-4, 2.0**-10), "e5m2": (2.0**-3, 2.0**-17)}  # of normal numbers, of subnormal ones
ORDER = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]  # of 16 tokens in an interleaved copy
TILES = [Tiles(16, 64, 4, 16), Tiles(64, 64, 4, 64), Tiles(32, 128, 8, 128)]

dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
shapes = st.tuples(
    st.integers(1, 2), st.integers(1, 2), st.sampled_from([1, 2, 63, 128, 129, 200]), st.sampled_from([8, 16, 20, 64])
)


layouts = st.sampled_from(["bhsd", "bshd", "bhds", "sbhd", "gaps"])


def expected(x, recipe, group=1):
    """The result of ``attnbench.problem.fp8``, with one scale for each ``group`` heads."""
    b, h, s, d = x.shape
    if recipe.granularity != "head":
        return quantise(x, recipe)
    whole = quantise(x.reshape(b, h // group, group * s, d), recipe)
    descale = whole.descale.repeat_interleave(group, dim=1)
    return type(whole)(whole.data.reshape(x.shape), descale, "head")


def assert_transposed_matches(result, length):
    """Asserts that the transposed copy equals the rows, with zeros after them."""
    assert result.transposed.is_contiguous()
    assert result.transposed.shape[3] == math.ceil(length / 128) * 128
    ordered = found = bits(result.transposed)
    if result.interleaved:
        ordered = torch.empty_like(found)
        ordered.unflatten(3, (-1, 16))[..., ORDER] = found.unflatten(3, (-1, 16))
    assert torch.equal(ordered[..., :length].mT, bits(result.data.contiguous()))
    assert not ordered[..., length:].any()


@settings(max_examples=examples(10, 200))
@given(
    shape=shapes,
    group=st.integers(1, 3),
    layout=layouts,
    dtype=dtypes,
    granularity=st.sampled_from(GRANULARITIES),
    format=st.sampled_from(["e4m3", "e5m2"]),
    copies=st.sampled_from([(True, False), (True, True), (False, True)]),
    interleaved=st.booleans(),
    tiles=st.sampled_from(TILES),
    exponent=st.sampled_from([0, 0, -10, 5]),
    seed=st.integers(0, 99),
)
def test_quantisation_equals_the_definition_bit_for_bit(
    shape, group, layout, dtype, granularity, format, copies, interleaved, tiles, exponent, seed
):
    b, h, s, d = shape
    x = laid_out((b, h * group, s, d), layout, dtype, seed, exponent)
    before, recipe, (rows, transposed) = x.clone(), Recipe(granularity, format), copies
    request = Request(x, rows, transposed, group, interleaved=interleaved)
    (found,) = quantised_together([request], recipe, tiles)
    wanted = expected(x, recipe, group)
    assert torch.equal(x, before)
    assert (found.data.dtype, found.data.shape) == (TO_TORCH[format], x.shape)
    assert torch.equal(bits(found.data.contiguous()), bits(wanted.data))
    counts = {"tensor": (1, 1, 1), "head": (b, h * group, 1), "token": (b, h * group, s)}
    assert found.descale.shape == (*counts.get(granularity, (b, h * group, math.ceil(s / BLOCK))), 1)
    operand = found.operand(recipe)
    assert torch.equal(operand.descale.expand(b, h * group, s, 1), wanted.descale.expand(b, h * group, s, 1))
    assert torch.equal(operand.dequantised(torch.float32), wanted.dequantised(torch.float32))
    if rows:
        assert found.data.stride()[3] == 1
        assert found.data.stride()[2] == math.ceil(d / 16) * 16
        assert found.data.data_ptr() % 16 == 0
    if transposed:
        assert found.interleaved == interleaved
        assert_transposed_matches(found, s)
    else:
        assert found.transposed is None


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_rows_that_come_in_two_parts_equal_the_definition(granularity):
    tensors = [laid_out((1, 2, 140, size), "bshd", torch.bfloat16, size) for size in (65, 80, 96, 192)]
    for x in tensors:
        x[:, :, ::2, -1] *= 8
    found = quantised_together(list(map(Request, tensors)), Recipe(granularity))
    for x, each in zip(tensors, found, strict=True):
        wanted = quantise(x, Recipe(granularity))
        assert torch.equal(bits(each.data.contiguous()), bits(wanted.data))
        operand = each.operand(Recipe(granularity))
        assert torch.equal(operand.dequantised(torch.float32), wanted.dequantised(torch.float32))


@pytest.mark.parametrize(("block", "dtype"), every_pair([64, 256], [torch.bfloat16, torch.float16, torch.float32]))
def test_blocks_of_any_length_are_quantised_separately(block, dtype):
    x = laid_out((2, 3, 300, 32), "bshd", dtype, 5, 0)
    x[0, 1, :block] = 0
    (found,) = quantised_together([Request(x, transposed=True)], Recipe("block"), block=block)
    operand = found.operand(Recipe("block"), block=block)
    assert_transposed_matches(found, 300)
    for start in range(0, 300, block):
        part = slice(start, start + block)
        wanted = quantise(x[:, :, part], Recipe("head"))
        assert torch.equal(bits(found.data[:, :, part].contiguous()), bits(wanted.data))
        assert torch.equal(found.descale[:, :, start // block], wanted.descale[:, :, 0])
        assert torch.equal(operand.dequantised(torch.float32)[:, :, part], wanted.dequantised(torch.float32))


@settings(max_examples=examples(8, 150))
@given(
    shape=shapes,
    layout=layouts,
    dtype=dtypes,
    granularity=st.sampled_from(GRANULARITIES),
    format=st.sampled_from(["e4m3", "e5m2"]),
    rotation=st.sampled_from(["none", "hadamard"]),
    smoothing=st.booleans(),
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rotated_and_smoothed_values_are_within_half_an_ulp(
    shape, layout, dtype, granularity, format, rotation, smoothing, transposed, seed
):
    x = laid_out(shape, layout, dtype, seed) + 3
    recipe = Recipe(granularity, format, rotation, smoothing)
    found = quantised(x, recipe, transposed=transposed, rotate=True, smooth=True)
    truth = x.double()
    if smoothing:
        assert (found.mean.double() - truth.mean(2, keepdim=True)).abs().max() < 1e-5 * truth.abs().max()
        truth = truth - found.mean.double()
    moved = truth
    if rotation == "hadamard":
        truth = truth @ hadamard(x.shape[3]).double()
    operand = found.operand(recipe)
    descale = operand.descale.double()
    noise = 1e-5 * truth.abs().amax((2, 3), keepdim=True) + 1e-6 * x.abs().max()  # of sums in fp32
    relative, absolute = HALF_ULP[format]
    error = (found.data.double() * descale - truth).abs()
    assert torch.all(error <= torch.maximum(relative * truth.abs(), absolute * descale) + noise)
    largest = truth.abs() if rotation == "none" or granularity not in SHARED else bound(moved)
    reach = descale * LARGEST[format]  # the scales are no larger than they have to be
    assert torch.all((truth.abs() <= reach + noise).flatten())
    assert torch.all(reach.amin() <= largest.max() + noise) or not moved.any()
    back = (operand.dequantised(torch.float64) - x.double()).norm(dim=3)
    assert torch.all(back <= (error.norm(dim=3) + 1e-5 * (x.double().norm(dim=3) + truth.norm(dim=3))))
    if transposed:
        assert_transposed_matches(found, shape[2])


@pytest.mark.parametrize("rotation", ["none", "hadamard"])
def test_rotation_and_smoothing_apply_only_when_requested(rotation):
    x = laid_out((1, 2, 40, 32), "bhsd", torch.float32)
    recipe = Recipe("token", rotation=rotation, smoothing=True)
    found = quantised(x, recipe)
    assert found.mean is None
    assert torch.equal(bits(found.data), bits(quantise(x, recipe).data))
    assert quantised(x, Recipe("token"), rotate=True, smooth=True).mean is None


@pytest.mark.parametrize(("layout", "first", "granularity"), every_pair(["bshd", "gaps"], [0, 1], GRANULARITIES))
def test_quantising_together_equals_quantising_separately(granularity, layout, first):
    """Programs of tensors that are alike run in turns, those of others one tensor after the other."""
    recipe = Recipe(granularity, rotation="hadamard")
    q = laid_out((1, 2, 70, 32), layout, torch.bfloat16, 1)
    k = laid_out((1, 1, 133, 32), "bshd", torch.bfloat16, 2)
    v = laid_out((1, 1, 133, 48), "bhsd", torch.float32, 3)
    requests = [Request(q, group=2, rotate=True), Request(k, transposed=True, rotate=True)]
    requests += [Request(v, False, True), Request(v, True, True, interleaved=True)]
    for request, found in zip(requests[first:], quantised_together(requests[first:], recipe), strict=True):
        x, *keywords = request
        alone = quantised(x, recipe, **dict(zip(Request._fields[1:], keywords, strict=True)))
        assert torch.equal(bits(found.data.contiguous()), bits(alone.data.contiguous()))
        assert torch.equal(found.descale, alone.descale)
        assert (found.transposed is None) == (alone.transposed is None)
        if found.transposed is not None:
            assert torch.equal(bits(found.transposed), bits(alone.transposed))


def test_an_operand_without_rows_restores_the_token_order_when_read():
    recipe = Recipe("block")
    x = laid_out((1, 2, 150, 16), "bhsd", torch.bfloat16)
    operand = quantised(x, recipe, rows=False, transposed=True, interleaved=True).operand(recipe)
    wanted = quantise(x, recipe)
    assert "data" not in vars(operand), "it has not been read"
    other = replace(operand, descale=2 * operand.descale)
    assert torch.equal(bits(operand.data.contiguous()), bits(wanted.data))
    assert operand.data is operand.data
    assert torch.equal(operand.dequantised(torch.float32), wanted.dequantised(torch.float32))
    assert torch.equal(other.dequantised(torch.float32), 2 * wanted.dequantised(torch.float32))


@pytest.mark.parametrize(
    ("granularity", "sizes"), every_pair(SHARED, [(2, 200, 4), (70, 20, 300), (12, 20, 24), (3, 130, 1)])
)
def test_many_partial_magnitudes_are_reduced_correctly(monkeypatch, granularity, sizes):
    """More magnitudes than are read at once, and programs with several tiles each."""
    heads, length, most = sizes
    monkeypatch.setattr(quantise_layout, "_MOST_PARTIAL", most)
    quantise_layout.layout_of.cache_clear()
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4, heads, length, 16, generator=generator)
    x[3, heads - 1, length - 1, 5] = -50.0
    recipe = Recipe(granularity)
    (found,) = quantised_together([Request(x)], recipe, Tiles(64, 64, 4, 16))
    wanted = quantise(x, recipe)
    assert torch.equal(found.descale, wanted.descale)
    assert torch.equal(bits(found.data), bits(wanted.data))
    quantise_layout.layout_of.cache_clear()


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize(("granularity", "rotation"), [("token", "none"), ("head", "hadamard")])
def test_strides_beyond_32_bits_are_supported(tmp_path, axis, granularity, rotation):
    """A sparse file is the memory of a tensor of more than 2^31 elements, most of which are not accessed."""
    strides = [1, 1, 1, 1]
    strides[axis] = 2**29 + 8
    strides[5 - axis] = 2
    size = sum(stride * (count - 1) for stride, count in zip(strides, (1, 1, 6, 6), strict=True)) + 1
    memory = torch.from_file(str(tmp_path / "far"), shared=True, size=size, dtype=torch.float16)
    x = memory.as_strided((1, 1, 6, 6), strides)
    x.copy_(laid_out((1, 1, 6, 6), "bhsd", torch.float16))
    near, recipe = x.contiguous(), Recipe(granularity, rotation=rotation)
    ours, wanted = (quantised(each, recipe, transposed=True, rotate=True) for each in (x, near))
    assert torch.equal(bits(ours.data.contiguous()), bits(wanted.data.contiguous()))
    assert torch.equal(bits(ours.transposed), bits(wanted.transposed))
    assert torch.equal(ours.descale, wanted.descale)


@pytest.mark.parametrize(("axes", "granularity"), every_pair([(0, 2), (1, 3)], ["block", "head", "token", "tensor"]))
def test_expanded_tensors_are_read_without_a_copy(axes, granularity):
    shape = (2, 2, 130, 20)
    x = laid_out([1 if axis in axes else size for axis, size in enumerate(shape)], "bhsd", torch.bfloat16)
    recipe = Recipe(granularity)
    found = quantised(x.expand(shape), recipe, transposed=True)
    wanted = quantise(x.expand(shape), recipe)
    assert torch.equal(bits(found.data.contiguous()), bits(wanted.data.contiguous()))
    assert torch.equal(found.operand(recipe).descale.expand(2, 2, 130, 1), wanted.descale.expand(2, 2, 130, 1))
    assert_transposed_matches(found, 130)


def test_the_second_call_copies_nothing_from_the_host(monkeypatch):
    """Which the capture of a graph forbids; and what the first call keeps, in whatever mode, serves all others."""
    recipe = Recipe("head", rotation="hadamard", smoothing=True)
    x = laid_out((1, 1, 9, 52), "bhsd", torch.float32)
    with torch.inference_mode():
        first = quantised(x, recipe, rotate=True, smooth=True)
    monkeypatch.setattr(quantise_layout, "hadamard", lambda *_: pytest.fail("the rotation was asked for again"))
    again = quantised(x.requires_grad_(), recipe, rotate=True, smooth=True)
    assert torch.equal(bits(first.data.contiguous()), bits(again.data.contiguous()))
    assert torch.equal(first.mean, again.mean)


def test_gradients_do_not_flow_into_it():
    x = laid_out((1, 1, 9, 16), "bhsd", torch.float32).requires_grad_()
    found = quantised(x, Recipe("token", rotation="hadamard", smoothing=True), rotate=True, smooth=True)
    assert not any(each.requires_grad for each in (found.data, found.descale, found.mean))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(torch.zeros(2, 3, 4)), "B, H, S, D"),
        (Request(torch.zeros(1, 1, 0, 8)), "not empty"),
        (Request(torch.zeros(1, 1, 4, 8, dtype=torch.float64)), "float64"),
        (Request(torch.zeros(1, 3, 4, 8), group=2), "groups of 2"),
        (Request(torch.zeros(1, 3, 4, 8), group=0), "groups of 0"),
        (Request(torch.zeros(1, 3, 4, 8), rows=False), "rows, a transposed copy or both"),
        (Request(torch.zeros(1, 3, 4, 8, device="meta")), "one device"),
    ],
)
def test_unsupported_requests_are_errors(request_, message):
    with pytest.raises(InputError, match=message):
        quantised_together([Request(torch.zeros(1, 1, 4, 8)), request_], Recipe("head"))
