"""Masks and specs: visible keys and their counts, compared with explicit counting."""

import json
import pickle
from dataclasses import fields

import pytest
import torch
from dense import visible
from hypothesis import given
from hypothesis import strategies as st
from problems import masks, problems

from attnbench import AttentionSpec, Mask
from attnbench.errors import InputError

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
