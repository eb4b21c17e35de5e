"""The guard in real programs: compiled, checkpointed, threaded, nested; no results change, no tensors are kept."""

import gc
import random
import weakref
from unittest.mock import Mock

import pytest
import torch
from guard_faults import noise, spoil, step
from problems import tensors
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnbench import attention, guard
from attnbench.errors import AttnbenchWarning, BreachError, InputError
from attnbench.guarding import guard as guarding
from attnbench.guarding.check import Sums
from attnbench.kernels.guard_hook import watching

pytestmark = pytest.mark.filterwarnings("ignore::attnbench.errors.BreachWarning")


def test_an_unwritable_folder_loses_only_the_saved_file(planted_kernels, tmp_path):
    spoil(planted_kernels, "out", noise(1.0))
    (tmp_path / "file").write_text("in the way")
    with guard(every=1, save_to=tmp_path / "file") as watch:
        attention(*tensors())
    assert watch.breaches[0].path is None
    assert list(watch.skipped) == ["its tensors could not be written"]


@pytest.mark.parametrize(("name", "state"), [("out", object()), ("dq", None), ("dk", object()), ("dv", None)])
def test_compiled_programs_are_checked(planted_kernels, name, state):
    planted_kernels[0].state = state
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: attention(*x, is_causal=True), fullgraph=True, backend="aot_eager")
    x = tensors(grad=True)
    with guard(every=1) as watch:
        step(x, compiled)
        assert watch.checks >= 2
        assert not watch.breaches
        spoil(planted_kernels, name, noise(1.0))
        for _ in range(3):
            step(x, compiled)
    assert name in {each.tensor for each in watch.breaches}
    if name != "out":
        assert {each.tensor for each in watch.breaches} == {name}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("plan", ["sdpa-math", "emulated:fp8>sdpa-flash:bf16"])
def test_checkpointing_gives_the_same_gradients_under_a_guard(plan, use_reentrant, every):
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


def test_a_guard_changes_no_random_numbers_or_results():
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
def test_inputs_may_be_changed_or_freed_before_the_backward(plan):
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


def test_the_inner_guard_is_active_and_guards_stop_in_any_order():
    x = tensors()
    outer, inner = guard(every=1).start(), guard(every=1).start()
    for stop, checks in ((outer.stop, 1), (inner.stop, 2), (inner.stop, 2)):
        attention(*x)
        assert (outer.checks, inner.checks) == (0, checks)
        stop()
    assert watching.active is None
    with outer, inner:
        attention(*x)
    assert (outer.checks, inner.checks) == (0, 3)
    with outer, pytest.raises(InputError, match="open already"):
        outer.start()
    assert watching.active is None


class PendingEvent:
    """The event of a check that the GPU has not finished."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.waited = True


def add_pending_check(watch) -> guarding._Check:
    """Adds a pending check with a nonfinite error, of a call of the guard's first case."""
    attention(*tensors())
    sums = Sums(torch.tensor([1.0, torch.nan, *[0.0] * 8, *[1.0] * 8], dtype=torch.float64), 1, 8, {"out": 0.0})
    check = guarding._Check(next(iter(watch._cases.values())), 1, torch.device("cpu"), sums, PendingEvent(), {})
    watch._under_way.append(check)
    return check


def test_pending_checks_are_awaited_only_at_the_end():
    watch = guard(every=2, on_breach="raise").start()
    check = add_pending_check(watch)
    attention(*tensors())
    assert watch.checks == 1
    with pytest.raises(BreachError, match="not finite"):
        watch.stop()
    assert check.done.waited
    assert watch.checks == 2


def test_the_programs_own_exception_takes_precedence():
    watch = guard(every=1, on_breach="raise")

    def program() -> None:
        with watch:
            add_pending_check(watch)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    assert len(watch.breaches) == 1
    assert watching.active is None


def test_a_backward_after_the_guard_closed_is_not_checked(planted_kernels):
    spoil(planted_kernels, "dq", noise(1.0))
    x = tensors(grad=True)
    with guard(every=1, on_breach="raise") as watch:
        out = attention(*x)
    out.sum().backward()
    assert watch.checks == 1


def test_an_exception_in_a_check_loses_only_that_check(monkeypatch, caplog):
    fail = Mock(side_effect=torch.OutOfMemoryError("no room"))
    x = tensors(grad=True)
    expected = step(x)
    for name in ("out_sums", "gradient_sums", "part"):
        short = pytest.warns(AttnbenchWarning, match="a check fell short: OutOfMemoryError: no room")
        with monkeypatch.context() as patch, short as caught, guard(every=1) as watch:
            patch.setattr(guarding, name, fail)
            for _ in range(3):
                assert all(torch.equal(a, b) for a, b in zip(step(x), expected, strict=True))
        assert watch.skipped == {"OutOfMemoryError": 3}
        assert len(caught) == 1
        assert watch.checks == 3
    assert [each.getMessage() for each in caplog.records] == ["a check fell short: OutOfMemoryError: no room"] * 3


@pytest.mark.parametrize(
    "arguments",
    [{"every": 0}, {"every": 2.0}, {"every": True}, {"max_error": 0}, {"max_error": "1"}, {"on_breach": "shout"}],
)
def test_invalid_arguments_are_refused(arguments):
    with pytest.raises(InputError):
        guard(**arguments)
