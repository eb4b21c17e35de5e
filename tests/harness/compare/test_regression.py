"""What a comparison of two result sets finds, what it does not invent, and which exit code that is."""

from dataclasses import replace

import numpy as np
import pytest
from compared import HERE, WIDE, passed_over, results, row, slowed, times
from hypothesis import given
from hypothesis import strategies as st

from attnbench.errors import MisuseError
from attnbench.harness.compare.pairs import rows_of
from attnbench.harness.compare.regression import compare_results
from attnbench.harness.compare.terms import Limits, Terms, Threshold, percentage
from attnbench.harness.compare.times import ratios
from attnbench.harness.measure.clocks import Conditions, Range
from attnbench.harness.results.visits import visit_medians
from attnbench.kernels.plan import Plan
from attnbench.problem.spec import AttentionSpec

FLASH = Plan("sdpa-flash:bf16")


def verdict_of(before, after, terms=None):
    """The only outcome, and the exit code."""
    found = compare_results(results(*([before] if before else [])), results(*([after] if after else [])), terms or WIDE)
    (outcome,) = found.outcomes
    return outcome, found.exit_code


@pytest.mark.parametrize("visits", [[3], [1, 1, 1]])
def test_a_cost_of_one_visit_or_three_samples_needs_another_that_says_the_same(visits):
    def few(kernel, call):
        taken = {"kernel": [kernel] * 3, "call": [call] * 40}
        return row(time_ms=taken, visits={"kernel": visits, "call": [5] * 8})

    assert verdict_of(few(1.0, 1.3), few(2.0, 2.6))[0].costs["kernel"].verdict == "slower"
    assert verdict_of(few(1.0, 1.3), few(1.0, 2.6))[0].costs["call"].verdict == "slower"
    outcome, code = verdict_of(few(1.0, 1.3), few(2.0, 1.3))
    assert (outcome.verdict, outcome.suspect, code) == ("uncertain", True, 4)
    alone = verdict_of(few(1.0, 1.3), few(2.0, 2.6), Terms(WIDE.limits, costs=("kernel",)))[0]
    assert (alone.verdict, np.isinf(alone.visible)) == (("uncertain", True) if visits == [3] else ("slower", False))


@pytest.mark.parametrize(
    ("costs", "limit", "verdict"),
    [(("call", "kernel"), 0.03, "slower"), (("call",), 0.03, "uncertain"), (("call", "kernel"), 2.0, "same")],
)
def test_two_costs_that_lie_wholly_apart_by_far_are_slower_though_visits_found_two_clocks(costs, limit, verdict):
    """One row of `inference` is like that."""
    before = row(time_ms={cost: [1.0] * 5 + [1.12] * 5 for cost in ("kernel", "call")})
    others = [row(f"other {number}", seed=number) for number in range(300)]
    base, new = results(before, *others), results(slowed(before, 1.5, costs), *others)
    assert compare_results(base, new, Terms(Limits(time=limit))).outcomes[0].verdict == verdict


@pytest.mark.parametrize(("scatter", "verdict"), [(0.001, "slower"), (0.2, "uncertain")])
def test_visits_that_agree_by_chance_are_no_better_than_their_samples(scatter, verdict):
    taken = {"call": [1 - scatter, 1.0, 1 + scatter] * 2}
    before = row(time_ms=taken, visits={"call": [3, 3]})
    assert visit_medians(before, "call") == [1.0, 1.0]
    assert verdict_of(before, slowed(before, 1.2))[0].verdict == verdict


@pytest.mark.parametrize(("ratio", "rows"), [(1.1, 30), (3.0, 1)])
def test_slower_and_faster_mirror_one_another(ratio, rows):
    others = [row(f"other {number}", seed=number) for number in range(rows - 1)]
    base, new = results(row(), *others), results(row(time_ms=times(7, ratio=ratio)), *others)
    slow, fast = compare_results(base, new, WIDE), compare_results(new, base, WIDE)
    assert (slow.outcomes[0].verdict, slow.exit_code) == ("slower", 1)
    assert (fast.outcomes[0].verdict, fast.exit_code) == ("faster", 0)
    assert slow.outcomes[0].costs["kernel"].ratio == pytest.approx(ratio, rel=0.01)


def test_how_large_a_slow_down_is_found_is_a_matter_of_the_limit():
    assert verdict_of(row(), row(time_ms=times(1, ratio=1.2)))[0].verdict == "slower"
    lenient = Terms(thresholds=(Threshold("a", time=1.0),))
    assert verdict_of(row(), row(time_ms=times(1, ratio=1.2)), lenient)[0].verdict == "same"
    strict = Terms(thresholds=(Threshold("a", time=0.01),))
    outcome, code = verdict_of(row(), row(seed=1), strict)
    assert (outcome.verdict, code) == ("uncertain", 4)
    assert outcome.visible > 0.01


def test_one_cost_is_enough_and_one_that_is_faster_does_not_hide_it():
    more = slowed(slowed(row(seed=1), 1.2, ["call"]), 0.8, ["kernel"])
    outcome, code = verdict_of(row(), more)
    assert (outcome.verdict, code) == ("slower", 1)
    assert [reason.split()[0] for reason in outcome.reasons] == ["call"]
    assert verdict_of(row(), more, Terms(costs=("kernel",)))[0].verdict == "faster"


def test_what_a_host_decides_has_its_own_limit():
    waits, ahead = ([share * each for each in times(0)["call"]] for share in (0.9, 0.1))
    for host_ms, decided in ((waits, True), (ahead, False)):
        before, after = row(host_ms=host_ms), slowed(row(seed=1, host_ms=host_ms), 1.3, ["call"])
        outcome, _ = verdict_of(before, after)
        assert (outcome.costs["call"].host, outcome.costs["host"].host) == (decided, True)
        assert outcome.costs["call"].limit == (1.0 if decided else 0.1)
        assert outcome.verdict == ("uncertain" if decided else "slower")
        assert outcome.visible == max(each.visible for each in outcome.costs.values() if not each.host)
    wide = Terms(Limits(time=0.1, host=10.0))
    assert verdict_of(row(host_ms=waits), row(seed=1, host_ms=waits), wide)[1] == 0


def test_a_cost_that_was_replayed_on_one_side_only_decides_nothing():
    outcome, _ = verdict_of(row(), slowed(row(seed=1, replayed=["kernel"]), 2, ["kernel"]), Terms(costs=("kernel",)))
    assert outcome.verdict == "uncertain"
    assert np.isinf(outcome.visible)
    assert "kernel was timed as a CUDA graph on one side only" in outcome.reasons


def test_errors_are_compared_but_for_the_rounding_of_fp32():
    worse = {"normal": {"out": 0.05, "lse": 1e-7}, "outlier": {"out": 0.11}}
    outcome, code = verdict_of(row(), row(seed=1, error=worse))
    assert (outcome.verdict, code) == ("inaccurate", 1)
    assert outcome.reasons == ("out on outlier: its error was 0.08, is 0.11",)
    assert verdict_of(row(error=worse), row(seed=1))[1] == 0
    several = {"normal": {"out": 0.11, "lse": 4e-6}, "outlier": {"out": 0.3}}
    risen = verdict_of(row(), row(seed=1, error=several))[0].errors
    assert [each.after for each in risen] == [4e-6, 0.3, 0.11], "the largest rise first"
    rounded = {"normal": {"out": 0.05, "lse": 9e-7}, "outlier": {"out": 0.08}}
    assert verdict_of(row(), row(seed=1, error=rounded))[0].verdict == "same"


@pytest.mark.parametrize(
    ("error", "verdict"),
    [(0.0624, "same"), (0.0626, "inaccurate"), (float("inf"), "inaccurate")],
)
def test_an_error_may_rise_by_a_quarter(error, verdict):
    changed = {"normal": {"out": error, "lse": 1e-7}, "outlier": {"out": 0.08}}
    assert verdict_of(row(), row(seed=1, error=changed))[0].verdict == verdict
    strict = Terms(WIDE.limits, thresholds=(Threshold("a", error=0.1),))
    assert verdict_of(row(), row(seed=1, error=changed), strict)[0].verdict == "inaccurate"


def test_ok_before_and_inaccurate_now_is_one_whatever_the_number():
    after = row(seed=1, status="inaccurate", reason="out is stale", check="stale")
    outcome, code = verdict_of(row(), after)
    assert (outcome.verdict, code) == ("inaccurate", 1)
    assert "it was ok, is inaccurate: out is stale" in outcome.reasons
    assert verdict_of(after, row(seed=1))[1] == 0
    assert verdict_of(after, after)[1] == 0


@pytest.mark.parametrize("status", ["crashed", "oom"])
def test_what_ran_and_fails_now_failed(status):
    outcome, code = verdict_of(row(), passed_over(status))
    assert (outcome.verdict, code) == ("failed", 1)
    allowed, code = verdict_of(row(), passed_over(status), Terms(allowed=("a",)))
    assert (allowed.allowed, code) == (False, 1)


@pytest.mark.parametrize("after", [None, passed_over("refused"), passed_over("unavailable")])
def test_what_was_measured_and_is_not_any_more_is_missing(after):
    extra = row("other"), row("other", seed=1)
    base, new = results(row(), extra[0]), results(*([after] if after else []), extra[1])
    found = compare_results(base, new, Terms())
    assert (found.outcomes[0].verdict, found.exit_code) == ("missing", 1)
    for pattern in ("a", "fa3:fp8", "a: fa3:fp8", "a: fa3:*"):
        allowed = compare_results(base, new, Terms(WIDE.limits, allowed=(pattern,)))
        assert (allowed.outcomes[0].verdict, allowed.outcomes[0].allowed, allowed.exit_code) == ("missing", True, 0)
    assert compare_results(base, new, Terms(allowed=("other",))).exit_code == 1


def test_a_case_that_new_alone_has_fails_unless_allowed():
    base, new = results(row()), results(row(seed=1), row("other"))
    assert compare_results(base, new, Terms()).exit_code == 1
    assert compare_results(base, new, Terms(WIDE.limits, allowed=("oth*",))).exit_code == 0


def test_errors_on_a_family_that_new_lacks_are_missing():
    outcome, code = verdict_of(row(), row(seed=1, error={"normal": {"out": 0.05}}))
    assert (outcome.verdict, code) == ("missing", 1)
    assert outcome.reasons == ("its errors on normal: lse, outlier are in BASE alone",)


@pytest.mark.parametrize(
    "pair",
    [
        (passed_over("refused"), passed_over("refused")),
        (passed_over("unavailable"), row()),
        (passed_over("crashed"), None),
        (None, passed_over("refused")),
    ],
)
def test_what_base_has_no_numbers_of_cannot_regress(pair):
    rows = [(before, after) for before, after in (pair, *[(row("b"), row("b", seed=1))])]
    base, new = (results(*(each[side] for each in rows if each[side])) for side in (0, 1))
    assert compare_results(base, new, WIDE).exit_code == 0


@pytest.mark.parametrize(
    "other",
    [
        replace(HERE, device_name="another GPU"),
        replace(HERE, cpu="another CPU"),
        replace(HERE, device_count=8),
        replace(HERE, power_cap_w=500),
        replace(HERE, device_type="cpu"),
    ],
)
def test_unlike_machines_are_not_compared(other):
    outcome, code = verdict_of(row(), slowed(row(seed=1, environment=other), 2))
    assert (outcome.verdict, code) == ("incomparable", 3)


def test_another_timer_or_another_question_is_not_compared():
    assert verdict_of(row(), row(timer="a wall clock"))[1] == 3
    spec = AttentionSpec.make(batch=9, heads=2, seqlen_q=65, head_dim=16)
    assert verdict_of(row(), row(spec=spec))[1] == 3
    relative = Terms(relative_to=(Plan("fa3:fp8"),))
    assert verdict_of(row(), row(spec=spec), relative)[0].verdict == "incomparable"


def test_other_software_is_compared_and_said():
    now = replace(HERE, torch="2.10.0", attnbench="0.2.0", backends={"fa3": "3.1"}, uuid_hash="0123456789ab")
    found = compare_results(results(row()), results(slowed(row(seed=1, environment=now), 1.2)), Terms())
    assert found.exit_code == 1
    said = "; ".join(found.differences)
    assert all(each in said for each in ("torch was 2.9.0, is 2.10.0", "the backend fa3 was 3.0, is 3.1", "uuid_hash"))


def test_a_regression_beside_an_unlike_machine_is_one_and_nothing_comparable_is_not():
    far = replace(HERE, device_name="another GPU")
    base = results(row(), row("b"))
    assert compare_results(base, results(slowed(row(), 1.2), row("b", environment=far)), Terms()).exit_code == 1
    assert compare_results(base, results(row(seed=1), row("b", environment=far)), Terms()).exit_code == 3
    assert compare_results(base, results(row(environment=far)), Terms()).exit_code == 3
    assert compare_results(results(passed_over("refused")), results(passed_over("refused")), Terms()).exit_code == 3


def test_ratios_to_a_baseline_compare_unlike_machines():
    """The other machine takes half the time for everything, but for the one plan that got slower."""
    far = replace(HERE, device_name="another GPU")
    plans = "fa3:fp8", "fa4:bf16", str(FLASH)
    base = results(*(row("c", plan, seed) for seed, plan in enumerate(plans)))
    new = results(
        *(
            slowed(row("c", plan, seed + 9, environment=far), 0.5 * (1.2 if plan == plans[0] else 1))
            for seed, plan in enumerate(plans)
        )
    )
    assert compare_results(base, new, Terms()).exit_code == 3
    found = compare_results(base, new, Terms(WIDE.limits, relative_to=(FLASH,)))
    assert [each.verdict for each in found.outcomes] == ["slower", "same", "baseline"]
    assert found.outcomes[0].costs["kernel"].ratio == pytest.approx(1.2, rel=0.01)
    assert found.exit_code == 1


def test_a_case_without_the_baseline_cannot_be_compared_by_it():
    base, new = results(row(), row("b"), row("b", str(FLASH))), results(row(), row("b"), row("b", str(FLASH)))
    found = compare_results(base, new, Terms(WIDE.limits, relative_to=(FLASH,)))
    assert [each.verdict for each in found.outcomes] == ["incomparable", "same", "baseline"]
    assert found.exit_code == 3


def test_the_baseline_of_a_training_case_is_the_one_with_its_own_backward():
    training = AttentionSpec.make(batch=1, heads=2, seqlen_q=64, head_dim=16, direction="training")
    both = f"{FLASH}>{FLASH}"
    rows = [row("t", plan, spec=training) for plan in ("fa3:fp8>fa3:bf16", both)]
    found = compare_results(results(*rows), results(*rows), Terms(WIDE.limits, relative_to=(FLASH,)))
    assert [each.verdict for each in found.outcomes] == ["same", "baseline"]


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30), st.integers(1, 30), st.floats(0.1, 10))
def test_ratios_do_not_depend_on_what_both_share(samples, count, speed):
    baseline = [1.0 + index / 100 for index in range(count)]
    own = ratios(samples, baseline)
    assert len(own) == min(len(samples), count)
    faster = ratios([sample * speed for sample in samples], [each * speed for each in baseline])
    assert faster == pytest.approx(own)
    assert ratios(samples, samples) == [1.0] * len(samples)


def test_the_clock_is_named_where_it_was_another():
    def at(megahertz):
        return Conditions(readings=5, clock_mhz=Range(lowest=megahertz, median=megahertz, highest=megahertz))

    outcome, _ = verdict_of(row(gpu=at(1980)), slowed(row(seed=1, gpu=at(1700)), 1.16))
    assert "the GPU's clock was 1980 MHz, is 1700 MHz" in outcome.reasons


def test_the_last_threshold_that_matches_counts():
    terms = Terms(thresholds=(Threshold("*", time=0.5, error=1.0), Threshold("a: fa3:fp8", time=0.1)))
    assert (terms.limits_of(row().key).time, terms.limits_of(row().key).error) == (0.1, 1.0)


def test_a_name_with_the_characters_of_a_pattern_is_itself():
    named = row("a[0]*")
    assert compare_results(results(named), results(row("b")), Terms(allowed=("a[0]*", "b"))).outcomes[0].allowed


@given(st.integers(1, 99_999))
def test_percentages(thousandths):
    assert percentage(f"{thousandths / 1000}%") == pytest.approx(thousandths / 1e5)


@pytest.mark.parametrize("text", ["3", "0.03", "", "%", "-3%", "0%", "3%%", "1001%", "1e3%", "three%", "nan%", "inf%"])
def test_what_is_no_percentage_is_refused(text):
    with pytest.raises(MisuseError, match="percentage"):
        percentage(text)


def test_rows_twice_are_misuse(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{row().to_line()}\n" * 2)
    with pytest.raises(MisuseError, match="twice"):
        rows_of(file)
