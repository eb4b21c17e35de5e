"""A spec of which time reached some plans: kept if what ran before is one of them, and completed by the next one."""

from datetime import datetime, timezone

import paced
import pytest
from flat import measurement
from hypothesis import given
from hypothesis import strategies as st
from paced import spec
from planted import CPU, setup
from tunable import BREAKS, FAST, FP8, SLOW, entries, measuring_nothing, own_path, replayed, tensors

import attnbench
from attnbench import api, attention, explain
from attnbench.choosing import selector
from attnbench.harness.autotune import run as tuning
from attnbench.harness.autotune.observed_specs import ObservedSpec, ObservedSpecs
from attnbench.harness.autotune.tuning import chosen, tuning_task
from attnbench.harness.results.condense import condense
from attnbench.kernels.plan import Plan
from attnbench.tables.table import Table
from attnbench.tables.user_table import Known

HERE = setup(paced.SOURCE)
NOTHING = Table(HERE.environment, {})
EVERY = (SLOW, FAST, BREAKS, FP8)


pytestmark = pytest.mark.usefixtures("planted")


def row(plan, call_ms=None, length=64, fp8_error=0.05):
    """A row of the plan; without a time of one that gave no answer."""
    numbers = {
        "time_ms": dict.fromkeys(("kernel", "prepared", "call"), [call_ms] * 5),
        "error": {family: {"out": fp8_error if plan == FP8 else 0.002} for family in ("normal", "outlier")},
        "bound": 0.1, "declared_error": 0.05, "truth": "fp64", "timer": "perf_counter", "drawn_on": "cpu",
    }  # fmt: skip
    ended = {"status": "ok", **numbers} if call_ms else {"status": "timeout", "reason": "no answer within 5 s"}
    return measurement(
        case=str(spec(length)), spec=spec(length), plan=Plan(plan), environment=HERE.environment,
        started=datetime.now(timezone.utc), **ended,
    )  # fmt: skip


def tuned_by(monkeypatch, *rows, seconds=60, **how):
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "measured_within", replayed(rows))
        return attnbench.autotune(seconds, **how).measure([spec(64)], "cpu")


def to_be_measured(**how):
    with pytest.MonkeyPatch.context() as patch:
        works = measuring_nothing(patch)
        tuned = attnbench.autotune(60, **how).measure([spec(64)], "cpu")
    return [list(map(str, plans)) for _, plans in works], tuned


def known_of(*rows):
    return Table.from_entries(HERE.environment, condense(rows)).condensed()


def test_with_what_ran_before_and_a_rival_it_is_kept_as_what_it_is(monkeypatch):
    tuned = tuned_by(monkeypatch, row(SLOW, 30.0), row(FAST, 10.0))
    (one,) = tuned.measured
    assert one.lost == {BREAKS: "not reached in 60 s"}
    assert f"  {BREAKS}: not reached in 60 s" in str(tuned).splitlines()
    assert tuned.skipped == {}
    assert entries(own_path()) == {spec(64): {SLOW, FAST}}
    assert (str(one.before.plan), str(one.after.plan)) == (SLOW, FAST)
    assert (str(explain(*tensors(64)).plan), explain(*tensors(64)).basis) == (FAST, "measured")


@pytest.mark.parametrize(
    "rows", [[row(FAST, 10.0), row(BREAKS, 5.0)], [row(SLOW, 30.0)], [row(SLOW), row(FAST, 10.0), row(BREAKS, 5.0)]],
    ids=["without what ran before", "without a rival", "what ran before took too long"],
)  # fmt: skip
def test_without_these_it_is_not(monkeypatch, rows):
    tuned = tuned_by(monkeypatch, *rows, seconds=10)
    assert not tuned.measured
    assert not own_path().exists()
    (reason,) = tuned.skipped.values()
    assert reason == f"{SLOW}: timeout: no answer within 5 s" if len(rows) == 3 else "10 s were over" in reason


def test_what_takes_too_long_may_be_the_fastest_all_the_same(monkeypatch):
    rows = row(SLOW), row(FAST, 10.0), row(FP8, 5.0)
    assert not tuned_by(monkeypatch, *rows, seconds=120, dtype="fp8").measured
    assert not own_path().exists()


def test_the_next_autotune_completes_it_beside_the_fastest(monkeypatch):
    tuned_by(monkeypatch, row(SLOW, 30.0), row(FAST, 10.0))
    works, _ = to_be_measured()
    assert works == [[FAST, BREAKS]]
    works, _ = to_be_measured(again=True)
    assert set(works[0]) == {SLOW, FAST, BREAKS}
    tuned = tuned_by(monkeypatch, row(FAST, 11.0), row(BREAKS, 5.0))
    (one,) = tuned.measured
    assert one.lost == {}
    assert entries(own_path()) == {spec(64): {SLOW, FAST, BREAKS}}
    assert str(explain(*tensors(64)).plan) == BREAKS
    works, tuned = to_be_measured()
    assert works == []
    assert tuned.skipped == {spec(64): "your table has it already; again=True measures it anew"}


def test_fp8_is_measured_for_who_opens_it_and_chosen_for_nobody_else(monkeypatch):
    rows = [row(plan, ms) for plan, ms in {SLOW: 30.0, FAST: 10.0, BREAKS: 30.0, FP8: 1.0}.items()]
    tuned_by(monkeypatch, *rows, backends=FAST)
    assert entries(own_path()) == {spec(64): {SLOW, FAST}}  # what is chosen now is measured beside what was named
    monkeypatch.setattr(tuning, "measured_within", replayed(rows))
    with attnbench.autotune(120) as tuned:
        attention(*tensors(64))
        attention(*tensors(64), max_error=0.5)
    assert str(tuned).splitlines()[1].endswith(f"{FAST} 10 ms, as before")
    assert [(each.calls, str(each.before.plan), str(each.after.plan)) for each in tuned.measured] == [
        (2, FAST, FAST),
        (2, FAST, FP8),
    ]
    assert entries(own_path()) == {spec(64): {SLOW, FAST, BREAKS, FP8}}
    assert str(explain(*tensors(64)).plan) == FAST
    assert str(explain(*tensors(64), dtype="fp8").plan) == FP8
    error = explain(*tensors(64), dtype="fp8").chosen.error
    assert str(explain(*tensors(64), max_error=error / 2).plan) == FAST


def test_what_another_process_has_left_half_is_completed_beside_its_fastest(monkeypatch):
    explain(*tensors(64))  # this one has read its tables
    known_of(row(SLOW, 30.0), row(FAST, 10.0)).save(own_path())
    works, _ = to_be_measured()
    assert works == [[FAST, BREAKS]]


def test_a_rival_that_a_hurried_autotune_did_not_wait_for_is_not_taken_to_hang(monkeypatch):
    rows = row(SLOW, 30.0), row(FAST, 10.0), row(BREAKS)
    tuned = tuned_by(monkeypatch, *rows, seconds=10)
    assert tuned.measured[0].lost == {BREAKS: "timeout: no answer within 5 s"}
    assert entries(own_path()) == {spec(64): {SLOW, FAST}}
    assert to_be_measured()[0] == [[FAST, BREAKS]]
    tuned_by(monkeypatch, *rows, seconds=120)
    assert entries(own_path()) == {spec(64): {SLOW, FAST, BREAKS}}
    assert to_be_measured()[0] == []


def near_by(fp8_error=0.05, fp8_ms=1.0, breaks_ms=3.0):
    """The order of the plans at a spec nearby, which is in the table."""
    rows = [
        row(plan, ms, 128, fp8_error) for plan, ms in {SLOW: 4.0, BREAKS: breaks_ms, FAST: 2.0, FP8: fp8_ms}.items()
    ]
    known_of(*rows).save(own_path())
    api.forget_choices()


def test_what_runs_now_and_where_nothing_is_known_comes_first_then_who_is_predicted_to_win():
    near_by()
    assert to_be_measured(dtype="fp8")[0] == [[FP8, FAST, SLOW, BREAKS]]
    assert to_be_measured()[0] == [[FAST, SLOW, BREAKS]]
    near_by(fp8_ms=10.0, breaks_ms=50.0)
    assert to_be_measured(dtype="fp8")[0] == [[FAST, SLOW, FP8, BREAKS]]
    near_by(fp8_error=0.3)
    assert to_be_measured(dtype="fp8")[0] == [[FAST, SLOW, BREAKS, FP8]]


def test_where_nothing_is_known_plans_come_in_their_declared_order(monkeypatch):
    monkeypatch.setattr(HERE.registry.forward(FP8), "preference", 0.5)
    errand = tuning_task(ObservedSpec(spec(64), CPU), HERE, True, (), NOTHING, False)
    assert list(map(str, errand.plans)) == [SLOW, FP8, BREAKS, FAST]  # in turn of calls with FP8 and without


def test_named_backends_are_measured_beside_what_is_asked_now_and_nothing_else():
    near_by()
    assert to_be_measured(dtype="fp8", backends=BREAKS)[0] == [[FP8, BREAKS]]


def test_sinks_are_measured_as_none():
    observed = ObservedSpecs()
    assert observed.of(spec().replace(sinks=True, return_lse=True), CPU) is observed.of(spec(), CPU)


_times = st.lists(st.floats(1.0, 100.0), min_size=4, max_size=4)


@given(near=_times, here=_times, fp8=st.booleans(), reached=st.integers(1, 4))
def test_no_call_is_slower_for_an_entry_that_time_has_cut_short(near, here, fp8, reached):
    """Whatever the truth, the prediction and the place of the cut: with FP8, without, and where nothing was known."""
    predicted = known_of(*(row(plan, ms, 128) for plan, ms in zip(EVERY, near, strict=True)))
    truth = {Plan(plan): ms for plan, ms in zip(EVERY, here, strict=True)}
    asked = ObservedSpec(spec(64), CPU)
    questions = [(fp8, None), (False, None)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selector, "known_tables", lambda device: Known.of(predicted))
        before = {terms: chosen(asked, terms, HERE.registry) for terms in questions}
        asked.choices |= {(fp8, None): before[fp8, None]}
        errand = tuning_task(asked, HERE, fp8, (), NOTHING, False)
        rows = [row(str(plan), truth[plan]) for plan in errand.plans[:reached]]
        if not errand.settled_by(rows):
            return
        patch.setattr(selector, "known_tables", lambda device: Known.of(known_of(*rows)))
        after = {terms: chosen(asked, terms, HERE.registry) for terms in questions}
    default = chosen(asked, (False, None), HERE.registry, NOTHING).plan
    for terms, choice in after.items():
        # Within the noise the more accurate one runs.
        assert truth[choice.plan] <= 1.04 * min(truth[before[terms].plan], truth[default])
