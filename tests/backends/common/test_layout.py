"""Padding of head dimensions: what it adds, what it leaves alone, and that attention does not notice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnbench.backends.common.layout import padded, rounded_up


@given(st.integers(1, 600), st.sampled_from([1, 8, 16, 64]))
def test_rounding_up_gives_the_smallest_multiple(size: int, step: int) -> None:
    assert rounded_up(size, step) == next(n for n in range(size, size + step) if n % step == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("strided", [False, True])
def test_zeros_stand_behind_the_same_numbers(dtype: torch.dtype, strided: bool) -> None:
    x = torch.randn(2, 3, 4, 10).to(dtype)
    x = x.transpose(1, 2) if strided else x
    wide = padded(x, 16)
    assert wide.dtype == dtype
    assert torch.equal(wide[..., :10].float(), x.float())
    assert torch.equal(wide[..., 10:].float(), torch.zeros(*x.shape[:-1], 6))


def test_nothing_is_copied_or_cut() -> None:
    x = torch.randn(2, 3, 4, 16)
    assert padded(x, 16) is x
    with pytest.raises(ValueError, match="does not fit"):
        padded(x, 8)


def test_attention_is_the_same_on_padded_tensors() -> None:
    q, k, v = (torch.randn(1, 2, 9, 10, dtype=torch.float64) for _ in range(3))
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3)
    wide = torch.nn.functional.scaled_dot_product_attention(*(padded(x, 16) for x in (q, k, v)), scale=0.3)
    torch.testing.assert_close(wide, padded(plain, 16))
