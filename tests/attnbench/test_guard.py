"""The guard on live tensors: it finds what goes wrong, says so, acts, and leaves the program as it was."""

import gc
import json
import logging
import math
import random
import threading
import warnings
import weakref

import pytest
import torch
from dense import dense_attention, dense_gradients, relative_l2
from guarded import NAME, in_one_head, noise, one_value, plant, within
from safetensors import safe_open
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attnbench
from attnbench import Plan, attention, explain, guard, guard_demotion, guard_hook, guarding, use_backend
from attnbench.api import forget_choices
from attnbench.errors import BreachError, BreachWarning, BudgetError, InputError
from attnbench.fp8 import Recipe, quantise
from attnbench.harness.captured import read_captured

pytestmark = pytest.mark.filterwarnings("ignore::attnbench.errors.BreachWarning")
PLAN = f"{NAME}>{NAME}"
BOUND = 0.01  # of bf16, which the planted plan is named after


@pytest.fixture
def planted(monkeypatch):
    """A forward and a backward that auto runs; afterwards nothing of them is left."""
    with monkeypatch.context() as patch:
        yield plant(patch)
    guard_demotion.pardon()
    forget_choices()


def tensors(batch=2, heads=4, kv_heads=2, sq=40, skv=56, d=16, dtype=torch.bfloat16, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, sq, d), (batch, kv_heads, skv, d), (batch, kv_heads, skv, d)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in shapes]


def step(x, function=attention, **arguments) -> list[Tensor]:
    out = function(*x, **arguments)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *torch.autograd.grad(out, x, grad_out)]


def calls_until_found(watch, x, most=60, **arguments) -> int:
    """How many steps it takes until the guard has found something."""
    for number in range(1, most + 1):
        (step if x[0].requires_grad else attention)(*([x] if x[0].requires_grad else x), **arguments)
        if watch.breaches:
            return number
    pytest.fail("nothing was found")


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
def test_a_plan_that_is_right_is_left_alone(case):
    x = tensors(grad=True)
    with guard(every=1) as watch:
        for seed in range(15):
            step(tensors(seed=seed, grad=True), **HEALTHY[case])
        with torch.no_grad():
            attention(*x, **HEALTHY[case])
    assert not watch.breaches
    assert not watch.skipped
    assert watch.checks == 31


def test_a_drift_is_found_when_it_comes(planted):
    forward, _ = planted
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
    assert within(found.error, 1.5 * BOUND, 0.2)
    assert found.call == found.check - 1


def test_a_wrong_head_is_found(planted):
    forward, _ = planted
    forward.change = in_one_head(lambda x: x.flip(-1), head=3)
    x = tensors(heads=8)
    with guard(every=1) as watch:
        assert calls_until_found(watch, x) <= 5


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
@pytest.mark.parametrize("where", ["everywhere", "one head"])
def test_wrong_gradients_are_found_and_named(planted, name, where):
    _, backward = planted
    backward.changes[name] = noise(2 * BOUND) if where == "everywhere" else in_one_head(lambda x: x * 1.3)
    x = tensors(grad=True)
    with guard(every=1) as watch:
        assert calls_until_found(watch, x, is_causal=True) <= 12
    assert {each.tensor for each in watch.breaches} == {name}
    assert {str(each.plan) for each in watch.breaches} == {PLAN}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_one_value_that_is_not_finite_is_found_at_once(planted, name, value):
    forward, backward = planted
    if name == "out":
        forward.change = one_value(value)
    else:
        backward.changes[name] = one_value(value)
    with guard(every=1) as watch:
        step(tensors(grad=True))
    assert watch.breaches[0].tensor == name
    assert (watch.breaches[0].error, watch.breaches[0].evidence) == (math.inf, math.inf)


def test_what_went_in_that_is_not_finite_is_no_breach():
    x = tensors()
    x[2][0, 0, 0, 0] = torch.nan
    with guard(every=1) as watch:
        assert attention(*x).isnan().any()
    assert not watch.breaches
    assert watch.checks == 0
    assert sum(watch.skipped.values()) == 1


def test_a_short_accumulator_fails_on_biased_values_only():
    """The failure of FP8 kernels that add up many keys in few bits: right on zero-mean inputs, wrong on live ones."""
    q, k, v = tensors(sq=32, skv=1024, d=32)
    for shift, found in ((0.0, False), (2.0, True)):
        for plan in ("emulated:fp8-acc8", "emulated:fp8-acc8p128"):
            with guard(every=1) as watch:
                for _ in range(4):
                    attention(q, k, v + shift, backend=plan)
            assert bool(watch.breaches) == (found and plan.endswith("acc8")), (shift, plan)


@pytest.mark.parametrize("every", [1, 3, 7])
def test_of_each_plan_and_spec_the_first_pass_and_every_so_many_after_it(every):
    with guard(every=every) as watch:
        for backend in ("sdpa-flash", "reference:fp32"):
            for sq in (5, 6):
                for number in range(1, 16):
                    before = watch.checks
                    step(tensors(sq=sq, grad=True), backend=backend)
                    assert watch.checks - before == (2 if (number - 1) % every == 0 else 0), number


def test_ever_new_shapes_are_not_all_checked():
    with guard(every=50) as watch:
        for sq in range(1, 265):
            attention(*tensors(batch=1, heads=1, kv_heads=1, sq=sq, skv=4, d=4), backend="reference:fp32")
    assert 64 <= watch.checks < 64 + 20


def test_the_budget_of_the_choice_is_the_bound(planted):
    forward, _ = planted
    forward.change = noise(0.05)
    q, k, v = tensors()
    calls = [
        ({}, {}, True),
        ({"max_error": 0.1}, {}, False),
        ({"max_error": 0.1, "backend": NAME}, {}, False),
        ({}, {"max_error": 0.1}, False),
        ({"max_error": 0.1}, {"max_error": 0.03}, True),
    ]
    for arguments, given, found in calls:
        with guard(every=1, **given) as watch:
            for _ in range(5):
                attention(q, k, v, **arguments)
        assert bool(watch.breaches) == found, (arguments, given)
    with use_backend(max_error=0.1), guard(every=1) as watch:
        attention(q, k, v)
    assert not watch.breaches
    forward.change = noise(0.0075)
    for arguments, found in (({}, False), ({"max_error": 0.005}, True)):
        with guard(every=1) as watch:
            for _ in range(8):
                attention(q, k, v, backend=NAME, **arguments)
        assert bool(watch.breaches) == found, arguments


def test_a_warning_for_each_plan_and_spec_and_a_line_in_the_log_for_each_breach(planted, caplog):
    forward, _ = planted
    forward.change = noise(1.0)
    with warnings.catch_warnings(record=True) as warned, guard(every=1) as watch:
        warnings.simplefilter("always")
        for sq in (5, 6):
            for _ in range(3):
                attention(*tensors(sq=sq))
    assert len(watch.breaches) == 6
    assert [each.category for each in warned] == [BreachWarning] * 2
    lines = [each for each in caplog.records if each.name == "attnbench.guard"]
    assert [each.levelno for each in lines] == [logging.WARNING] * 6
    for line, breach in zip(lines, watch.breaches, strict=True):
        assert str(breach.spec) in line.getMessage()
        assert NAME in line.getMessage()
        assert json.loads(json.dumps(line.breach, allow_nan=False)) == breach.to_dict()


def test_raise_raises_where_it_is_found(planted):
    forward, backward = planted
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


def test_demotion_changes_the_choice_and_explain_says_why(planted):
    forward, _ = planted
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
    assert str(explain(*x, backend=NAME).plan) == NAME  # who names it has it
    with pytest.raises(BudgetError, match="demoted"):
        explain(*x, backend=NAME, max_error=0.5)
    guard_demotion.pardon()
    assert str(explain(*x).plan) == NAME


def test_a_plan_that_was_not_asked_for_is_not_called_inaccurate(planted):
    x = tensors()
    guard_demotion.demote(Plan("emulated:fp8"), explain(*x).spec, "demoted")
    for arguments, verdict in (({}, "not asked for"), ({"dtype": "fp8"}, "inaccurate")):
        found = {str(each.plan): each.verdict for each in explain(*x, **arguments).candidates}
        assert found["emulated:fp8"] == verdict


def test_what_was_compiled_before_a_demotion_is_compiled_anew(planted):
    forward, _ = planted
    x = tensors()
    exact = attention(*x)
    compiled = torch.compile(lambda *x: attention(*x), fullgraph=True, backend="aot_eager")
    with guard(every=1, on_breach="demote"):
        compiled(*x)
        forward.change = noise(1.0)
        compiled(*x)
        assert relative_l2(compiled(*x), exact) < BOUND


def test_a_named_plan_that_is_demoted_goes_on_and_choices_are_made_anew_once(planted, monkeypatch):
    forward, _ = planted
    forward.change = noise(1.0)
    anew = []
    monkeypatch.setattr(guarding, "forget_choices", lambda: anew.append(1))
    with guard(every=1, on_breach="demote") as watch:
        for _ in range(4):
            attention(*tensors(), backend=NAME)
    assert len(watch.breaches) == 4
    assert anew == [1]


@pytest.mark.parametrize("name", ["out", "dq"])
def test_saved_tensors_reproduce_the_error(planted, tmp_path, name):
    forward, backward = planted
    change = in_one_head(lambda x: x * 0)
    if name == "out":
        forward.change = change
    else:
        backward.changes["dq"] = change
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
    assert within(found.error, error, 0.6)


def test_tensors_that_came_in_fp8_are_saved_with_their_scales(planted, tmp_path):
    forward, _ = planted
    forward.change = noise(1.0)
    parts = [quantise(x, Recipe("head")) for x in tensors()]
    names = {f"{n}_descale": x.descale[..., 0, 0] for n, x in zip("qkv", parts, strict=True)}
    with guard(every=1, save_to=tmp_path) as watch:
        attention(*(x.data for x in parts), backend=NAME, **names)
    with safe_open(watch.breaches[0].path, "pt") as file:
        assert torch.equal(file.get_tensor("0.k").float(), parts[1].data.float())
        assert torch.equal(file.get_tensor("0.k_descale"), parts[1].descale)


def test_a_folder_that_cannot_be_written_costs_the_file_alone(planted, tmp_path):
    forward, _ = planted
    forward.change = noise(1.0)
    (tmp_path / "file").write_text("in the way")
    with guard(every=1, save_to=tmp_path / "file") as watch:
        attention(*tensors())
    assert watch.breaches[0].path is None
    assert list(watch.skipped) == ["its tensors could not be written"]


def test_quantised_tensors_are_watched(planted):
    forward, _ = planted
    parts = [quantise(x, Recipe("head")) for x in tensors()]
    names = {f"{n}_descale": x.descale[..., 0, 0] for n, x in zip("qkv", parts, strict=True)}
    for relative, found in ((0.05, False), (0.5, True)):
        forward.change = noise(relative)
        with guard(every=1) as watch:
            for _ in range(3):
                attention(*(x.data for x in parts), backend=NAME, **names)
        assert bool(watch.breaches) == found
        assert watch.checks == 3


@pytest.mark.parametrize("state", [None, object()])
@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_compiled_programs_are_watched(planted, name, state):
    forward, backward = planted
    forward.state = state
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: attention(*x, is_causal=True), fullgraph=True, backend="aot_eager")
    x = tensors(grad=True)
    with guard(every=1) as watch:
        step(x, compiled)
        assert watch.checks >= 2
        assert not watch.breaches
        if name == "out":
            forward.change = noise(1.0)
        else:
            backward.changes[name] = noise(1.0)
        for _ in range(3):
            step(x, compiled)
    assert name in {each.tensor for each in watch.breaches}
    if name != "out":
        assert {each.tensor for each in watch.breaches} == {name}


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("plan", ["sdpa-math", "emulated:fp8>sdpa-flash:bf16"])
def test_checkpointing_sees_no_difference(plan, use_reentrant, every):
    def block(q, k, v):
        return attention(q * 1.5, k, v, is_causal=True, backend=plan).sin()

    def run() -> list[Tensor]:
        x = tensors(grad=True)
        out = x[0]
        for _ in range(3):
            out = checkpoint(block, out, *x[1:], use_reentrant=use_reentrant)
        out.sum().backward()
        return [out, *(each.grad for each in x)]

    alone = run()
    with guard(every=every) as watch:
        watched = run()
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert watch.checks > 0
    assert not watch.breaches
    assert not watch.skipped


def test_the_programs_random_numbers_and_answers_are_its_own():
    def run() -> list[object]:
        torch.manual_seed(3)
        random.seed(3)
        found = step([torch.randn(2, 4, 30, 16).to(torch.bfloat16).requires_grad_() for _ in range(3)])
        return [*found, torch.randn(5), torch.tensor([random.random()]), torch.get_rng_state()]

    alone = run()
    with guard(every=1):
        watched = run()
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))


@pytest.mark.parametrize("plan", ["sdpa-flash", "emulated:fp8"])
def test_inputs_may_change_or_go_before_the_backward(plan):
    x = tensors(grad=True)
    with guard(every=1) as watch:
        doubled = [each * 1.0 for each in x]
        seen = [weakref.ref(each) for each in doubled]
        out = attention(*doubled, backend=plan)
        grad_out = torch.randn_like(out)
        if plan == "emulated:fp8":  # which keeps copies; the guard too
            with torch.no_grad():
                for each in doubled:
                    each.zero_()
            del each
        del doubled
        gc.collect()
        if plan == "emulated:fp8":
            assert not any(each() is not None and each().untyped_storage().nbytes() for each in seen)
        out.backward(grad_out)
        sample = weakref.ref(out.grad_fn)
        del out
        gc.collect()
        assert sample() is None
    assert watch.checks == 2
    assert not watch.breaches


def test_nothing_is_kept_alive():
    with guard(every=1) as watch:
        x = tensors(grad=True)
        seen = [weakref.ref(each) for each in [*x, *step(x)]]
        with torch.no_grad():
            attention(*x)
        assert watch.checks == 3
        del x
        gc.collect()
        assert not any(each() is not None for each in seen)


def test_the_inner_guard_counts_and_each_may_be_stopped_in_any_order():
    x = tensors()
    outer, inner = guard(every=1).start(), guard(every=1).start()
    attention(*x)
    assert (outer.checks, inner.checks) == (0, 1)
    outer.stop()
    attention(*x)
    assert (outer.checks, inner.checks) == (0, 2)
    inner.stop()
    attention(*x)
    assert (outer.checks, inner.checks) == (0, 2)
    assert guard_hook.watcher is None
    with outer, inner:
        attention(*x)
    assert (outer.checks, inner.checks) == (0, 3)
    with outer, pytest.raises(InputError, match="open already"):
        outer.start()
    assert guard_hook.watcher is None


class Late:
    """The event of a check that a GPU has not got to yet."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.waited = True


def late(watch) -> guarding._Check:
    """A check of a call of the guard's first case, under way, that will be found infinite."""
    attention(*tensors())
    packed = torch.tensor([1.0, 1.0, *[0.0] * 8, *[1.0] * 8], dtype=torch.float64)
    check = guarding._Check(next(iter(watch._cases.values())), "out", 1, torch.device("cpu"), packed, Late(), {})
    watch._under_way.append(check)
    return check


def test_what_is_under_way_is_waited_for_at_the_end_and_no_sooner():
    watch = guard(every=2, on_breach="raise").start()
    check = late(watch)
    attention(*tensors())
    assert watch.checks == 1
    with pytest.raises(BreachError, match="not finite"):
        watch.stop()
    assert check.done.waited
    assert watch.checks == 2


def test_the_programs_own_error_goes_first():
    watch = guard(every=1, on_breach="raise")

    def program() -> None:
        with watch:
            late(watch)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    assert len(watch.breaches) == 1
    assert guard_hook.watcher is None


def test_a_backward_after_the_guard_is_closed_is_not_its_business(planted):
    _, backward = planted
    backward.changes["dq"] = noise(1.0)
    x = tensors(grad=True)
    with guard(every=1, on_breach="raise") as watch:
        out = attention(*x)
    out.sum().backward()
    assert watch.checks == 1


def test_a_check_that_fails_costs_itself_alone(monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    x = tensors(grad=True)
    expected = step(x)
    for name in ("out_sums", "gradient_sums", "part"):
        with monkeypatch.context() as patch, guard(every=1) as watch:
            patch.setattr(guarding, name, fail)
            for _ in range(3):
                assert all(torch.equal(a, b) for a, b in zip(step(x), expected, strict=True))
        assert watch.skipped == {"OutOfMemoryError": 3}
        assert watch.checks == 3
    assert [each.getMessage() for each in caplog.records] == ["a check fell short: OutOfMemoryError: no room"] * 3


def test_eight_threads_are_counted_together(planted):
    _, backward = planted
    backward.changes["dv"] = in_one_head(lambda x: x * math.nan, head=1)
    watch, errors = guard(every=5).start(), []

    def work(seed: int) -> None:
        try:
            for _ in range(25):
                step(tensors(seed=seed, grad=True))
        except Exception as error:  # a thread's error would be lost
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    watch.stop()
    assert not errors
    assert watch.checks == 2 * 8 * 25 // 5
    assert {each.tensor for each in watch.breaches} == {"dv"}
    assert len(watch.breaches) == 40


@pytest.mark.parametrize("mode", ["inference", "autocast", "default device", "no grad"])
def test_in_the_modes_that_programs_run_in(planted, mode):
    forward, _ = planted
    modes = {
        "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
        "default device": torch.device("meta"),
        "no grad": torch.no_grad(),
    }
    x = tensors(dtype=torch.float32)
    for relative, found in ((1e-6, False), (1e-3, True)):
        forward.change = noise(relative)
        with guard(every=1, max_error=1e-4) as watch, modes[mode]:
            attention(*x, backend=NAME)
        assert bool(watch.breaches) == found, relative
        assert not watch.skipped


@pytest.mark.parametrize(
    "arguments",
    [{"every": 0}, {"every": 2.0}, {"every": True}, {"max_error": 0}, {"max_error": "1"}, {"on_breach": "shout"}],
)
def test_arguments_that_cannot_be_are_refused(arguments):
    with pytest.raises(InputError):
        guard(**arguments)


def test_it_is_where_users_look_for_it():
    assert attnbench.guard is guard
    assert "guard" in dir(attnbench)
