"""A spec of which time reached some plans: kept if what ran before is one of them, and completed by the next one."""

import autotune_setup
import delayed_kernels
import pytest
from autotune_setup import BREAKS, FAST, FP8, SLOW, entries, own_path, record_work, replay_rows, tensors
from delayed_kernels import spec
from planted import setup

import attnbench
from attnbench import api, attention, explain
from attnbench.harness.autotune import run as tuning
from attnbench.harness.results.condense import condense
from attnbench.tables.table import Table

HERE = setup(delayed_kernels.SOURCE)


pytestmark = pytest.mark.usefixtures("planted")


def row(plan, call_ms=None, length=64, fp8_error=0.05):
    return autotune_setup.row(spec(length), plan, call_ms, fp8_error if plan == FP8 else 0.002)


def tuned_by(monkeypatch, *rows, seconds=60, **how):
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "measured_within", replay_rows(rows))
        return attnbench.autotune(seconds, **how).measure([spec(64)], "cpu")


def to_be_measured(**how):
    with pytest.MonkeyPatch.context() as patch:
        works = record_work(patch)
        tuned = attnbench.autotune(60, **how).measure([spec(64)], "cpu")
    return [list(map(str, plans)) for _, plans in works], tuned


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
    works, tuned = to_be_measured(backends=BREAKS, again=True)
    assert works == []
    assert tuned.skipped == {
        spec(64): f"there is nothing to choose: of what was named nothing but {BREAKS} can serve it"
    }


def test_fp8_is_measured_for_who_opens_it_and_chosen_for_nobody_else(monkeypatch):
    rows = [row(plan, ms) for plan, ms in {SLOW: 30.0, FAST: 10.0, BREAKS: 30.0, FP8: 1.0}.items()]
    tuned_by(monkeypatch, *rows, backends=FAST)
    assert entries(own_path()) == {spec(64): {SLOW, FAST}}  # what is chosen now is measured beside what was named
    monkeypatch.setattr(tuning, "measured_within", replay_rows(rows))
    with attnbench.autotune(120) as tuned:
        attention(*tensors(64))
        attention(*tensors(64), max_error=0.5)
    tuned.measure()
    assert not tuned.skipped, "what it has measured itself it does not measure twice"
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


def near_by(fp8_error=0.05, fp8_ms=1.0, breaks_ms=3.0):
    """The order of the plans at a spec nearby, which is in the table."""
    rows = [
        row(plan, ms, 128, fp8_error) for plan, ms in {SLOW: 4.0, BREAKS: breaks_ms, FAST: 2.0, FP8: fp8_ms}.items()
    ]
    Table.from_entries(HERE.environment, condense(rows)).condensed().save(own_path())
    api.forget_choices()


def test_what_runs_now_and_where_nothing_is_known_comes_first_then_who_is_predicted_to_win():
    near_by()
    assert to_be_measured(dtype="fp8")[0] == [[FP8, FAST, SLOW, BREAKS]]
    assert to_be_measured()[0] == [[FAST, SLOW, BREAKS]]
    near_by(fp8_ms=10.0, breaks_ms=50.0)
    assert to_be_measured(dtype="fp8")[0] == [[FAST, SLOW, FP8, BREAKS]]
    near_by(fp8_error=0.3)
    assert to_be_measured(dtype="fp8")[0] == [[FAST, SLOW, BREAKS, FP8]]
