"""Errors are numbers against the truth, and nothing that is not finite slips through."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planted import FakeForward, healthy

from attnbench.errors import AttnbenchError
from attnbench.harness.accuracy import Truth, relative_l2
from attnbench.harness.inputs import draw
from attnbench.kernel import Saved
from attnbench.mask import Mask
from attnbench.spec import AttentionSpec

CPU = torch.device("cpu")
REGISTRY = healthy()
SPEC = AttentionSpec.make(
    batch=2,
    heads=6,
    kv_heads=3,
    seqlen_q=33,
    seqlen_kv=47,
    head_dim=16,
    head_dim_v=24,
    mask=Mask(right=0),
    direction="training",
)


def answers(spec: AttentionSpec) -> dict[str, torch.Tensor]:
    """The exact kernel's values for the whole spec, in bf16."""
    inputs = draw(spec, "normal", CPU)
    forward = REGISTRY.forward("wide:bf16")
    operands = forward.prepare(inputs.q, inputs.k, inputs.v, spec)
    out, lse, _ = forward.run(operands)
    gradients = REGISTRY.backward("wide:bf16").run(Saved(operands, out, lse), inputs.grad_out)
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


@given(st.floats(-3, 3), st.integers(0, 2**32))
def test_scaling_the_answer_is_an_error_of_the_scale_minus_one(scale, seed):
    truth = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert relative_l2(truth * scale, truth) == pytest.approx(abs(scale - 1), abs=1e-12)


@given(st.integers(0, 2**32), st.floats(1e-6, 1e6))
def test_the_error_does_not_depend_on_the_unit(seed, unit):
    generator = torch.Generator().manual_seed(seed)
    truth, value = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    assert relative_l2(value * unit, truth * unit) == pytest.approx(relative_l2(value, truth), rel=1e-9)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_one_non_finite_value_among_many_is_an_infinite_error(wrong):
    truth = torch.ones(1000, dtype=torch.float64)
    value = truth.clone()
    value[500] = wrong
    assert relative_l2(value, truth) == math.inf


def test_rows_without_keys_must_be_exactly_minus_infinity():
    truth = torch.tensor([1.0, -math.inf, 2.0])
    assert relative_l2(truth.clone(), truth) == 0.0
    assert relative_l2(torch.tensor([1.0, -1e30, 2.0]), truth) == math.inf
    assert relative_l2(torch.tensor([-math.inf, -math.inf, 2.0]), truth) == math.inf


def test_something_against_nothing_is_infinite_and_nothing_against_nothing_is_right():
    nothing = torch.zeros(3)
    assert relative_l2(nothing.clone(), nothing) == 0.0
    assert relative_l2(torch.tensor([0.0, 1e-30, 0.0]), nothing) == math.inf


def test_a_right_answer_has_the_error_of_its_rounding():
    errors = Truth.of(SPEC, draw(SPEC, "normal", CPU), REGISTRY).errors(answers(SPEC))
    assert set(errors) == {"out", "lse", "dq", "dk", "dv"}
    assert errors.pop("lse") < 1e-12
    assert all(1e-4 < error < 3e-3 for error in errors.values())


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
def test_the_truth_of_some_groups_is_the_whole_truth_at_these_groups(share):
    inputs = draw(SPEC, "outlier", CPU)
    whole, part = Truth.of(SPEC, inputs, REGISTRY), Truth.of(SPEC, inputs, REGISTRY, largest=share * SPEC.flops)
    assert whole.groups == (0, 1, 2, 3, 4, 5)
    assert len(part.groups) == max(1, int(share * 6))
    assert f"{len(part.groups)} of 6" in part.note
    for name, value in part.values.items():
        torch.testing.assert_close(value, whole.values[name][list(part.groups)], rtol=1e-12, atol=1e-12)


def test_errors_of_a_part_are_taken_at_the_same_heads():
    inputs = draw(SPEC, "normal", CPU)
    truth = Truth.of(SPEC, inputs, REGISTRY, largest=SPEC.flops / 6)
    values = answers(SPEC)
    assert truth.groups == (0,)
    elsewhere = {name: value.clone() for name, value in values.items()}
    for value in elsewhere.values():
        value[1] = torch.nan  # another batch
    assert truth.errors(elsewhere) == truth.errors(values)
    values["out"][0, 1] = torch.nan  # a query head of the group that was computed
    values["dk"][0, 0] *= 2
    errors = truth.errors(values)
    assert errors["out"] == math.inf
    assert errors["dk"] == pytest.approx(1, abs=0.01)
    assert errors["dv"] < 3e-3


def test_no_head_of_the_whole_is_overlooked():
    spec = SPEC.replace(heads=4, kv_heads=2)  # as many key heads as batches: a mistaken index would meet some twice
    truth, values = Truth.of(spec, draw(spec, "normal", CPU), REGISTRY), answers(spec)
    for name, value in values.items():
        for b in range(spec.batch):
            for head in range(value.shape[1]):
                wrong = value.clone()
                wrong[b, head, -1] = torch.nan
                assert truth.errors({name: wrong}) == {name: math.inf}


def test_the_floor_is_the_error_of_the_operands_alone():
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=256, head_dim=128, direction="training")
    inputs = draw(spec, "normal", CPU)
    truth = Truth.of(spec, inputs, REGISTRY)
    floor = truth.floor(FakeForward("small:fp8").prepare(inputs.q, inputs.k, inputs.v, spec))
    assert 0.03 < floor["out"] < 0.06
    assert all(0.02 < floor[name] < 0.1 for name in ("dq", "dk", "dv"))
    assert truth.floor(FakeForward("wide:bf16").prepare(inputs.q, inputs.k, inputs.v, spec)) == {}


def test_a_wrong_shape_is_said():
    values = answers(SPEC)
    values["dv"] = values["dv"].transpose(2, 3)
    with pytest.raises(AttnbenchError, match=r"dv has the shape .*, not \(2, 3, 47, 24\)"):
        Truth.of(SPEC, draw(SPEC, "normal", CPU), REGISTRY).errors(values)
