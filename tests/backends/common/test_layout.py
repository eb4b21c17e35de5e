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


def test_nothing_is_copied_or_cut() -> None:
    x = torch.randn(2, 3, 4, 16)
    assert padded(x, 16) is x
    with pytest.raises(ValueError, match="does not fit"):
        padded(x, 8)
