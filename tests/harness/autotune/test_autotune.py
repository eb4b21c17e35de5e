"""autotune: what a program asks is measured after it, and chosen by from then on."""

import random

import delayed_kernels
import numpy as np
import pytest
import torch
from autotune_setup import BREAKS, FAST, SLOW, children, entries, own_path, replay_rows, rows_of, tensors
from delayed_kernels import BREAKS_HOW, spec

import attnbench
from attnbench import api, attention, explain
from attnbench.harness.autotune import run as tuning
from attnbench.kernels.guard_hook import watching
from attnbench.kernels.plan import Plan


@pytest.fixture(autouse=True)
def unread():
    api.forget_choices()
    yield
    api.forget_choices()


def test_the_fastest_is_chosen_by_measurement_and_the_user_s_program_is_left_alone(planted, monkeypatch):
    monkeypatch.setenv(BREAKS_HOW, "dies")  # which costs that plan alone
    others = children()
    x = tensors()
    before = attention(*x)
    assert (str(explain(*x).plan), explain(*x).basis) == (SLOW, "rule")
    random_states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with attnbench.autotune(120) as tuned:
        assert torch.equal(attention(*x), before)
        attention(*x, return_lse=True)
        y = tensors(grad=True)
        torch.autograd.grad(attention(*y).sum(), y)
        assert not tuned.measured
        assert children() <= others
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == random_states[1:]
    assert children() <= others
    training = spec(direction="training")
    found = {each.spec: each for each in tuned.measured}
    assert {asked: each.calls for asked, each in found.items()} == {spec(): 2, training: 1}
    assert not tuned.skipped
    assert tuned.tables == [own_path()]
    for asked, plan, died in (
        (spec(), FAST, BREAKS),
        (training, f"{FAST}>{FAST}", f"{BREAKS}>{BREAKS}"),
    ):
        assert str(found[asked].before.plan) == plan.replace("fast", "slow")
        assert (str(found[asked].after.plan), found[asked].after.basis) == (plan, "measured")
        assert found[asked].lost.keys() == {died}
        assert "exit code 7" in found[asked].lost[died]
    assert "exit code 7" in str(tuned)
    assert entries(own_path()) == {
        spec(): {SLOW, FAST, BREAKS},
        training: {f"{name}>{name}" for name in (SLOW, FAST, BREAKS)},
    }
    assert (str(explain(*x).plan), explain(*x).basis) == (FAST, "measured")
    assert {str(each.plan): each.verdict for each in explain(*x).candidates}[BREAKS] == "unmeasured"
    assert str(explain(*tensors(grad=True)).plan) == f"{FAST}>{FAST}"
    line = next(line for line in str(tuned).splitlines() if line.startswith(str(spec())))
    times = {each.plan: each.time_ms for each in found[spec()].after.candidates}
    assert line == (
        f"{spec()} on cpu: {SLOW} {times[Plan.parse(SLOW)]:.3g} ms → {FAST} {times[Plan.parse(FAST)]:.3g} ms"
    )
    assert times[Plan.parse(SLOW)] >= 1e3 * delayed_kernels.SLOW  # which it sleeps
    assert times[Plan.parse(FAST)] >= 1e3 * delayed_kernels.FAST


def test_a_compiled_program_runs_what_was_measured(planted, compiled_anew, monkeypatch):
    ran = []

    class Watcher:
        def answered(self, execution, *_):
            ran.append(str(execution.plan))

        def sample(self, *_):
            return None

    function = torch.compile(lambda q, k, v: attention(q, k, v), backend="eager", fullgraph=True)
    monkeypatch.setattr(watching, "active", Watcher())
    monkeypatch.setattr(tuning, "measured_within", replay_rows(rows_of(32)))
    with torch.no_grad():
        with attnbench.autotune(120, backends=FAST) as tuned:
            function(*tensors())
            tuned.measure()
            function(*tensors())
            assert ran == [SLOW, FAST]
        function(*tensors())
    assert ran[2:] == [FAST]
    (one,) = tuned.measured
    assert one.calls == 1
