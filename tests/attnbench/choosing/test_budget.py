"""Error budgets: the chosen plan stays within the budget, or an error states the best plan's error."""

import math

import pytest
import torch
from choices import CPU, entry, pick, table
from dense import dense_attention, dense_gradients, relative_l2
from fakes import FakeForward, fake_backend, fake_registry
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Problem

from attnbench import AttentionSpec, Mask, Plan, attention, explain, use_backend
from attnbench.choosing.selector import choose
from attnbench.errors import BudgetError, InputError, NoPlanError
from attnbench.kernels.capabilities import Device
from attnbench.kernels.registry import registry

HERE = Device("cpu", "A CPU")
WIDE = ("bf16", "fp16", "fp32", "fp64")


def random_tensors(spec: AttentionSpec) -> tuple[torch.Tensor, ...]:
    """Normal q, k, v and dO."""
    return Problem(spec, "bhsd", strided=False, seed=0).tensors()


def square(dtype: str = "bf16", direction: str = "forward") -> AttentionSpec:
    return AttentionSpec.make(batch=1, heads=2, seqlen_q=64, head_dim=32, dtype=dtype, direction=direction)


def explain_spec(spec: AttentionSpec, **more):
    q, k, v, _ = random_tensors(spec)
    leaves = [x.requires_grad_(spec.training) for x in (q, k, v)]
    return explain(*leaves, is_causal=spec.mask.kind == "causal", **more)


specs = st.builds(
    lambda sizes, group, causal, **more: AttentionSpec.make(
        batch=2, heads=2 * group, kv_heads=2, seqlen_q=sizes[0], seqlen_kv=sizes[0] if causal else sizes[1],
        mask=Mask(right=0) if causal else Mask(), **more,
    ),
    st.tuples(st.integers(24, 80), st.integers(24, 80)), st.sampled_from([1, 3]), st.booleans(),
    head_dim=st.sampled_from([16, 40, 64]), dtype=st.sampled_from(WIDE),
    direction=st.sampled_from(["forward", "training"]),
)  # fmt: skip
budgets = st.floats(-17, -0.5).map(lambda power: 10**power)


@settings(max_examples=30)
@given(specs, budgets | st.sampled_from([0.0019, 0.002, 0.0025, 0.003, 0.005, 0.00024, 0.0005]), st.booleans())
def test_chosen_plan_is_within_the_budget_or_none_runs(spec, budget, fp8):
    q, k, v, grad_out = random_tensors(spec)
    leaves = [x.requires_grad_(spec.training) for x in (q, k, v)]
    more = {"max_error": budget, "dtype": None if fp8 else spec.dtype, "is_causal": spec.mask.kind == "causal"}
    try:
        out = attention(*leaves, **more)
    except NoPlanError:
        exact = Plan("reference:fp64", "reference:fp64" if spec.training else None)
        assert budget < registry().declared_error(exact, spec, HERE), "a plan was there that declares to keep it"
        return
    errors = [relative_l2(out, dense_attention(q, k, v, spec)[0])]
    if spec.training:
        found = torch.autograd.grad(out, leaves, grad_out)
        errors += map(relative_l2, found, dense_gradients(q, k, v, grad_out, spec))
    assert max(errors) <= budget


@pytest.mark.parametrize(("dtype", "budget"), [("bf16", 0.005), ("fp16", 0.0007), ("fp32", 3e-6), ("fp64", 1e-12)])
@pytest.mark.parametrize("direction", ["forward", "training"])
def test_a_default_kernel_within_the_budget_is_not_replaced_by_a_slower_one(dtype, budget, direction):
    spec = square(dtype, direction)
    assert explain_spec(spec, max_error=budget, dtype=dtype).plan == explain_spec(spec).plan
    assert str(explain_spec(spec).plan).startswith(f"sdpa-flash:{dtype}")


@pytest.mark.parametrize(("dtype", "closed"), [("bf16", True), (torch.bfloat16, True), ("fp8", False), (None, False)])
def test_a_budget_with_the_tensors_own_dtype_excludes_fp8(dtype, closed):
    choice = explain_spec(square(), max_error=0.25, dtype=dtype)
    assert any(each.verdict == "not asked for" for each in choice.candidates) is closed


@pytest.fixture
def set_fp32_precision():
    """A function that sets torch's precision of FP32 products, by the older or the newer API."""
    older, newer = torch.get_float32_matmul_precision(), torch.backends.mkldnn.matmul

    def allow(how: str) -> None:
        if how == "newer":
            newer.fp32_precision = "bf16"
        else:
            torch.set_float32_matmul_precision(how)

    yield allow
    torch.set_float32_matmul_precision("medium")  # both at once, so that neither is a mix
    torch.set_float32_matmul_precision(older)


@pytest.mark.parametrize("backend", ["sdpa-flash:fp32", "sdpa-math:fp32", "reference:fp32"])
@pytest.mark.parametrize("how", ["medium", "newer"])
def test_torchs_precision_settings_do_not_reduce_the_precision_of_a_budgeted_call(set_fp32_precision, backend, how):
    q, k, v, grad_out = random_tensors(square("fp32", "training"))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    answers = []
    for setting in ("highest", how):
        set_fp32_precision(setting)
        out = attention(*leaves, backend=backend)
        answers.append([out, *torch.autograd.grad(out, leaves, grad_out)])
        assert torch.backends.mkldnn.matmul.fp32_precision == {"highest": "ieee"}.get(setting, "bf16")
    assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))


@pytest.mark.parametrize("direction", ["forward", "training"])
def test_an_unreachable_budget_error_states_the_best_plans_error(direction):
    spec = square(direction=direction)
    with pytest.raises(NoPlanError) as caught:
        explain_spec(spec, max_error=1e-9)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith(f"no plan stays within max_error=1e-09 for {spec} on ")
    assert "reaches 0.002 (declared). Rounding results to bf16 alone costs 0.002" in first
    assert first.endswith("pass max_error=0.002 or more, or fp64 tensors.")
    assert explain_spec(spec, max_error=0.002).plan
    assert any("sdpa-flash:bf16" in line and "0.00" in line for line in lines)
    assert not any("fa4" in line for line in lines), "what cannot run here is only counted"
    assert any(plan.startswith("fa4") for plan in caught.value.reasons)


def test_the_budget_applies_to_contexts_and_named_plans():
    with use_backend(max_error=1e-9), pytest.raises(NoPlanError, match="max_error=1e-09"):
        explain_spec(square())
    with pytest.raises(BudgetError) as caught:
        explain_spec(square(), max_error=0.0025, backend="sdpa-flash")
    assert "It needs max_error=0.003 or more" in str(caught.value)
    assert "Plans within it: reference:fp32, reference:fp64, sdpa-math:bf16." in str(caught.value)
    with pytest.raises(BudgetError, match="max_error=1e-09"):
        explain_spec(square(), max_error=1e-9, backend="reference:fp64")


@pytest.mark.parametrize("budget", [0, -0.1, -math.inf, math.nan, True, "0.1", 1e-400, 10**400])
def test_a_nonpositive_budget_is_an_error_that_names_it(budget):
    with pytest.raises(InputError, match="max_error must be a positive relative error"):
        explain_spec(square(), max_error=budget)


def test_the_budget_error_reports_the_measured_error_of_the_best_plan():
    rows = table(entry("slow:bf16", 1.0, normal=0.004), entry("fast:bf16", 1.0, outlier=0.0031))
    with pytest.raises(NoPlanError) as caught:
        pick(table=rows, max_error=0.003)
    first = str(caught.value).partition("\n")[0]
    assert first.endswith(
        "the best, fast:bf16, reaches 0.0031 (measured on outlier inputs). Pass max_error=0.0031 or more."
    )
    assert str(pick(table=rows, max_error=0.0031).plan) == "fast:bf16"
    with pytest.raises(NoPlanError, match=r"no plan stays within the default error budget of 0\.01 for"):
        pick(table=table(entry("slow:bf16", 1.0, normal=0.02), entry("fast:bf16", 1.0, normal=0.03)))


def test_the_error_explains_how_to_allow_fp8_when_only_fp8_could_run():
    known = fake_registry(fake_backend("fast", FakeForward("fast:fp8")))
    with pytest.raises(NoPlanError, match='dtype="fp8" or a max_error admits'):
        choose(square(), CPU, known=known)
    with pytest.raises(NoPlanError, match="run `attnbench sweep`, or name one with backend="):
        choose(square(), CPU, known=known, fp8=True)
