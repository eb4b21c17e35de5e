"""Masks and specs, compared with explicit counting; tensors that are a mask are recognised, and no others."""

import json
import pickle
from dataclasses import fields

import pytest
import torch
from dense import visible
from hypothesis import assume, given
from hypothesis import strategies as st
from problems import masks, problems

from attnbench import AttentionSpec, Mask
from attnbench.errors import InputError
from attnbench.problem import mask_of_tensor as module
from attnbench.problem.mask_of_tensor import mask_of_tensor

lengths = st.integers(1, 40)


@given(masks(), lengths, lengths)
def test_span_hidden_keys_area_and_empty_rows_agree_with_counting(mask, seqlen_q, seqlen_kv):
    spec = AttentionSpec.make(batch=1, heads=1, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, head_dim=8, mask=mask)
    sees = visible(spec)
    for mask_ in (mask, spec.mask):
        for row in range(seqlen_q):
            start, stop = mask_.span(row, seqlen_q, seqlen_kv)
            assert [j for j in range(seqlen_kv) if sees[row, j]] == list(range(start, stop))
        rows = torch.tensor([seqlen_q - 1, *range(seqlen_q)])
        hidden = mask_.hidden(rows, torch.arange(seqlen_kv), seqlen_q, seqlen_kv)
        assert hidden is None if mask_.kind == "none" else torch.equal(~hidden, sees[rows])
        assert mask_.area(seqlen_q, seqlen_kv) == int(sees.sum())
        assert mask_.has_empty_rows(seqlen_q, seqlen_kv) == bool((~sees.any(1)).any())


@given(masks(), lengths, lengths)
def test_canonical_masks_are_equivalent_and_unique(mask, seqlen_q, seqlen_kv):
    once = mask.canonical(seqlen_q, seqlen_kv)
    assert once.canonical(seqlen_q, seqlen_kv) == once
    specs = [
        AttentionSpec.make(batch=1, heads=1, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, head_dim=8, mask=each)
        for each in (mask, once)
    ]
    assert specs[0] == specs[1]
    assert hash(specs[0]) == hash(specs[1])
    if seqlen_q == seqlen_kv:
        assert once.alignment == "top-left"


@given(problems())
def test_specs_round_trip_through_json_and_have_distinct_names(problem):
    spec = problem.spec
    assert AttentionSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    for change in ({"batch": spec.batch + 1}, {"direction": "forward"}, {"scale": 0.77}, {"seqlen_kv": 71}):
        assert str(spec.replace(**change)) != str(spec)


def test_a_pickled_spec_contains_only_its_fields():
    """A spec caches its hash, and string hashes differ in another process."""
    spec = AttentionSpec.make(batch=1, heads=1, seqlen_q=8, head_dim=8)
    assert hash(spec) == hash(spec.replace(batch=1)) != hash(spec.replace(batch=2))
    again = pickle.loads(pickle.dumps(spec))
    assert vars(again).keys() == {each.name for each in fields(spec)}
    assert {again: 1}[spec] == 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"batch": 0}, "batch"),
        ({"heads": 6, "kv_heads": 4}, "multiple of kv_heads"),
        ({"seqlen_q": -1}, "seqlen_q"),
        ({"seqlen_kv": 2**40}, "seqlen_kv"),
        ({"head_dim": 64.0}, "head_dim"),
        ({"dtype": "int8"}, "dtype"),
        ({"scale": float("nan")}, "scale"),
        ({"scale": float("inf")}, "scale"),
        ({"softcap": -1.0}, "softcap"),
        ({"direction": "backward"}, "direction"),
        ({"dtype": "e4m3"}, "descales"),
        ({"descale": "head"}, "descales"),
        ({"dtype": "e4m3", "descale": "row"}, "descale"),
    ],
)
def test_impossible_specs_are_errors_that_name_what_is_wrong(change, word):
    with pytest.raises(InputError, match=word):
        AttentionSpec.make(**{"batch": 1, "heads": 4, "seqlen_q": 8, "head_dim": 64, **change})


@pytest.mark.parametrize("arguments", [(-1, 0), (0, -2), (1.5, 0), (True, 0), (0, 0, "middle")])
def test_impossible_masks_are_input_errors(arguments):
    with pytest.raises(InputError):
        Mask(*arguments)


# --- from tensors ---

SIZES = st.integers(1, 9)
SIDES = st.none() | st.integers(0, 9)
WINDOWS = st.builds(Mask, SIDES, SIDES, st.sampled_from(["top-left", "bottom-right"]))


def seen_by(mask: Mask, seqlen_q: int, seqlen_kv: int) -> torch.Tensor:
    """(Sq, Skv): the visible keys, by explicit counting."""
    sizes = {"batch": 1, "heads": 1, "head_dim": 8, "seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv}
    return visible(AttentionSpec.make(**sizes, mask=mask))


def additive_mask(seen: torch.Tensor, hidden: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden)


@given(WINDOWS, SIZES, SIZES, st.sampled_from((None, -torch.inf, "least", -1e9)), st.integers(1, 30))
def test_every_mask_is_recognised_from_its_tensor(mask, seqlen_q, seqlen_kv, hidden, chunk):
    assume(not mask.has_empty_rows(seqlen_q, seqlen_kv))
    seen = seen_by(mask, seqlen_q, seqlen_kv)
    tensor = seen
    if hidden is not None:
        dtype = torch.bfloat16 if hidden == "least" else torch.float32
        tensor = additive_mask(seen, torch.finfo(dtype).min if hidden == "least" else hidden, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        found = mask_of_tensor(tensor.expand(2, 3, -1, -1), seqlen_q, seqlen_kv)
    assert found is not None
    assert torch.equal(seen_by(found, seqlen_q, seqlen_kv), seen)


@given(SIDES, SIDES, st.integers(2, 9), st.integers(2, 9), st.data())
def test_a_tensor_with_one_changed_entry_is_another_mask_or_none(left, right, seqlen_q, seqlen_kv, data):
    mask = Mask(left, right)
    assume(not mask.has_empty_rows(seqlen_q, seqlen_kv))
    tensor = seen_by(mask, seqlen_q, seqlen_kv).repeat(2, 2, 1, 1)
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
        CAUSAL.expand(0, 4, 4),
        CAUSAL.new_ones(4, 0),
        torch.ones(2, 3, 0, 4),
    ],
)
def test_unsupported_mask_tensors_are_not_recognised(tensor):
    assert mask_of_tensor(tensor, *tensor.shape[-2:]) is None
