"""Inputs have the distribution that they are named after, and are the same on every call."""

import pytest
import torch

from attnbench.errors import InputError
from attnbench.harness.inputs import FAMILIES, draw
from attnbench.spec import AttentionSpec

CPU = torch.device("cpu")
SPEC = AttentionSpec.make(
    batch=2, heads=4, kv_heads=2, seqlen_q=1024, head_dim=128, head_dim_v=64, dtype="fp32", direction="training"
)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_call_gives_the_same_tensors_of_the_right_shapes(family):
    one, other = draw(SPEC, family, CPU), draw(SPEC, family, CPU)
    shapes = {"q": (2, 4, 1024, 128), "k": (2, 2, 1024, 128), "v": (2, 2, 1024, 64), "grad_out": (2, 4, 1024, 64)}
    for name, shape in shapes.items():
        x = getattr(one, name)
        assert x.shape == shape
        assert x.dtype == torch.float32
        assert torch.equal(x, getattr(other, name))
        assert x.data_ptr() != getattr(other, name).data_ptr()
    assert one.drawn_on == "cpu"


def test_forward_cases_have_no_grad_out_and_their_own_numbers():
    forward = draw(SPEC.replace(direction="forward"), "normal", CPU)
    assert forward.grad_out is None
    assert not torch.equal(forward.q, draw(SPEC, "normal", CPU).q)


def test_normal_is_standard_normal():
    for x in (draw(SPEC, "normal", CPU).q, draw(SPEC, "normal", CPU).grad_out):
        assert x.std().item() == pytest.approx(1, abs=0.01)
        assert x.mean().item() == pytest.approx(0, abs=0.01)
        assert x.abs().max() < 7


def test_outliers_are_one_in_a_thousand_with_ten_times_the_deviation():
    x = draw(SPEC, "outlier", CPU).q
    # N(0,1) exceeds 6 in about one of 5e8; N(0,101) exceeds it with probability 0.5505.
    share = (x.abs() > 6).double().mean().item() / 0.5505
    assert share == pytest.approx(0.001, rel=0.15)
    assert x.var().item() == pytest.approx(1 + 0.001 * 100, rel=0.02)
    assert x[x.abs() > 6].abs().max() > 20


def test_families_differ_and_unknown_ones_are_said():
    assert not torch.equal(draw(SPEC, "normal", CPU).v, draw(SPEC, "outlier", CPU).v)
    with pytest.raises(InputError, match="normal, outlier"):
        draw(SPEC, "zeros", CPU)
