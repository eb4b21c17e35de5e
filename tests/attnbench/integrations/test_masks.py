"""Mask tensors given to the SDPA replacement: read at each call, and refused like torch refuses them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from attnbench.errors import InputError
from attnbench.integrations import mask_tensors
from attnbench.integrations.sdpa import replaced


@given(
    first=st.integers(0, 3), second=st.integers(0, 3), batch=st.sampled_from([(), (1, 1), (2, 1), (2, 3)]),
    floating=st.booleans(), large=st.booleans(),
)  # fmt: skip
def test_a_cached_mask_is_compared_with_every_entry(first, second, batch, floating, large):
    """Reading changed memory again gives the result of a first reading."""
    full = torch.ones(5, 5, dtype=torch.bool)
    hole = full.clone()
    hole[2, 1] = False
    kinds = [full, full.tril(), full.tril(1).triu(-1), hole]
    if floating:
        kinds = [torch.zeros(5, 5).masked_fill(~each, -torch.inf) for each in kinds]
    memory = kinds[first].expand(*batch, 5, 5).clone()
    masks = mask_tensors.MaskTensors()
    masks.read(memory, 5, 5)
    memory.data.view(-1, 5, 5)[-1] = kinds[second]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_tensors, "_SMALL", 0 if large else 2**20)
        again = masks.read(memory, 5, 5)
    assert again == mask_tensors.MaskTensors().read(memory, 5, 5)


def test_an_unchanged_mask_is_compared_and_not_recognised_again(monkeypatch):
    seen, look = [], mask_tensors.mask_of_tensor
    monkeypatch.setattr(mask_tensors, "mask_of_tensor", lambda *args: seen.append(args) or look(*args))
    q = tensor(1, 2, 6, 8)
    one, other = torch.ones(6, 6, dtype=torch.bool).tril(), torch.ones(6, 6, dtype=torch.bool)
    with replaced("reference"):
        for _ in range(3):
            for mask in (one, other):
                F.scaled_dot_product_attention(q, q, q, mask)
        assert len(seen) == 2
    masks = mask_tensors.MaskTensors()
    for size in range(1, 200):
        masks.read(torch.ones(size, size, dtype=torch.bool), size, size)
    assert len(masks._guesses) <= 64


def test_unreadable_masks_are_refused_in_one_sentence():
    q = tensor(2, 3, 6, 8)
    for queries, keys, mask in (
        (q, q[:, :, :0], torch.ones(6, 0, dtype=torch.bool)),
        (q[:, :, :0], q, torch.ones(0, 6, dtype=torch.bool)),
        (q, q, causal_lower_right(4, 6)),  # of other lengths
        (q, q, torch.zeros(6, 6, requires_grad=True)),  # learned
    ):
        with replaced(), pytest.raises(InputError, match="biases or blocks"):
            F.scaled_dot_product_attention(queries, keys, keys, mask)
    masks = torch.ones(2, 6, 6, dtype=torch.bool)
    with replaced(), pytest.raises(InputError, match="biases or blocks"):
        torch.vmap(lambda q, mask: F.scaled_dot_product_attention(q, q, q, mask))(q, masks)


Q = (2, 3, 6, 8)
WRONG = {
    "fp16 mask": {"attn_mask": torch.zeros(6, 6, dtype=torch.float16)},
    "integers": {"attn_mask": torch.ones(6, 6, dtype=torch.int32)},
    "five axes": {"attn_mask": torch.ones(1, 1, 1, 6, 6, dtype=torch.bool)},
    "another length": {"attn_mask": torch.ones(5, 5, dtype=torch.bool)},
    "negative dropout": {"dropout_p": -0.1},
    "dropout that is no number": {"dropout_p": float("nan")},
    "a causal bias and is_causal": {"attn_mask": causal_upper_left(6, 6), "is_causal": True},
}


@pytest.mark.parametrize("otherwise", ["raise", "torch"])
@pytest.mark.parametrize("named", WRONG.values(), ids=WRONG)
def test_calls_that_torch_refuses_raise_torchs_exception(named, otherwise):
    q = tensor(*Q)
    with pytest.raises(Exception) as torchs:  # noqa: PT011 - whatever torch raises
        F.scaled_dot_product_attention(q, q, q, **named)
    with replaced(otherwise=otherwise), pytest.raises(torchs.type) as ours:
        F.scaled_dot_product_attention(q, q, q, **named)
    assert type(ours.value) is torchs.type


def test_autocast_accepts_the_masks_that_torch_accepts():
    q = tensor(*Q)
    with torch.autocast("cpu", torch.bfloat16), replaced("reference") as calls:
        F.scaled_dot_product_attention(q, q, q, torch.zeros(6, 6, dtype=torch.float16))
        with pytest.raises(RuntimeError, match="Expected attn_mask dtype"):
            F.scaled_dot_product_attention(q, q, q, torch.zeros(6, 6, dtype=torch.float64))
    assert calls.served == 1


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(6, 6), (4, 6), (6, 4)])
def test_torchs_causal_biases_are_served(make, seqlen_q, seqlen_kv):
    q, k = tensor(1, 2, seqlen_q, 8), tensor(1, 2, seqlen_kv, 8, seed=1)
    bias = make(seqlen_q, seqlen_kv)
    with replaced("reference") as calls:
        if make is causal_lower_right and seqlen_q > seqlen_kv:  # queries without a key, NaN to torch
            with pytest.raises(InputError, match="biases or blocks"):
                F.scaled_dot_product_attention(q, k, k, bias)
            return
        found = F.scaled_dot_product_attention(q, k, k, bias)
    assert calls.served == 1
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, k, bias), rtol=1e-4, atol=1e-5)
