"""Masks as windows: each query sees the keys of the mask, as each generation of FlashAttention reads the window."""

from collections.abc import Callable

import pytest
from problems import every_mask

from attnbench.backends.common.windows import Window, bottom_right, flash2_window


def expected_window(window: Window, sq: int) -> tuple[int, int]:
    return window.left, window.right


def flash_2(window: Window, sq: int) -> tuple[int, int]:
    left, right = (-1 if side >= window.keys else side for side in window[1:])  # mha_fwd
    # set_params_fprop
    return (window.keys if left < 0 <= right else left), (window.keys if right < 0 <= left else right)


def flash_3(window: Window, sq: int) -> tuple[int, int]:
    left, right = window[1:]
    return (-1 if left >= window.keys - 1 else left), (-1 if right >= sq - 1 else right)  # mha_fwd


@pytest.mark.parametrize(
    ("made", "read"), [(bottom_right, expected_window), (bottom_right, flash_3), (flash2_window, flash_2)]
)
def test_a_window_shows_each_query_the_keys_of_the_mask(made: Callable, read: Callable) -> None:
    served = refused = 0
    for mask, sq, skv in every_mask():
        spans = [mask.span(row, sq, skv) for row in range(sq)]
        window = made(mask, sq, skv)
        if isinstance(window, str):
            assert sq > skv
            # The last query sees no key, or FlashAttention-2 would lift the side that reaches beyond all keys.
            assert spans[-1][0] == spans[-1][1] or "beyond all" in window
            refused += 1
            continue
        left, right = read(window, sq)
        seen = [
            [j for j in range(window.keys)
             if (left < 0 or j >= i + window.keys - sq - left) and (right < 0 or j <= i + window.keys - sq + right)]
            for i in range(sq)
        ]  # fmt: skip
        assert seen == [list(range(*span)) for span in spans], (mask, sq, skv)
        served += 1
    assert served > (10 if made is bottom_right else 5) * refused > 0
