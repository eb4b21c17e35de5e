"""The guard on live tensors: it finds errors, reports them, acts on them, and does not change the program."""

import json
import logging
import math
import warnings

import pytest
import torch
from dense import dense_attention, dense_gradients, relative_l2
from guard_faults import BOUND, NAME, PLAN, calls_until_found, in_one_head, is_close, noise, one_value, spoil, step
from problems import tensors
from safetensors import safe_open

from attnbench import Plan, attention, explain, guard
from attnbench.choosing.demotion import demote, demotions
from attnbench.errors import BreachError, BreachWarning, BudgetError
from attnbench.harness.capture.file import read_captured
from attnbench.problem.fp8 import Recipe, quantise

pytestmark = pytest.mark.filterwarnings("ignore::attnbench.errors.BreachWarning")


HEALTHY = {
    "auto": {},
    "causal": {"is_causal": True, "backend": "sdpa-flash"},
    "bottom right": {"is_causal": True, "causal_alignment": "bottom-right", "backend": "sdpa-math"},
    "window": {"window": (9, 4), "softcap": 5.0, "scale": -0.4, "backend": "reference:fp32"},
    "fp8": {"backend": "emulated:fp8"},
    "mixed": {"backend": "emulated:fp8>sdpa-flash:bf16", "is_causal": True},
    "sharp": {"scale": 8.0, "is_causal": True, "backend": "sdpa-flash"},
}


@pytest.mark.parametrize("case", HEALTHY)
def test_a_correct_plan_causes_no_breach(case):
    x = tensors(grad=True)
    with guard(every=1) as watch:
        for seed in range(15):
            step(tensors(seed=seed, grad=True), **HEALTHY[case])
        with torch.no_grad():
            attention(*x, **HEALTHY[case])
    assert not watch.breaches
    assert not watch.skipped
    assert watch.checks == 31


def test_a_drift_is_found_when_it_begins(planted_kernels):
    forward, _ = planted_kernels
    x = tensors()
    with guard(every=1) as watch:
        forward.change = noise(0.9 * BOUND)
        for _ in range(100):
            attention(*x)
        assert not watch.breaches
        forward.change = noise(1.5 * BOUND)
        assert calls_until_found(watch, x) <= 8
    (found,) = watch.breaches
    assert (str(found.plan), found.tensor, found.bound) == (NAME, "out", BOUND)
    assert found.spec == explain(*x).spec
    assert is_close(found.error, 1.5 * BOUND, 0.2)
    assert found.call == found.check - 1


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
@pytest.mark.parametrize("where", ["everywhere", "one head"])
def test_wrong_gradients_are_found_and_named(planted_kernels, name, where):
    spoil(planted_kernels, name, noise(2 * BOUND) if where == "everywhere" else in_one_head(lambda x: x * 1.3))
    x = tensors(grad=True)
    with guard(every=1) as watch:
        assert calls_until_found(watch, x, is_causal=True) <= 12
    assert {each.tensor for each in watch.breaches} == {name}
    assert {str(each.plan) for each in watch.breaches} == {PLAN}


def test_nonfinite_inputs_are_not_a_breach():
    x = tensors()
    x[2][0, 0, 0, 0] = torch.nan
    with guard(every=1) as watch:
        assert attention(*x).isnan().any()
    assert not watch.breaches
    assert watch.checks == 0
    assert sum(watch.skipped.values()) == 1


@pytest.mark.parametrize("every", [1, 3, 7])
def test_the_first_call_of_each_plan_and_spec_and_every_nth_after_it_are_checked(every):
    with guard(every=every) as watch:
        for backend in ("sdpa-flash", "reference:fp32"):
            for sq in (5, 6):
                for number in range(1, 16):
                    before = watch.checks
                    step(tensors(sq=sq, grad=True), backend=backend)
                    assert watch.checks - before == (2 if (number - 1) % every == 0 else 0), number


def test_each_plan_warns_once_and_each_breach_is_logged(planted_kernels, caplog):
    spoil(planted_kernels, "out", noise(1.0))
    with warnings.catch_warnings(record=True) as warned, guard(every=1) as watch:
        warnings.simplefilter("always")
        for sq in (5, 6):
            for _ in range(3):
                attention(*tensors(sq=sq))
    assert len(watch.breaches) == 6
    assert [each.category for each in warned] == [BreachWarning]
    assert "Guard.breaches" in str(warned[0].message)
    lines = [each for each in caplog.records if each.name == "attnbench.guard"]
    assert [each.levelno for each in lines] == [logging.WARNING] * 6
    for line, breach in zip(lines, watch.breaches, strict=True):
        assert str(breach.spec) in line.getMessage()
        assert NAME in line.getMessage()
        assert json.loads(json.dumps(line.breach, allow_nan=False)) == breach.to_dict()


def test_on_breach_raise_raises_at_the_checked_call(planted_kernels):
    forward, backward = planted_kernels
    x = tensors(grad=True)
    with guard(every=1, on_breach="raise"):
        step(x)
        backward.changes["dk"] = noise(1.0)
        out = attention(*x)
        with pytest.raises(BreachError, match="dk is off by") as caught:
            out.sum().backward()
        assert caught.value.breach.tensor == "dk"
        forward.change = one_value(math.nan)
        with pytest.raises(BreachError, match="not finite"):
            attention(*x)


def test_demotion_changes_the_choice_and_explain_gives_the_reason(planted_kernels):
    forward, _ = planted_kernels
    x = tensors()
    assert str(explain(*x).plan) == NAME
    compiled = torch.compile(lambda *x: attention(*x), fullgraph=True, backend="aot_eager")
    exact = attention(*x)
    forward.change = noise(1.0)
    with guard(every=1, on_breach="demote") as watch:
        wrong = attention(*x)
        right = attention(*x)
        also_right = compiled(*x)
    assert relative_l2(wrong, exact) > 0.5
    assert relative_l2(right, exact) < BOUND
    assert relative_l2(also_right, exact) < BOUND
    assert len(watch.breaches) == 1
    choice = explain(*x)
    assert str(choice.plan) != NAME
    (candidate,) = [each for each in choice.candidates if str(each.plan) == NAME]
    assert candidate.verdict == "inaccurate"
    assert "demoted by a guard: its out is off by" in candidate.reasons[0]
    assert candidate.reasons[0] in choice.to_text().replace("\n", " ") or "demoted" in choice.to_text()
    assert str(explain(*x, return_lse=True).plan) != NAME
    assert str(explain(*tensors(sq=7)).plan) == NAME  # of another spec nothing was found
    assert str(explain(*x, backend=NAME).plan) == NAME  # a named plan is used even if demoted
    with pytest.raises(BudgetError, match="demoted"):
        explain(*x, backend=NAME, max_error=0.5)
    demotions.forget()
    assert str(explain(*x).plan) == NAME


def test_a_demoted_fp8_plan_is_inaccurate_only_where_fp8_was_requested(planted_kernels):
    x = tensors()
    demote(Plan("emulated:fp8"), explain(*x).spec, "demoted")
    for arguments, verdict in (({}, "not asked for"), ({"dtype": "fp8"}, "inaccurate")):
        found = {str(each.plan): each.verdict for each in explain(*x, **arguments).candidates}
        assert found["emulated:fp8"] == verdict


@pytest.mark.parametrize("name", ["out", "dq"])
def test_saved_tensors_reproduce_the_error(planted_kernels, tmp_path, name):
    spoil(planted_kernels, name, in_one_head(lambda x: x * 0))
    x = tensors(grad=True)
    expected = [each.detach().clone() for each in x]
    with guard(every=1, save_to=tmp_path / "made" / "here") as watch:
        for _ in range(12):
            step(x, is_causal=True)
    found = next(each for each in watch.breaches if each.path is not None)
    assert found.tensor == name
    assert list(found.path.parent.iterdir()) == [found.path]  # of each plan and spec the first
    file = read_captured(found.path)
    (call,) = file.calls
    assert call.name == PLAN
    assert call.spec == found.spec.replace(direction="forward" if name == "out" else "training")
    kept = file.tensors(0)
    assert all(torch.equal(kept[name], one) for name, one in zip("qkv", expected, strict=True))
    with safe_open(found.path, "pt") as content:
        assert json.loads(content.metadata()["attnbench.breach"]) == {**found.to_dict(), "path": None}
    q, k, v = (kept[name].requires_grad_() for name in "qkv")
    out = attention(q, k, v, is_causal=True, backend=PLAN)
    if name == "out":
        error = relative_l2(out, dense_attention(q, k, v, call.spec)[0])
    else:
        (dq,) = torch.autograd.grad(out, q, kept["grad_out"])
        error = relative_l2(dq, dense_gradients(q, k, v, kept["grad_out"], call.spec)[0])
    assert error > 10 * BOUND
    assert is_close(found.error, error, 0.6)


def test_fp8_inputs_are_saved_with_their_scales(planted_kernels, tmp_path):
    spoil(planted_kernels, "out", noise(1.0))
    parts = [quantise(x, Recipe("head")) for x in tensors()]
    names = {f"{n}_descale": x.descale[..., 0, 0] for n, x in zip("qkv", parts, strict=True)}
    with guard(every=1, save_to=tmp_path) as watch:
        attention(*(x.data for x in parts), backend=NAME, **names)
    with safe_open(watch.breaches[0].path, "pt") as file:
        assert torch.equal(file.get_tensor("0.k").float(), parts[1].data.float())
        assert torch.equal(file.get_tensor("0.k_descale"), parts[1].descale)
