"""autotune within its seconds: what comes first, and what a deadline or an interrupt leaves whole or not at all."""

import time
from types import SimpleNamespace

import pytest
from autotune_setup import (
    FAST,
    SLOW,
    children,
    entries,
    own_path,
    tensors,
)
from delayed_kernels import BREAKS_HOW, HANG_SECONDS, spec

import attnbench
from attnbench import attention, explain
from attnbench.dispatch.memory import listening
from attnbench.harness.autotune import run as tuning
from attnbench.harness.autotune.tuning import alone


def test_a_deadline_ends_a_plan_that_hangs_and_leaves_no_process(planted, monkeypatch):
    monkeypatch.setenv(BREAKS_HOW, "hangs")
    others = children()
    start = time.monotonic()
    tuned = attnbench.autotune(2).measure([spec()], "cpu")
    assert time.monotonic() - start < HANG_SECONDS
    assert children() <= others
    assert not tuned.measured
    assert not own_path().exists()
    assert tuned.skipped == {spec(): "it was not measured whole when 2 s were over"}


def test_all_measuring_of_one_object_shares_its_seconds(planted, monkeypatch):
    now, given = [0.0], []

    def spends(lab, work, deadline):
        given.append(deadline - now[0])
        now[0] += 1.0
        yield from ()

    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(tuning, "measured_within", spends)
    tuned = attnbench.autotune(1.5)
    for _ in range(3):
        tuned.measure([spec()], "cpu")
    assert given == [1.5, 0.5]
    assert tuned.skipped == {spec(): "no time was left of 1.5 s"}
    tuned = attnbench.autotune(0).measure([spec()], "cpu")
    assert tuned.skipped == {spec(): "no time was given"}
    assert "no time was given" in str(tuned)
    assert len(given) == 2


def test_what_takes_most_of_the_program_s_time_comes_first(unmeasured):
    with attnbench.autotune(60) as tuned:
        for length, calls in {16: 40, 64: 1, 48: 4, 8: 1}.items():
            for _ in range(calls):
                attention(*tensors(length))
    assert [case.spec.seqlen_q for case, _ in unmeasured] == [16, 48, 64, 8]
    assert tuned.skipped == {
        spec(16): "it was not measured whole when 60 s were over",
        **{spec(length): "no time was left of 60 s" for length in (48, 64, 8)},
    }


def test_an_interrupt_keeps_what_is_whole_and_leaves_no_process(planted, monkeypatch):
    others = children()
    keep = tuning.Autotune._keep

    def interrupted(self, *arguments):
        keep(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning.Autotune, "_keep", interrupted)
    tuned = attnbench.autotune(120, backends=FAST)
    with pytest.raises(KeyboardInterrupt):
        tuned.measure([spec(32), spec(64)], "cpu")
    assert [each.spec for each in tuned.measured] == [spec(64)]
    assert tuned.skipped == {spec(32): "measuring was interrupted"}
    assert children() <= others
    assert entries(own_path()) == {spec(64): {SLOW, FAST}}
    assert str(explain(*tensors(64)).plan) == FAST
    assert listening.active is None


def test_a_process_that_cannot_measure_because_another_does_reports_so(unmeasured):
    with alone(own_path(), 0.0) as ours:
        assert ours
        # Locks of one process exclude each other as those of two do: each belongs to what was opened.
        tuned = attnbench.autotune(0.2).measure([spec()], "cpu")
    assert not unmeasured
    assert tuned.skipped == {spec(): "another process was measuring for this table all the time"}
    attnbench.autotune(60).measure([spec()], "cpu")
    assert len(unmeasured) == 1
