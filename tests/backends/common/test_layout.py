"""Layouts that kernels can read are not copied; others are copied with the same values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnbench.backends.common.layout import aligned, near, padded
from attnbench.backends.flash_attention import fa4
from attnbench.backends.flash_attention.fa3_operands import readable

READERS = {
    "aligned": aligned,
    "fa3": lambda x: readable(x).transpose(1, 2),
    "fa4": lambda x: fa4._bshd(x).transpose(1, 2),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_only_unreadable_layouts_are_copied(read: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = torch.randn(2, 4, 8, 32).to(dtype)
    short = torch.randn(2, 4, 8, 16).to(dtype)  # rows of 16 or 32 bytes
    for fits in (x, short, x.transpose(1, 2).contiguous().transpose(1, 2), x[:, :, ::2], x[:, 1:2], padded(x, 32)):
        assert read(fits).data_ptr() == fits.data_ptr()
    if read is aligned:  # no other row is ever read
        assert read(lone := x[:1].as_strided((1, 4, 8, 32), (7, 256, 32, 1))) is lone
    odd = torch.randn(2, 4, 8, 33).to(dtype)
    shifted = torch.zeros(x.numel() + 1, dtype=dtype)[1:].view(x.shape)
    for broken in (x.mT.contiguous().mT, odd[..., :32], shifted):
        copy = read(broken)
        assert copy.data_ptr() != broken.data_ptr()
        assert copy.data_ptr() % 16 == 0
        assert all(stride * copy.element_size() % 16 == 0 for stride in copy.stride()[:-1])
        assert torch.equal(copy.float(), broken.float())


@pytest.mark.parametrize(
    ("strides", "copied"),
    [
        ((2**31 + 64, 64, 32, 1), (False, True)),  # batch entries far apart
        ((64, 2**31 - 64, 32, 1), (False, True)),  # the last element of an entry is the last that 32 bits count
        ((64, 2**31, 32, 1), (True, True)),
        ((64, 32, 2**31, 1), (True, True)),
    ],
    ids=["entries", "just within", "heads", "tokens"],
)
def test_views_beyond_what_32_bits_count_are_copied(
    strides: tuple[int, int, int, int], copied: tuple[bool, bool]
) -> None:
    memory = torch.empty(2**31 + 256, dtype=torch.uint8)  # of which a test touches a few pages
    x = memory.as_strided((2, 2, 2, 32), strides)
    x.copy_(torch.arange(x.numel()).view(x.shape))
    for whole, copy in zip((False, True), copied, strict=True):
        found = near(x, whole=whole)
        assert (found.data_ptr() != memory.data_ptr()) == copy
        assert torch.equal(found, x)
