"""Shapes drawn from published models: all read, each legal, the same in every run, and spread over what users have."""

import re
from importlib.resources import files
from itertools import product
from statistics import fmean

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from attnbench.choosing.similarity import distance
from attnbench.errors import InputError
from attnbench.harness.cases.models import ModelAttention, drawn_cases, model_layers, published_models
from attnbench.harness.cases.spread import spread_shapes
from attnbench.harness.sequence_lengths import check_lengths
from attnbench.kernels.capabilities import Device
from attnbench.kernels.registry import registry
from attnbench.problem.spec import AttentionSpec

ENTRIES = yaml.safe_load(files("attnbench.harness.cases").joinpath("models.yaml").read_text(encoding="utf-8"))
MODELS = {model.name: model for model in published_models()}
A_FILE, A_PAGE = r"[\w.-]+/[\w.-]+:[\w./-]+\.(py|md|yml|yaml|json|rs)", r"https://[\w.-]+\.\w+/[\w./:-]+"
ENTRY = {"name": "a", "source": "b/c", "seen": ["d/e:f.py"], "heads": 8, "head_dim": 64, "masks": ["none"]}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["name"])
def test_each_entry_is_complete_and_describes_attention(entry):
    model = ModelAttention.of(entry)
    assert set(entry) <= set(ModelAttention.__dataclass_fields__)
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", model.source)
    assert len(set(model.seen)) == len(model.seen) > 0
    assert all(re.fullmatch(f"{A_FILE}|{A_PAGE}", place) for place in model.seen), model.seen
    assert 0 < model.kv_heads <= model.heads
    assert model.heads % model.kv_heads == 0
    assert 32 <= model.head_dim_v <= model.head_dim <= 256
    assert model.head_dim % 8 == model.head_dim_v % 8 == 0
    assert 128 <= model.lengths[0] <= model.lengths[1] <= 131072
    assert len(set(model.masks)) == len(model.masks) > 0
    assert all(mask.left is None or mask.left < model.lengths[1] - 1 for mask in model.masks)  # else it masks nothing


@pytest.mark.parametrize("missing", ["name", "source", "seen", "heads", "head_dim", "masks"])
def test_an_entry_without_its_source_or_a_size_is_not_read(missing):
    with pytest.raises((KeyError, TypeError), match=missing):
        ModelAttention.of({name: value for name, value in ENTRY.items() if name != missing})


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_draws_are_different_bounded_and_the_same_whatever_the_count(seed, count):
    with pytest.raises(InputError, match="positive number of shapes"):
        drawn_cases(0, seed, "cuda")
    cases = drawn_cases(count, seed, "cuda")
    assert len({case.spec for case in cases}) == len({case.name for case in cases}) == count
    assert drawn_cases(count + 1, seed, "cuda")[:count] == cases
    for case in cases:
        model = MODELS[case.name.partition(":")[0]]
        spec = case.spec
        assert model.lengths[0] <= spec.seqlen_q <= model.lengths[1]
        assert spec.heads * model.kv_heads == spec.kv_heads * model.heads
        assert spec.batch * spec.seqlen_q <= max(131072, spec.seqlen_q)
        assert spec.replace(direction="forward").flops <= 2e14


def test_a_fifth_of_the_causal_draws_is_packed_where_that_is_asked_for():
    """The others are the same as without, and the first ones whatever the count."""
    plain, some = (drawn_cases(150, 5, "cuda", packed=packed) for packed in (False, True))
    both = list(zip(plain, some, strict=True))
    changed = [(one, other) for one, other in both if other.lengths is not None]
    assert all(one == other for one, other in both if other.lengths is None)
    causal = sum(case.spec.mask.right == 0 for case in plain)
    assert 0.1 * causal < len(changed) < 0.3 * causal
    for one, other in changed:
        assert one.spec.mask.right == 0
        assert sum(other.lengths.q) == one.spec.batch * one.spec.seqlen_q
        assert max(other.lengths.q) <= one.spec.seqlen_q
        assert other.flops <= one.flops
    assert some[:40] == drawn_cases(40, 5, "cuda", packed=True)


def test_every_layer_of_every_model_is_in_the_preset_both_ways():
    specs = list(model_layers("cuda"))
    for model in MODELS.values():
        length = min(8192, model.lengths[1])
        asked = {
            "heads": model.heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim,
            "head_dim_v": model.head_dim_v, "softcap": model.softcap, "seqlen_q": length, "batch": 16384 // length,
        }  # fmt: skip
        for mask, direction in product(model.masks, ("forward", "training")):
            assert AttentionSpec.make(**asked, mask=mask, direction=direction) in specs
    assert len(set(specs)) == len(specs) >= 120
    assert {(spec.kv_heads, spec.seqlen_q) for spec in model_layers("cpu")} == {(1, 256)}


@pytest.mark.parametrize("direction", ["forward", "training"])
def test_a_kernel_of_our_own_serves_every_layer_in_fp8_on_hopper(direction, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with it a kernel refuses every GPU
    known, hopper = registry(), Device("cuda", "NVIDIA H100 80GB HBM3", (9, 0))
    forward, backward = known.forward("triton:fp8"), known.backward("triton:fp8")
    layers = [spec for spec in model_layers("cuda") if spec.direction == direction]
    refused = {str(spec): reasons for spec in layers if (reasons := forward.refusals(spec, hopper))}
    if direction == "training":
        assert backward.cannot_follow(forward, hopper) is None
        refused |= {str(spec): reasons for spec in layers if (reasons := backward.refusals(spec, hopper))}
    assert len(layers) > 60
    assert refused == {}


def from_the_nearest(spec, known):
    return min(
        distance(spec, other) + 3 * (spec.mask.kind != other.mask.kind) + 5 * (spec.head_dim != other.head_dim)
        for other in known
        if other.direction == spec.direction
    )


@pytest.mark.parametrize(("device", "count"), [("cuda", 112), ("cpu", 16)])
def test_they_lie_nearer_to_other_layers_than_shapes_drawn_at_random(device, count):
    asked = [case.spec for case in drawn_cases(100, 31, device)]

    def mean(known):
        return fmean(from_the_nearest(spec, known) for spec in asked)

    at_random = [mean([case.spec for case in drawn_cases(count, seed, device)]) for seed in range(3)]
    assert mean([spec for spec, _ in spread_shapes(count, device)]) < 0.93 * min(at_random)


def test_the_first_ones_are_the_same_whatever_the_count():
    assert spread_shapes(5, "cuda") == spread_shapes(12, "cuda")[:5]
    assert {spec.direction for spec, _ in spread_shapes(4, "cuda")} == {"forward", "training"}


def test_some_are_packed_and_fewer_padded_in_rows_that_fit():
    shapes = spread_shapes(112, "cuda")
    layouts = [lengths.layout for _, lengths in shapes if lengths is not None]
    assert 8 <= layouts.count("packed") <= 22
    assert 2 <= layouts.count("padded") < layouts.count("packed")
    for spec, lengths in shapes:
        if lengths is not None:
            check_lengths(spec, lengths)
            assert lengths.layout == "packed" or spec.batch * spec.seqlen_q <= 131072
