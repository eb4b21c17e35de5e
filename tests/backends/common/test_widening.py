"""FP8 to 16 bits under Triton's interpreter, which rounds bf16 towards zero and knows no infinity in FP8."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnbench.backends.common.widening import widened

NARROW = [torch.float8_e4m3fn, torch.float8_e5m2]
UNIT = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.sampled_from(NARROW),
    st.sampled_from(list(UNIT)),
    st.floats(2.0**-10, 2.0**10),
    st.randoms(use_true_random=False),
)
def test_widening_rounds_the_product_once_and_keeps_the_layout(shape, narrow, wide, factor, random):
    axes = random.sample(range(len(shape)), len(shape))
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    x = torch.randn(shape, generator=generator).to(narrow).permute(axes)
    before = x.view(torch.uint8).clone()
    found = widened(x, torch.tensor(factor), wide)
    wanted = x.to(torch.float64) * torch.tensor(factor).double()
    assert (found.dtype, found.shape) == (wide, x.shape)
    assert found.stride() == torch.empty_like(x, dtype=wide).stride()
    assert torch.all((found.double() - wanted).abs() <= UNIT[wide] * wanted.abs() + torch.finfo(wide).smallest_normal)
    assert torch.equal(x.view(torch.uint8), before)


@pytest.mark.parametrize("narrow", NARROW)
def test_strided_views_are_widened_without_a_copy(narrow):
    x = torch.randn(3, 10_000, generator=torch.Generator().manual_seed(0)).to(narrow)
    for part in (x[:, ::2], x[1:, 3:], x[:1].expand(3, -1)):
        assert torch.equal(widened(part, torch.tensor(0.5), torch.float32), part.float() * 0.5)
