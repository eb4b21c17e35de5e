"""The check of far views, its distances in miniature: a right plan passes, one that counts in few bits does not."""

from __future__ import annotations

from typing import Any

import far_views
import pytest
import torch
from torch import Tensor

from attnbench import attention

FAR = 2**14


def in_14_bits(x: Tensor) -> Tensor:
    """What a kernel reads that drops all higher bits of an element's place in memory."""
    place = torch.zeros(x.shape, dtype=torch.int64) + x.storage_offset()
    for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        place += (torch.arange(size) * stride).view([-1 if each == axis else 1 for each in range(4)])
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())[place % FAR]


@pytest.mark.parametrize("layout", far_views.LAYOUTS)
def test_a_plan_that_counts_in_few_bits_is_found(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = far_views.Job("sdpa-flash:bf16", layout)
    assert far_views.problem_of(job, "cpu", FAR) is None

    def wrong(*inputs: Tensor, **options: Any) -> Tensor:
        return attention(*(x if x.is_contiguous() else in_14_bits(x) for x in inputs), **options)

    monkeypatch.setattr(far_views, "attention", wrong)
    assert "out is off by" in (far_views.problem_of(job, "cpu", FAR) or "")
