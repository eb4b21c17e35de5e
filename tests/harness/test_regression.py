"""What a comparison of two result sets finds, what it does not invent, and which exit code that is."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from compared import HERE, INFERENCE, QUICK, passed_over, resampled, results, row, slowed, times
from hypothesis import given
from hypothesis import strategies as st

from attnbench.errors import MisuseError
from attnbench.harness.clocks import Conditions, Range
from attnbench.harness.records import read_measurements
from attnbench.harness.regression import VERDICTS, compare_results
from attnbench.harness.regression_pairs import rows_of
from attnbench.harness.regression_terms import Terms, Threshold, percentage
from attnbench.harness.regression_times import ratios
from attnbench.plan import Plan
from attnbench.spec import AttentionSpec

FLASH = Plan("sdpa-flash:bf16")


def verdict_of(before, after, terms=None):
    """The only outcome, and the exit code."""
    found = compare_results(
        results(*([before] if before else [])), results(*([after] if after else [])), terms or Terms()
    )
    (outcome,) = found.outcomes
    return outcome, found.exit_code


@pytest.fixture(scope="module")
def recorded():
    return [each for each in read_measurements(QUICK) if each.measured]


def test_a_thousand_comparisons_of_unchanged_results_fail_ten_times_at_most():
    """Of the committed rows those whose neighbouring samples are the most alike, which mislead a test the most."""
    rows = [each for each in read_measurements(INFERENCE) if each.measured]
    several = [each for each in rows if 20 <= min(map(len, each.time_ms.values())) <= 60]
    alike = sorted(several, key=_alike)[-5:]
    rng = np.random.default_rng(8)
    codes, alone = Counter(), 0
    for _ in range(1000):
        base, new = (results(*(resampled(each, rng) for each in alike)) for _ in range(2))
        found = compare_results(base, new, Terms(costs=("kernel", "prepared")))
        codes[found.exit_code] += 1
        alone += any(cost.verdict == "slower" for each in found.outcomes for cost in each.costs.values())
    assert alone >= 30  # each cost for itself is slower by chance far too often in so many rows
    assert codes[0] >= 990
    assert codes.keys() <= {0, 1}


def _alike(measurement):
    return _correlation(measurement.time_ms["kernel"])


def _correlation(samples):
    """Of neighbouring samples."""
    logs = np.log(samples)
    return np.corrcoef(logs[1:], logs[:-1])[0, 1]


def test_a_slow_down_of_three_percent_in_one_of_all_committed_rows_is_found(recorded):
    """In each of the rows whose samples are many, vary little and know nothing of each other."""
    base = results(*recorded)
    several = [each for each in recorded if min(map(len, each.time_ms.values())) >= 20]
    steady = [
        each for each in several if _deciles(each) < 1.03 and max(map(_correlation, each.time_ms.values())) < 0.35
    ]
    assert len(steady) >= 5
    for each in steady:
        found = compare_results(base, base | results(slowed(each, 1.03)), Terms())
        assert [outcome.key for outcome in found.outcomes if outcome.verdict == "slower"] == [each.key]
        assert found.exit_code == 1


def _deciles(measurement):
    return max(np.quantile(samples, 0.9) / np.quantile(samples, 0.1) for samples in measurement.time_ms.values())


@pytest.mark.parametrize("ratio", [1.03, 1.3, 3.0])
@pytest.mark.parametrize("rows", [1, 30])
def test_slower_and_faster_mirror_one_another(ratio, rows):
    others = [row(f"other {number}", seed=number) for number in range(rows - 1)]
    base, new = results(row(), *others), results(row(time_ms=times(7, ratio=ratio)), *others)
    slow, fast = compare_results(base, new, Terms()), compare_results(new, base, Terms())
    assert (slow.outcomes[0].verdict, slow.exit_code) == ("slower", 1)
    assert (fast.outcomes[0].verdict, fast.exit_code) == ("faster", 0)
    assert slow.outcomes[0].costs["kernel"].ratio == pytest.approx(ratio, rel=0.01)


def test_twice_as_long_is_slower_with_three_samples_and_three_percent_is_not():
    assert verdict_of(row(time_ms=times(0, 3)), row(time_ms=times(1, 3, ratio=2.0)))[0].verdict == "slower"
    assert verdict_of(row(time_ms=times(0, 3)), row(time_ms=times(1, 3, ratio=1.03)))[0].verdict == "ambiguous"
    lenient = Terms(thresholds=(Threshold("a", time=4.0),))
    assert verdict_of(row(time_ms=times(0, 3)), row(time_ms=times(1, 3, ratio=2.0)), lenient)[0].verdict == "ambiguous"


def test_one_cost_is_enough_and_one_that_is_faster_does_not_hide_it():
    more = slowed(slowed(row(seed=1), 1.2, ["call"]), 0.8, ["kernel"])
    outcome, code = verdict_of(row(), more)
    assert (outcome.verdict, code) == ("slower", 1)
    assert [reason.split()[0] for reason in outcome.reasons] == ["call"]
    assert verdict_of(row(), more, Terms(costs=("kernel",)))[0].verdict == "faster"


def test_the_same_and_the_ambiguous_pass():
    assert verdict_of(row(), row(seed=1))[0].verdict == "same"
    noisy = row(time_ms=times(0, spread=0.3)), row(time_ms=times(1, spread=0.3))
    outcome, code = verdict_of(*noisy)
    assert (outcome.verdict, code) == ("ambiguous", 0)


def test_a_cost_that_was_replayed_on_one_side_only_decides_nothing():
    outcome, _ = verdict_of(row(), slowed(row(seed=1, replayed=["kernel"]), 2, ["kernel"]), Terms(costs=("kernel",)))
    assert outcome.verdict == "ambiguous"
    assert "kernel was timed as a CUDA graph on one side only" in outcome.reasons


def test_errors_are_compared():
    worse = {"normal": {"out": 0.05, "lse": 1e-7}, "outlier": {"out": 0.11}}
    outcome, code = verdict_of(row(), row(seed=1, error=worse))
    assert (outcome.verdict, code) == ("inaccurate", 1)
    assert outcome.reasons == ("out on outlier: its error was 0.08, is 0.11",)
    assert verdict_of(row(error=worse), row(seed=1))[1] == 0


@pytest.mark.parametrize(
    ("error", "verdict"),
    [(0.0624, "same"), (0.0626, "inaccurate"), (float("inf"), "inaccurate")],
)
def test_an_error_may_rise_by_a_quarter(error, verdict):
    changed = {"normal": {"out": error, "lse": 1e-7}, "outlier": {"out": 0.08}}
    assert verdict_of(row(), row(seed=1, error=changed))[0].verdict == verdict
    strict = Terms(thresholds=(Threshold("a", error=0.1),))
    assert verdict_of(row(), row(seed=1, error=changed), strict)[0].verdict == "inaccurate"


def test_the_rounding_of_fp32_is_no_loss():
    rounded = {"normal": {"out": 0.05, "lse": 9e-7}, "outlier": {"out": 0.08}}
    assert verdict_of(row(), row(seed=1, error=rounded))[0].verdict == "same"


def test_ok_before_and_inaccurate_now_is_one_whatever_the_number():
    after = row(seed=1, status="inaccurate", reason="out is stale", check="stale")
    outcome, code = verdict_of(row(), after)
    assert (outcome.verdict, code) == ("inaccurate", 1)
    assert "it was ok, is inaccurate: out is stale" in outcome.reasons
    assert verdict_of(after, row(seed=1))[1] == 0
    assert verdict_of(after, after)[1] == 0


def test_a_row_may_be_both_slower_and_less_accurate():
    worse = {"normal": {"out": 0.1, "lse": 1e-7}, "outlier": {"out": 0.08}}
    outcome, _ = verdict_of(row(), slowed(row(seed=1, error=worse), 1.2))
    assert outcome.verdict == "inaccurate"
    assert any(reason.startswith("kernel +") for reason in outcome.reasons)


@pytest.mark.parametrize("status", ["crashed", "oom", "timeout", "error"])
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
        allowed = compare_results(base, new, Terms(allowed=(pattern,)))
        assert (allowed.outcomes[0].verdict, allowed.outcomes[0].allowed, allowed.exit_code) == ("missing", True, 0)
    assert compare_results(base, new, Terms(allowed=("other",))).exit_code == 1


def test_a_case_that_new_alone_has_fails_unless_allowed():
    base, new = results(row()), results(row(seed=1), row("other"))
    assert compare_results(base, new, Terms()).exit_code == 1
    assert compare_results(base, new, Terms(allowed=("oth*",))).exit_code == 0


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
    assert compare_results(base, new, Terms()).exit_code == 0


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


def test_an_older_record_without_a_power_cap_is_compared():
    assert verdict_of(row(environment=replace(HERE, power_cap_w=None)), row(seed=1))[1] == 0


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
    found = compare_results(base, new, Terms(relative_to=(FLASH,)))
    assert [each.verdict for each in found.outcomes] == ["slower", "same", "baseline"]
    assert found.outcomes[0].costs["kernel"].ratio == pytest.approx(1.2, rel=0.01)
    assert found.exit_code == 1


def test_a_case_without_the_baseline_cannot_be_compared_by_it():
    base, new = results(row(), row("b"), row("b", str(FLASH))), results(row(), row("b"), row("b", str(FLASH)))
    found = compare_results(base, new, Terms(relative_to=(FLASH,)))
    assert [each.verdict for each in found.outcomes] == ["incomparable", "same", "baseline"]
    assert found.exit_code == 3


def test_the_baseline_of_a_training_case_is_the_one_with_its_own_backward():
    training = AttentionSpec.make(batch=1, heads=2, seqlen_q=64, head_dim=16, direction="training")
    both = f"{FLASH}>{FLASH}"
    rows = [row("t", plan, spec=training) for plan in ("fa3:fp8>fa3:bf16", both)]
    found = compare_results(results(*rows), results(*rows), Terms(relative_to=(FLASH,)))
    assert [each.verdict for each in found.outcomes] == ["same", "baseline"]


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30), st.integers(1, 30), st.floats(0.1, 10))
def test_ratios_do_not_depend_on_what_both_share(samples, count, speed):
    baseline = [1.0 + index / 100 for index in range(count)]
    own = ratios(samples, baseline)
    assert len(own) == min(len(samples), count)
    faster = ratios([sample * speed for sample in samples], [each * speed for each in baseline])
    assert faster == pytest.approx(own)
    assert ratios(samples, samples) == [1.0] * len(samples)


def test_a_drift_that_both_share_is_divided_out():
    drift = np.linspace(1, 2, 40)
    assert ratios(drift, drift[::2] * 3) == pytest.approx([1 / 3] * 20, rel=0.02)


def test_the_clock_is_named_where_it_was_another():
    def at(megahertz):
        return Conditions(readings=5, clock_mhz=Range(lowest=megahertz, median=megahertz, highest=megahertz))

    outcome, _ = verdict_of(row(gpu=at(1980)), slowed(row(seed=1, gpu=at(1700)), 1.16))
    assert "the GPU's clock was 1980 MHz, is 1700 MHz" in outcome.reasons


def test_the_last_threshold_that_matches_counts():
    terms = Terms(thresholds=(Threshold("*", time=0.5, error=1.0), Threshold("a: fa3:fp8", time=0.1)))
    assert (terms.limits_of(row().key).time, terms.limits_of(row().key).error) == (0.1, 1.0)
    assert verdict_of(row(), slowed(row(seed=1), 1.2), terms)[1] == 1
    lenient = Terms(thresholds=(Threshold("*", time=0.5),))
    assert verdict_of(row(), slowed(row(seed=1), 1.2), lenient)[1] == 0


@pytest.mark.parametrize(
    "terms",
    [
        Terms(allowed=("misspelt",)),
        Terms(thresholds=(Threshold("misspelt*", time=0.1),)),
        Terms(relative_to=(Plan("misspelt:bf16"),)),
    ],
)
def test_a_name_that_means_nothing_is_misuse(terms):
    with pytest.raises(MisuseError, match="misspelt"):
        compare_results(results(row()), results(row()), terms)


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


def test_rows_twice_or_none_are_misuse(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{row().to_line()}\n" * 2)
    with pytest.raises(MisuseError, match="twice"):
        rows_of(file)
    file.write_text("")
    with pytest.raises(MisuseError, match="no measurement"):
        rows_of(file)


@given(st.permutations(["a", "b", "c", "d"]), st.permutations(["a", "b", "c", "d"]))
def test_the_order_of_the_rows_does_not_matter(first, second):
    changed = {"a": slowed(row("a"), 1.3), "b": row("b", seed=1), "c": passed_over("crashed", "c"), "d": None}
    base = results(*(row(case) for case in first))
    new = results(*(changed[case] for case in second if changed[case]))
    found = {each.key[0]: each.verdict for each in compare_results(base, new, Terms()).outcomes}
    assert found == {"a": "slower", "b": "same", "c": "failed", "d": "missing"}
    assert set(found.values()) <= set(VERDICTS)
