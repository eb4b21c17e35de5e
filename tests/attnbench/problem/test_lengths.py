"""Lengths as a spec describes them, and the checks of the tensors that hold them."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench import AttentionSpec, Mask
from attnbench.errors import InputError
from attnbench.problem.lengths import packed, padded
from attnbench.problem.lengths_kind import LengthsKind, bucket
from attnbench.problem.spec_text import short_fields
from examples import examples

PACKED = LengthsKind(batch="packed", square=True, total_q=64, total_kv=64)
SPEC = AttentionSpec.make(batch=4, heads=2, seqlen_q=32, head_dim=16, dtype="fp32", mask=Mask(right=0))
KINDS = (
    PACKED,
    replace(PACKED, square=False),
    replace(PACKED, square=False, total_kv=65),
    replace(PACKED, total_q=63, total_kv=63),
    LengthsKind(batch="padded"),
    LengthsKind(batch="padded", square=True),
    LengthsKind(batch="left-padded"),
)


def cumulative(*places: int) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.int32)


def test_specs_with_lengths_round_trip_and_have_distinct_texts() -> None:
    specs = [SPEC, *(SPEC.replace(lengths=kind) for kind in KINDS)]
    assert len({str(spec) for spec in specs}) == len(specs)
    for spec in specs:
        assert AttentionSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
        assert AttentionSpec.from_dict(json.loads(json.dumps(short_fields(spec)))) == spec


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"batch": "ragged"}, "batch must be one of"),
        ({"batch": "packed"}, "total_q must be the number of tokens"),
        ({"batch": "padded", "total_q": 3}, "this one is padded"),
        ({"batch": "packed", "square": True, "total_q": 3, "total_kv": 4}, "must be equal"),
        ({"batch": "padded", "square": 1}, "square must be"),
        ({"batch": "padded", "tokens": 1}, "have no entry"),
        ({}, "not a description"),
        (3, "must be an object"),
    ],
)
def test_invalid_lengths_data_is_refused(data: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        AttentionSpec.from_dict({**SPEC.to_dict(), "lengths": data})


@given(st.integers(1, 2**31))
def test_buckets_are_ordered_with_two_per_doubling(count: int) -> None:
    assert count <= bucket(count) <= max(1.5 * count, count + 1)
    assert bucket(bucket(count)) == bucket(count) <= bucket(count + 1)


@settings(max_examples=examples(60, 400))
@given(
    st.integers(1, 9), st.integers(1, 9), st.one_of(st.none(), st.integers(0, 9)),
    st.one_of(st.none(), st.integers(0, 9)), st.sampled_from(["top-left", "bottom-right"]),
)  # fmt: skip
def test_a_shortened_mask_equals_the_mask_of_every_shorter_sequence(
    longest_q: int, longest_kv: int, left: int | None, right: int | None, alignment: str
) -> None:
    mask = Mask(left, right, alignment)  # type: ignore[arg-type]
    short = mask.canonical_within(longest_q, longest_kv)
    for queries in range(1, longest_q + 1):
        for keys in range(1, longest_kv + 1):
            for row in range(queries):
                one, other = (each.span(row, queries, keys) for each in (mask, short))
                assert one == other or (one[0] == one[1] and other[0] == other[1])


def test_the_longest_length_is_read_once_until_the_lengths_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnbench.problem.lengths._readable", lambda _: False)  # as on a GPU
    q = torch.zeros(1, 1, 9, 4)
    places = cumulative(0, 2, 9)
    assert packed(q, q, places, places, None, None).longest_q == 7
    with torch.no_grad():
        places[1] = 4
    assert packed(q, q, places, places, None, None).longest_q == 5
    places.tolist = None  # type: ignore[method-assign]
    places.detach = None  # type: ignore[method-assign]  # reading it again would raise
    assert packed(q, q, places, places, None, None).longest_q == 5


Q = torch.zeros(1, 1, 9, 4)


@pytest.mark.parametrize(
    ("given_q", "given_kv", "longest", "message"),
    [
        (cumulative(0, 5, 4, 9), None, None, "ascend"),
        (cumulative(1, 9), None, None, "ascend"),
        (cumulative(0, 10), None, None, "ascend"),
        (cumulative(0, 8), None, None, "ascend"),
        (cumulative(0, 9).long(), None, None, "must be int32"),
        (cumulative(0, 9)[None], None, None, "shape"),
        (cumulative(0, 0, 9, 9)[::2], None, None, "contiguous"),
        (cumulative(0), None, None, "one more"),
        ([0, 9], None, None, "torch.Tensor"),
        (cumulative(0, 9), cumulative(0, 3, 9), None, "as many sequences"),
        (cumulative(0, 9).to("meta"), None, None, "is on meta"),
        (cumulative(0, 2, 9), None, 6, "has 7 tokens"),
        (cumulative(0, 9), None, 0, "at least 1"),
        (cumulative(0, 9), None, 2.0, "whole number"),
    ],
)
def test_invalid_cumulative_lengths_are_named(given_q: object, given_kv: object, longest: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        packed(Q, Q, given_q, given_q if given_kv is None else given_kv, longest, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "side", "message"),
    [
        (cumulative(10), "right", "between 0 and 9"),
        (cumulative(-1), "right", "between 0 and 9"),
        (cumulative(1, 2), "right", "one length a row"),
        (cumulative(1).float(), "right", "int32"),
        (cumulative(1), "middle", "padding_side"),
    ],
)
def test_invalid_row_lengths_are_named(lengths: torch.Tensor, side: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        padded(Q, Q, None, lengths, side)
