"""Errors are numbers against the truth, and nothing that is not finite slips through."""

import math
from dataclasses import astuple, replace

import pytest
import torch
from dense import dense_attention, dense_gradients
from hypothesis import given
from hypothesis import strategies as st
from planted import FakeForward, healthy

from attnbench.errors import AttnbenchError
from attnbench.harness.cases.inputs import draw
from attnbench.harness.measure.accuracy import Detail, judge_tensor
from attnbench.harness.measure.truth import Truth
from attnbench.kernels.contract import Operands, Saved
from attnbench.kernels.registry import registry
from attnbench.problem.fp8 import Recipe, quantise
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

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
    operands = forward.prepare(inputs.qkv, spec)
    out, lse, _ = forward.run(operands)
    gradients = REGISTRY.backward("wide:bf16").run(Saved(operands, out, lse), inputs.grad_out)
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def errors_of(truth: Truth, values: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: each.error for name, each in truth.judge(values).items()}


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
def test_the_truth_of_some_groups_is_the_whole_truth_at_these_groups(share):
    inputs = draw(SPEC, "outlier", CPU)
    whole, part = Truth.of(SPEC, inputs, REGISTRY), Truth.of(SPEC, inputs, REGISTRY, largest=share * SPEC.flops)
    assert whole.groups == (0, 1, 2, 3, 4, 5)
    assert len(part.groups) == max(1, int(share * 6))
    assert f"{len(part.groups)} of 6" in part.note
    gaps = [(after - before) % 6 for before, after in zip(part.groups, [*part.groups[1:], part.groups[0]], strict=True)]
    assert max(gaps) - min(gaps) <= 1, "spread evenly"
    assert Truth.of(SPEC, inputs, REGISTRY, largest=1.0, flops=0.0).groups == whole.groups, "all of it costs so little"
    for name, value in part.values.items():
        torch.testing.assert_close(value, whole.values[name][list(part.groups)], rtol=1e-12, atol=1e-12)


def test_one_group_of_each_spec_of_a_sweep_covers_every_group():
    specs = [SPEC.replace(seqlen_q=length) for length in range(1, 60)]
    truths = [Truth.of(spec, draw(spec, "normal", CPU), REGISTRY, largest=1.0) for spec in specs]
    assert {truth.groups for truth in truths} == {(group,) for group in range(6)}


def test_errors_of_a_part_are_taken_at_the_same_heads():
    inputs = draw(SPEC, "normal", CPU)
    truth = Truth.of(SPEC, inputs, REGISTRY, largest=SPEC.flops / 6)
    values = answers(SPEC)
    (group,) = truth.groups
    batch, key_head = divmod(group, SPEC.kv_heads)
    elsewhere = {name: value.clone() for name, value in values.items()}
    for value in elsewhere.values():
        value[1 - batch] = 7.0
    assert errors_of(truth, elsewhere) == errors_of(truth, values)
    for name, value in elsewhere.items():
        if name != "lse":
            value[1 - batch, 0, 0, 0] = torch.nan  # which needs no truth to be seen
            detail = truth.judge({name: value})[name].detail
            assert (detail.nonfinite, detail.sqnr_db, detail.worst_head, detail.bias) == (1, None, math.inf, math.inf)
            assert errors_of(truth, {name: value})[name] == math.inf
    values["out"][batch, SPEC.group * key_head + 1] = torch.nan  # a query head of the group that was computed
    values["dk"][batch, key_head] *= 2
    errors = errors_of(truth, values)
    assert errors["out"] == math.inf
    assert errors["dk"] == pytest.approx(1, abs=0.01)
    assert errors["dv"] < 3e-3


def test_a_wrong_shape_is_reported():
    values = answers(SPEC)
    values["dv"] = values["dv"].transpose(2, 3)
    with pytest.raises(AttnbenchError, match=r"dv has the shape .*, not \(2, 3, 47, 24\)"):
        Truth.of(SPEC, draw(SPEC, "normal", CPU), REGISTRY).judge(values)


def test_a_floor_of_operands_in_another_shape_is_refused():
    """The same number of values elsewhere would give a floor of other tensors."""
    inputs = draw(SPEC, "normal", CPU)
    q, k, v = (quantise(x, Recipe()) for x in (inputs.q, inputs.k, inputs.v.reshape(2, 3, 24, 47)))
    with pytest.raises(AttnbenchError, match=r"the operand v has the shape \(2, 3, 24, 47\), not \(2, 3, 47, 24\)"):
        Truth.of(SPEC, inputs, REGISTRY).exact_on(Operands(SPEC, q, k, v))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(value: torch.Tensor, truth: torch.Tensor) -> dict[str, float]:
    """The definitions, a head and a row at a time."""
    heads = [
        (v.double(), t)
        for value_, truth_ in zip(value, truth, strict=True)
        for v, t in zip(value_, truth_, strict=True)
    ]
    usual_head = math.sqrt(sum(float(t.norm()) ** 2 for _, t in heads) / len(heads))
    rows = []
    for v, t in heads:
        usual = math.sqrt(sum(float(row.norm()) ** 2 for row in t) / len(t))
        rows += [float((a - b).norm()) / max(float(b.norm()), usual / 2) for a, b in zip(v, t, strict=True)]
    error = float((value.double() - truth).norm() / truth.norm())
    return {
        "error": error,
        "sqnr_db": -20 * math.log10(error),
        "worst_head": max(float((v - t).norm()) / max(float(t.norm()), usual_head / 2) for v, t in heads),
        "worst_row": max(rows),
        "bias": float((value.double() * truth).sum() / (truth * truth).sum()) - 1,
    }


@given(
    st.tuples(*[st.integers(1, 4)] * 2, st.integers(1, 9), st.integers(1, 5)),
    st.floats(1e-3, 3),
    st.integers(0, 2**31),
    st.sampled_from([torch.float64, torch.bfloat16]),
)
def test_every_number_is_that_of_its_definition(shape, noise, seed, dtype):
    truth = normal(*shape, seed=seed) * normal(*shape[:3], 1, seed=seed + 2) ** 3  # heads and rows of all sizes
    value = (truth + noise * normal(*shape, seed=seed + 1)).to(dtype)
    found, expected = judge_tensor("dq", value, truth), by_hand(value, truth)
    assert found.error == pytest.approx(expected.pop("error"), rel=1e-9)
    assert found.rows == shape[0] * shape[1] * shape[2]
    for name, number in expected.items():
        assert getattr(found.detail, name) == pytest.approx(number, rel=1e-9, abs=1e-9), name


def test_an_lse_is_judged_in_nats_and_never_divided_by_less_than_one():
    truth = torch.tensor([[[4.0, 0.0, -0.5, 8.0]]], dtype=torch.float64)
    found = judge_tensor("lse", truth + torch.tensor([0.2, 0.1, -0.1, 0.0]), truth)
    assert found.detail.bias == pytest.approx(0.05)
    assert found.detail.worst_row == pytest.approx(0.1)
    assert found.error == pytest.approx(math.sqrt(0.06 / (16 + 1 + 1 + 64)))
    assert found.detail.worst_head == found.error
    assert found.rows == 4


def test_an_lse_of_rows_without_keys_is_right_at_minus_infinity_only():
    truth = torch.tensor([[[-math.inf, 1.0, 2.0]]], dtype=torch.float64)
    right = judge_tensor("lse", truth.float(), truth)
    assert (right.error, right.detail) == (0.0, Detail(None, 0.0, 0.0, 0.0, 0))
    for wrong, nonfinite in ((0.0, 0), (-1e30, 0), (math.inf, 1), (math.nan, 1)):
        value = truth.clone()
        value[0, 0, 0] = wrong
        found = judge_tensor("lse", value, truth)
        assert found.error == found.detail.worst_row == found.detail.bias == math.inf, wrong
        assert found.detail.nonfinite == nonfinite
    value = truth.clone()
    value[0, 0, 1] = -math.inf
    assert judge_tensor("lse", value, truth).detail.nonfinite == 1
    assert judge_tensor("lse", truth + 0.1, truth).detail.bias == pytest.approx(0.1)
    empty = torch.full((2, 1, 3), -math.inf, dtype=torch.float64)
    assert judge_tensor("lse", empty, empty).detail == Detail(None, 0.0, 0.0, 0.0, 0)


def test_a_truth_of_zeros_makes_no_nan():
    truth = torch.zeros(1, 2, 3, 4, dtype=torch.float64)
    assert judge_tensor("dq", truth.clone(), truth).detail == Detail(None, 0.0, 0.0, 0.0, 0)
    something = truth + 1e-20
    assert judge_tensor("dq", something, truth).error == math.inf
    assert not any(
        each is not None and math.isnan(each) for each in astuple(judge_tensor("dq", something, truth).detail)
    )
    unit = judge_tensor("dq", truth + 0.1, truth, unit=4.0)  # rows of length 0.2
    assert [unit.error, unit.detail.worst_head, unit.detail.worst_row] == pytest.approx([0.05] * 3)
    assert unit.detail.bias == 0.0


def test_one_key_leaves_no_gradient_and_a_kernel_is_not_blamed_for_the_rounding_of_zero():
    spec = SPEC.replace(seqlen_q=5, seqlen_kv=1, mask=Mask())
    inputs = draw(spec, "normal", CPU)
    truth = Truth.of(spec, inputs, registry())
    assert not truth.values["dq"].any()
    forward, backward = registry().forward("emulated:fp8"), registry().backward("emulated:fp8")
    operands = forward.prepare(inputs.qkv, spec)
    out, lse, state = forward.run(operands)
    dq, dk, dv = backward.run(Saved(operands, out, lse, state), inputs.grad_out)
    values = {"dq": dq, "dk": dk, "dv": dv}
    assert dq.any()
    floor = truth.exact_on(operands)
    assert all(each.error < 0.2 for judge in (truth.judge, floor.judge) for each in judge(values).values())
    assert truth.judge({"dq": inputs.q})["dq"].error > 0.5
    louder = Truth.of(spec.replace(scale=-spec.scale), replace(inputs, q=64 * inputs.q), registry())
    assert louder.units == pytest.approx({"dq": truth.units["dq"], "dk": 64 * truth.units["dk"]})


def test_own_errors_are_those_against_dense_attention_on_the_operands():
    spec = AttentionSpec.make(
        batch=2, heads=4, kv_heads=2, seqlen_q=70, head_dim=32, mask=Mask(right=0), direction="training"
    )
    inputs = draw(spec, "outlier", CPU)
    truth = Truth.of(spec, inputs, registry())
    forward = registry().forward("emulated:fp8-token-hadamard-smooth")
    operands = forward.prepare(inputs.qkv, spec)
    floor = truth.exact_on(operands)
    used = operands.tensors(torch.float64)
    out, lse = dense_attention(*used, spec)
    gradients = dense_gradients(*used, inputs.grad_out, spec)
    exact = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    assert all(each.error < 1e-9 for each in floor.judge(exact).values())
    for name, judgement in truth.judge(exact).items():
        assert judgement.error > 1e-3
        assert judgement.error == pytest.approx(floor.judgements[name].error, rel=1e-6)
        assert judgement.detail.bias == pytest.approx(floor.judgements[name].detail.bias, abs=1e-9)


def test_one_quantised_operand_is_enough_for_a_floor():
    inputs = draw(SPEC, "normal", CPU)
    truth = Truth.of(SPEC, inputs, REGISTRY)
    assert truth.exact_on(Operands(SPEC, *inputs.qkv.unquantised())) is None
    floor = truth.exact_on(Operands(SPEC, inputs.q, quantise(inputs.k, Recipe()), inputs.v))
    assert floor.judgements["out"].error > 1e-3


def test_nothing_is_kept_of_input_buffers_that_are_filled_anew():
    inputs = draw(SPEC, "normal", CPU)
    truth = Truth.of(SPEC, inputs, REGISTRY)
    operands = FakeForward("small:fp8").prepare(inputs.qkv, SPEC)
    before = truth.exact_on(operands)
    for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out):
        x.fill_(7.0)
    after = truth.exact_on(operands)
    assert before.judgements == after.judgements


@pytest.mark.parametrize("direction", ["forward", "training"])
def test_a_truth_in_fp32_is_marked_so_and_is_one_for_16_bits(direction):
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=200, head_dim=32, mask=Mask(right=0), direction=direction)
    inputs = draw(spec, "normal", torch.device("cpu"))
    exact, narrow = (Truth.of(spec, inputs, registry(), precision=precision) for precision in ("fp64", "fp32"))
    assert "FP32" in narrow.note
    assert "FP64" in exact.note
    # The truth's own values, in the shape in which kernels answer: every group is among them.
    values = {name: x.reshape(spec.batch, -1, *x.shape[2:]) for name, x in narrow.values.items()}
    for name, judgement in exact.judge(values).items():
        assert 0 < judgement.error < 1e-5, name
    operands = FakeForward("small:fp8").prepare(inputs.qkv, spec)
    assert not torch.equal(*(truth.exact_on(operands).values["out"] for truth in (exact, narrow))), "nor is its floor"
