"""Classes of specs: what tells them apart, what does not, and how far specs of one class are from one another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench import AttentionSpec, Mask
from attnbench.choosing.similarity import class_of, distance, of_one_length
from attnbench.problem.lengths_kind import LengthsKind


def spec(**more) -> AttentionSpec:
    return AttentionSpec.make(**{"batch": 4, "heads": 8, "seqlen_q": 1024, "head_dim": 64, **more})


@pytest.mark.parametrize(
    "other",
    [
        {"head_dim": 128}, {"head_dim_v": 32}, {"mask": Mask(right=0)}, {"kv_heads": 2}, {"softcap": 50.0},
        {"scale": 1.0}, {"lengths": LengthsKind(batch="padded")}, {"dtype": "fp16"}, {"direction": "training"},
    ],
)  # fmt: skip
def test_specs_that_differ_in_anything_but_sizes_are_of_classes_with_other_names(other):
    """No evidence crosses to another type or direction."""
    one, another = class_of(spec()), class_of(spec(**other))
    assert one != another
    assert str(one) != str(another)
    assert (one.kind != another.kind) == bool(other.keys() & {"dtype", "direction"})


def test_empty_rows_and_scales_of_fp8_make_another_class():
    full, empty = (class_of(spec(seqlen_kv=keys, mask=Mask(right=0, alignment="bottom-right"))) for keys in (1024, 64))
    assert (full.has_empty_rows, empty.has_empty_rows) == (False, True)
    assert str(full) != str(empty)
    whole, heads = (class_of(spec(dtype="e4m3", descale=each)) for each in ("tensor", "head"))
    assert whole.kind != heads.kind
    assert str(whole) != str(heads)


def test_each_doubling_of_a_size_is_a_distance_of_one():
    assert distance(spec(), spec()) == 0
    for other in ({"batch": 8}, {"batch": 2}, {"seqlen_kv": 512}, {"seqlen_kv": 2048}, {"heads": 16}):
        assert distance(spec(), spec(**other)) == distance(spec(**other), spec()) == 1
    assert distance(spec(), spec(batch=8, seqlen_kv=512)) == 2  # one up and one down
    assert distance(spec(kv_heads=2), spec(kv_heads=4)) == 1


@given(st.integers(1, 64), st.integers(1, 4096), st.floats(0, 1))
def test_a_packed_batch_is_as_far_from_others_as_its_tokens_in_sequences_of_one_length(sequences, longest, filled):
    total = max(1, round(filled * sequences * longest))
    packed = spec(
        batch=sequences,
        seqlen_q=longest,
        lengths=LengthsKind(batch="packed", square=True, total_q=total, total_kv=total),
    )
    equal = of_one_length(packed)
    assert equal.lengths is None
    assert equal.seqlen_q <= longest
    assert distance(packed, equal) == 0
    padded = spec(batch=sequences, seqlen_q=longest, lengths=LengthsKind(batch="padded"))
    assert of_one_length(padded) == padded.replace(lengths=None)
