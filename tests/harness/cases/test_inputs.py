"""Inputs have the distribution that they are named after, and are the same on every call."""

import pytest
import torch

from attnbench.errors import InputError
from attnbench.harness.cases.inputs import FAMILIES, draw
from attnbench.problem.dtypes import TO_TORCH
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

CPU = torch.device("cpu")
SPEC = AttentionSpec.make(
    batch=2, heads=4, kv_heads=2, seqlen_q=1024, head_dim=128, head_dim_v=64, dtype="fp32", direction="training"
)


def probabilities(spec, inputs):
    """The attention of every query, unmasked, (B, H, Sq, Skv) in FP64."""
    q, k = inputs.q.double(), inputs.k.double().repeat_interleave(spec.group, dim=1)
    return (q @ k.transpose(-1, -2) * spec.scale).softmax(-1)


# The mean square of what is not standard normal: one number in a thousand is N(0, 101), 2 of 128 channels are 10 to 20
# off, V has a mean of a half, queries have the direction of a sink, or three times the deviation.
SQUARES = {
    **{("outlier", name): 1.1 for name in ("q", "k", "v", "grad_out")},
    ("outlier-channel", "q"): 4.65, ("outlier-channel", "k"): 4.65, ("biased-v", "v"): 1.25, ("sink", "q"): 2,
    ("peaky", "q"): 9,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_have_the_size_of_their_family_and_are_standard_normal_otherwise(family):
    inputs = draw(SPEC, family, CPU)
    for name in ("q", "k", "v", "grad_out"):
        x = getattr(inputs, name).double()
        assert x.square().mean().item() == pytest.approx(SQUARES.get((family, name), 1), rel=0.02), name
        if (family, name) not in SQUARES:
            assert x.mean().item() == pytest.approx(0, abs=0.01), name
            assert (x**4).mean().item() == pytest.approx(3, abs=0.1), name
    assert inputs.v.mean().item() == pytest.approx(0.5 if family == "biased-v" else 0, abs=0.01)


@pytest.mark.parametrize("head_dim", [16, 64, 128, 192])
def test_outlier_channels_are_the_same_for_all_tokens_and_for_a_key_head_and_its_queries(head_dim):
    spec = SPEC.replace(heads=8, head_dim=head_dim)
    inputs = draw(spec, "outlier-channel", CPU)
    means = {"q": inputs.q.mean(dim=2), "k": inputs.k.mean(dim=2)}
    large = {name: mean.abs() > 5 for name, mean in means.items()}
    for name, x in (("q", inputs.q), ("k", inputs.k)):
        assert (large[name].sum(-1) == max(1, head_dim // 64)).all()
        sizes = means[name][large[name]].abs()
        assert 9.5 < sizes.min() < sizes.max() < 20.5
        assert means[name][~large[name]].abs().max() < 0.2
        # No token is spared: what is left without the channel's offset is N(0, 1) everywhere.
        assert x.std(dim=2).sub(1).abs().max() < 0.15
    assert torch.equal(large["k"].repeat_interleave(spec.group, dim=1), large["q"])
    assert torch.equal(large["k"][0], large["k"][1])
    assert not torch.equal(large["k"][0, 0], large["k"][0, 1])


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec.make(batch=2, heads=4, kv_heads=2, seqlen_q=256, head_dim=128),
        AttentionSpec.make(batch=1, heads=4, seqlen_q=64, seqlen_kv=8192, head_dim=64, dtype="fp16"),
        AttentionSpec.make(batch=1, heads=4, kv_heads=1, seqlen_q=512, head_dim=64, scale=1.0),
        AttentionSpec.make(batch=1, heads=4, seqlen_q=512, head_dim=64, scale=-0.01),
    ],
    ids=str,
)
def test_a_sink_holds_most_of_the_attention_and_little_of_the_output(spec):
    inputs = draw(spec, "sink", CPU)
    p = probabilities(spec, inputs)
    assert 0.6 < p[..., 0].mean() < 0.95
    v = inputs.v.double().repeat_interleave(spec.group, dim=1)
    others = p[..., 1:] @ v[:, :, 1:]
    assert others.norm() > 0.75 * (p @ v).norm()


@pytest.mark.parametrize(("scale", "dtype"), [(0.0, "fp32"), (1e-6, "fp16"), (-1e-6, "fp16")])
def test_no_key_is_a_sink_where_the_scale_is_too_small(scale, dtype):
    with pytest.raises(InputError, match=r"no key of .* can be a sink"):
        draw(SPEC.replace(scale=scale, dtype=dtype), "sink", CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_fits_every_kind_of_spec(family):
    for changes in (
        {"seqlen_q": 1, "seqlen_kv": 1},
        {"seqlen_q": 3, "seqlen_kv": 77, "head_dim": 1, "head_dim_v": 5},
        {"kv_heads": 1, "mask": Mask(left=3, right=0), "softcap": 5.0},
        {"dtype": "fp16", "direction": "forward"},
        {"dtype": "fp64"},
        {"dtype": "bf16", "seqlen_kv": 2048},
    ):
        spec = SPEC.replace(**changes)
        inputs = draw(spec, family, CPU)
        assert inputs.q.shape == (2, 4, spec.seqlen_q, spec.head_dim)
        assert inputs.v.shape == (2, spec.kv_heads, spec.seqlen_kv, spec.head_dim_v)
        tensors = [x for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out) if x is not None]
        assert len(tensors) == (4 if spec.training else 3)
        assert all(x.isfinite().all() and x.is_contiguous() for x in tensors)
        assert {x.dtype for x in tensors} == {TO_TORCH[spec.dtype]}


@pytest.mark.parametrize(
    ("family", "last"),
    [
        ("normal", [1.1624, -1.6149, -2.4094, -0.1153]), ("outlier", [-0.7892, 0.4429, 0.3603, 0.7173]),
        ("outlier-channel", [1.0926, 0.2041, -0.0467, -0.4222]), ("biased-v", [0.8494, -0.7503, 1.4914, -0.9625]),
        ("sink", [0.0616, -0.4404, 1.5007, 0.1783]), ("peaky", [5.4054, -1.2905, -1.2157, -0.5129]),
    ],
)  # fmt: skip
def test_the_numbers_that_committed_results_were_drawn_with_stay(family, last):
    inputs = draw(SPEC, family, CPU)
    drawn = [x.flatten()[-1].item() for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out)]
    assert drawn == pytest.approx(last, abs=1e-4)


def test_families_and_specs_have_their_own_numbers_and_an_unknown_family_is_an_error():
    drawn = [draw(SPEC, family, CPU) for family in FAMILIES]
    drawn += [draw(SPEC.replace(scale=0.5), family, CPU) for family in FAMILIES]
    for name in ("q", "k", "v", "grad_out"):
        firsts = {getattr(inputs, name).flatten()[-1].item() for inputs in drawn}
        assert len(firsts) == len(drawn) == 12
    with pytest.raises(InputError, match="normal, outlier, outlier-channel, biased-v, sink, peaky"):
        draw(SPEC, "zeros", CPU)
