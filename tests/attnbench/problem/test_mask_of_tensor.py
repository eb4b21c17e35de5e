"""Mask tensors are recognised exactly: every mask, and no tensor that differs from one in a single entry."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from attnbench.problem import mask_of_tensor as module
from attnbench.problem.mask import Mask
from attnbench.problem.mask_of_tensor import mask_of_tensor

SIZES = st.integers(1, 9)
SIDES = st.none() | st.integers(0, 9)


def visible(mask: Mask, seqlen_q: int, seqlen_kv: int) -> torch.Tensor:
    rows, keys = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_kv)
    centre = rows + mask.offset(seqlen_q, seqlen_kv)
    seen = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool)
    if mask.left is not None:
        seen &= keys >= centre - mask.left
    if mask.right is not None:
        seen &= keys <= centre + mask.right
    return seen


def additive_mask(seen: torch.Tensor, hidden: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden)


@given(
    SIDES,
    SIDES,
    st.sampled_from(("top-left", "bottom-right")),
    SIZES,
    SIZES,
    st.sampled_from((None, -torch.inf, "least", -1e9)),
    st.integers(1, 30),
)
def test_every_mask_is_recognised_from_its_tensor(left, right, alignment, seqlen_q, seqlen_kv, hidden, chunk):
    mask = Mask(left, right, alignment)
    assume(not mask.has_empty_rows(seqlen_q, seqlen_kv))
    seen = visible(mask, seqlen_q, seqlen_kv)
    tensor = seen
    if hidden is not None:
        dtype = torch.bfloat16 if hidden == "least" else torch.float32
        tensor = additive_mask(seen, torch.finfo(dtype).min if hidden == "least" else hidden, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        found = mask_of_tensor(tensor.expand(2, 3, -1, -1), seqlen_q, seqlen_kv)
    assert found is not None
    assert torch.equal(visible(found, seqlen_q, seqlen_kv), seen)


@given(SIDES, SIDES, st.integers(2, 9), st.integers(2, 9), st.data())
def test_a_tensor_with_one_changed_entry_is_another_mask_or_none(left, right, seqlen_q, seqlen_kv, data):
    mask = Mask(left, right)
    assume(not mask.has_empty_rows(seqlen_q, seqlen_kv))
    tensor = visible(mask, seqlen_q, seqlen_kv).repeat(2, 2, 1, 1)
    place = tuple(data.draw(st.integers(0, size - 1)) for size in tensor.shape)
    tensor[place] ^= True
    assert mask_of_tensor(tensor, seqlen_q, seqlen_kv) is None  # the other heads still have the first mask


def test_a_partly_filled_cache_is_a_window_and_all_keys_are_no_mask():
    seen = torch.arange(32) < 7
    assert mask_of_tensor(seen, 1, 32) == Mask(right=6)
    assert mask_of_tensor(torch.ones(1, 1, 1, 1, dtype=torch.bool), 4, 8) == Mask()


CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    "tensor",
    [
        additive_mask(CAUSAL, -100.0, torch.float32),  # exp(-100) is not 0
        additive_mask(CAUSAL, -torch.inf, torch.float32) + 0.5 * torch.eye(4),
        additive_mask(CAUSAL, torch.nan, torch.float32),
        CAUSAL & torch.tensor([False, True, True, True]),  # padding on the left: the first row sees nothing
        CAUSAL.new_zeros(4, 4),
        torch.eye(4, dtype=torch.bool).flip(0),
        torch.tensor([True, False, True, True]).expand(4, 4),
        torch.stack([CAUSAL, CAUSAL.T]),
        CAUSAL.new_zeros(0, 4, 4),
        CAUSAL.new_ones(4, 0),
        torch.ones(2, 3, 0, 4),
    ],
)
def test_unsupported_mask_tensors_are_not_recognised(tensor):
    assert mask_of_tensor(tensor, *tensor.shape[-2:]) is None
