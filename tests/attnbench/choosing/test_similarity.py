"""Classes of specs, how far specs of one class are from one another, and what is evidence for packed batches."""

import pytest
from choices import entry, spec, table
from hypothesis import given
from hypothesis import strategies as st

from attnbench import AttentionSpec, Mask, Plan
from attnbench.choosing.evidence import Evidence
from attnbench.choosing.similarity import class_of, distance, of_one_length
from attnbench.problem.lengths_kind import LengthsKind
from attnbench.tables.user_table import Known


def packed(sequences: int, longest: int, total: int) -> AttentionSpec:
    kind = LengthsKind(batch="packed", square=True, total_q=total, total_kv=total)
    return spec(batch=sequences, seqlen_q=longest, lengths=kind)


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
    for other in ({"batch": 2}, {"seqlen_kv": 512}, {"seqlen_kv": 2048}, {"heads": 8}):
        assert distance(spec(), spec(**other)) == distance(spec(**other), spec()) == 1
    assert distance(spec(), spec(batch=2, seqlen_kv=512)) == 2  # one up and one down
    assert distance(spec(kv_heads=1), spec(kv_heads=2)) == 1


@given(st.integers(1, 64), st.integers(1, 4096), st.floats(0, 1))
def test_a_packed_batch_is_as_far_from_others_as_its_tokens_in_sequences_of_one_length(sequences, longest, filled):
    total = max(1, round(filled * sequences * longest))
    batch = packed(sequences, longest, total)
    equal = of_one_length(batch)
    assert equal.lengths is None
    assert equal.seqlen_q <= longest
    assert distance(batch, equal) == 0
    padded = spec(batch=sequences, seqlen_q=longest, lengths=LengthsKind(batch="padded"))
    assert of_one_length(padded) == padded.replace(lengths=None)


def test_equal_length_measurements_are_evidence_for_packed_batches():
    """Times are predicted from equal work, errors from the longest sequence; both with larger uncertainty."""
    fast, narrow = Plan.parse("fast:bf16"), Plan.parse("fast:fp8")
    at = [spec(batch=2, seqlen_q=n) for n in (1024, 2048, 4096)]
    measured = [entry(name, n.flops / 1e9, n) for n in at for name in ("fast:bf16", "fast:fp8")]
    asked = packed(16, 8192, 16384)
    equal = of_one_length(asked)
    assert 1024 < equal.seqlen_q < 4096
    assert equal.flops == pytest.approx(asked.flops, rel=0.1)
    known = Known.of(table(*measured))
    found, alone = (Evidence(each, known).candidate(fast, 0.1, 1.0) for each in (asked, equal))
    assert (found.verdict, found.basis) == ("eligible", "predicted")
    assert found.time_ms == pytest.approx(alone.time_ms, rel=0.03)
    assert found.time_error > alone.time_error
    assert 1 < found.error / alone.error < 1.1
    assert Evidence(asked, known).candidate(narrow, 0.1, None).verdict == "unmeasured"  # with 8,192 keys


def test_measured_packed_batches_outweigh_equal_length_measurements():
    """In times and in errors, at their spec and near it; a plan that has none is still predicted from the others."""
    fast, slow = Plan.parse("fast:bf16"), Plan.parse("slow:bf16")
    at = [spec(batch=16, seqlen_q=n) for n in (512, 1024, 2048, 4096)]  # enough to keep a GPU busy
    measured = [entry(name, n.flops / 1e9, n, normal=0.004) for n in at for name in ("fast:bf16", "slow:bf16")]
    own = [packed(n, 4096, 16384) for n in (6, 8, 12, 16)]
    measured += [entry("fast:bf16", 2 * n.flops / 1e9, n, normal=0.008) for n in own]
    asked = packed(8, 2896, 11586)
    known = Known.of(table(*measured))
    found, borrowed = (Evidence(asked, known).candidate(plan, 0.1, 1.0) for plan in (fast, slow))
    assert found.time_ms == pytest.approx(2 * asked.flops / 1e9, rel=0.15)
    assert borrowed.time_ms == pytest.approx(asked.flops / 1e9, rel=0.15)
    assert 0.008 <= found.error < 0.0105
    assert 0.004 <= borrowed.error < 0.005
    here = Evidence(own[0], known).candidate(fast, 0.1, 1.0)
    assert (here.basis, here.time_ms, here.error) == ("measured", 2 * own[0].flops / 1e9, 0.008)
    dense = spec(batch=16, seqlen_q=1448)  # of which packed ones say nothing: most of their tokens see fewer keys
    alone = Known.of(table(*(each for each in measured if each.spec.lengths is None)))
    assert Evidence(dense, known).candidate(fast, 0.1, 1.0) == Evidence(dense, alone).candidate(fast, 0.1, 1.0)
    assert Evidence(spec(batch=16, seqlen_q=8192), known).candidate(fast, 0.1, None).verdict == "unmeasured"
