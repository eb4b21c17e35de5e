"""Shapes drawn from published models: all read, each legal, the same in every run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.errors import InputError
from attnbench.harness.cases.models import ModelAttention, drawn_cases, published_models


def test_there_are_many_models_each_named_once_and_with_a_source():
    models = published_models()
    assert len(models) >= 40
    assert len({model.name for model in models}) == len(models)
    assert all(model.source.count("/") == 1 for model in models)
    assert {model.head_dim for model in models} >= {64, 72, 80, 96, 104, 128, 192, 256}


def test_an_entry_says_what_it_says():
    masks = [{"window": 128}, {"around": 3}]
    entry = {"name": "a", "source": "b/c", "heads": 8, "kv_heads": 2, "head_dim": 64, "masks": masks}
    model = ModelAttention.of(entry)
    assert [(mask.left, mask.right) for mask in model.masks] == [(127, 0), (3, 3)]
    assert (model.head_dim_v, model.softcap, model.lengths) == (64, 0.0, (128, 131072))


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_draws_are_different_bounded_and_the_same_whatever_the_count(seed, count):
    cases = drawn_cases(count, seed, "cuda")
    assert len({case.spec for case in cases}) == len({case.name for case in cases}) == count
    assert drawn_cases(count + 1, seed, "cuda")[:count] == cases
    models = {model.name: model for model in published_models()}
    for case in cases:
        model = models[case.name.partition(":")[0]]
        spec = case.spec
        assert model.lengths[0] <= spec.seqlen_q <= model.lengths[1] or spec.seqlen_q % 128 == 0
        assert spec.heads * model.kv_heads == spec.kv_heads * model.heads
        assert spec.batch * spec.seqlen_q <= max(131072, spec.seqlen_q)
        assert spec.replace(direction="forward").flops <= 2e14


def test_lengths_span_what_models_are_used_at_and_directions_and_batches_vary():
    specs = [case.spec for case in drawn_cases(200, 1, "cuda")]
    assert min(spec.seqlen_q for spec in specs) < 256
    assert max(spec.seqlen_q for spec in specs) > 65536
    assert any(spec.seqlen_q % 128 for spec in specs)
    assert {spec.direction for spec in specs} == {"forward", "training"}
    assert max(spec.batch for spec in specs) > 16
    assert max(case.spec.flops for case in drawn_cases(20, 1, "cpu")) < 1e10


def test_no_shapes_is_misuse():
    with pytest.raises(InputError, match="positive number of shapes"):
        drawn_cases(0, 1, "cuda")
