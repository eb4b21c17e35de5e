"""What a comparison of two result sets finds, what it does not invent, and which exit code that is."""

from dataclasses import replace

import numpy as np
import pytest
from compared import HERE, WIDE, passed_over, results, row, slowed, times
from hypothesis import given
from hypothesis import strategies as st
from row_facts import with_facts

from attnbench.errors import MisuseError
from attnbench.harness.compare.pairs import rows_of
from attnbench.harness.compare.regression import compare_results
from attnbench.harness.compare.sentences import share
from attnbench.harness.compare.terms import LARGEST_LIMIT, Limits, Terms, Threshold, percentage
from attnbench.harness.compare.text import conclusion
from attnbench.harness.measure.clocks import Conditions, Range
from attnbench.kernels.plan import Plan
from attnbench.problem.spec import AttentionSpec

FLASH = Plan("sdpa-flash:bf16")


def verdict_of(before, after, terms=None):
    """The only outcome, and the exit code."""
    found = compare_results(results(*([before] if before else [])), results(*([after] if after else [])), terms or WIDE)
    (outcome,) = found.outcomes
    return outcome, found.exit_code


def error(out: float = 0.05, lse: float = 1e-7, outlier: float = 0.08) -> dict:
    return {"error": {"normal": {"out": out, "lse": lse}, "outlier": {"out": outlier}}}


def on(megahertz: float) -> dict:
    return {"gpu": Conditions(readings=5, clock_mhz=Range(lowest=megahertz, median=megahertz, highest=megahertz))}


def threshold(**limits: float) -> Terms:
    return Terms(WIDE.limits, thresholds=(Threshold("a", **limits),))


def memory(before: int | None, after: int | None, name: str = "memory_bytes") -> tuple[dict, dict]:
    return {name: before}, {name: after}


MIB = 2**20
STEADY = Terms(Limits(time=0.5))
ON_CPU = replace(HERE, device_type="cpu")
STALE = {"status": "inaccurate", "reason": "out is stale", "check": "stale"}
FAR = {name: {"environment": replace(HERE, **{name: value})} for name, value in (
    ("device_name", "another GPU"), ("cpu", "another CPU"), ("device_count", 8), ("power_cap_w", 500),
    ("capability", "8.9"),
    ("device_type", "cpu"),
)}  # fmt: skip
OTHER_SPEC = {"spec": AttentionSpec.make(batch=9, heads=2, seqlen_q=65, head_dim=16)}
# How BASE's row and NEW's are compared, each changed so: terms, verdict, exit code and a reason.
VERDICTS: dict[str, tuple[dict, dict, Terms, str, int, str]] = {
    "1.2 times as long": ({}, {"time_ms": times(1, ratio=1.2)}, WIDE, "slower", 1, "kernel +"),
    "twelve times as long": ({}, {"time_ms": times(1, ratio=12)}, WIDE, "slower", 1, "kernel 12"),
    "as a threshold allows": ({}, {"time_ms": times(1, ratio=1.2)}, threshold(time=1.0), "same", 0, ""),
    "half as long, beside a call that scatters": (
        {}, {"time_ms": {**times(1, ratio=0.5), "call": times(2, spread=0.3)["call"]}}, WIDE, "faster", 4, "kernel -"),
    "less than can be seen": ({}, {}, threshold(time=0.01), "uncertain", 4, ""),
    "on another clock": (on(1980), {**on(1700), "time_ms": times(1, ratio=1.16)}, WIDE, "slower", 1,
                         "the GPU's clock was 1980 MHz, is 1700 MHz"),
    "replayed on one side": ({}, {"replayed": ["kernel"], "time_ms": times(1, ratio=2)}, Terms(costs=("kernel",)),
                             "uncertain", 4, "kernel was timed as a CUDA graph on one side only"),
    "a larger error": ({}, error(outlier=0.11), WIDE, "inaccurate", 1, "out on outlier: its error was 0.08, is 0.11"),
    "a smaller error": (error(outlier=0.11), {}, WIDE, "same", 0, ""),
    "the rounding of FP32": ({}, error(lse=9e-7), WIDE, "same", 0, ""),
    "less than a quarter more": ({}, error(0.0624), WIDE, "same", 0, ""),
    "more than a quarter more": ({}, error(0.0626), WIDE, "inaccurate", 1, ""),
    "an infinite error": ({}, error(float("inf")), WIDE, "inaccurate", 1, ""),
    "more than a threshold": ({}, error(0.0624), threshold(error=0.1), "inaccurate", 1, ""),
    "inaccurate now": ({}, STALE, WIDE, "inaccurate", 1, "it was ok, is inaccurate: out is stale"),
    "inaccurate before": (STALE, {}, WIDE, "same", 0, ""),
    "inaccurate both times": (STALE, STALE, WIDE, "same", 0, ""),
    "families that are gone": ({}, {"error": {"normal": {"out": 0.05}}}, WIDE, "missing", 1,
                               "its errors on normal: lse, outlier are in BASE alone"),
    **{f"another {name}": ({}, {**far, "time_ms": times(1, ratio=2)}, WIDE, "incomparable", 3, "")
       for name, far in FAR.items()},
    "a power cap that older records lack": ({"environment": replace(HERE, power_cap_w=None)}, {}, WIDE, "same", 0, ""),
    "other threads of a GPU's host": ({}, {"environment": replace(HERE, threads=99)}, WIDE, "same", 0, ""),
    "other threads of a CPU": ({"environment": replace(ON_CPU, threads=2)}, {"environment": replace(ON_CPU, threads=4)},
                               WIDE, "incomparable", 3, "threads was 2, is 4"),
    "another timer": ({}, {"timer": "a wall clock"}, WIDE, "incomparable", 3, ""),
    "another spec": ({}, OTHER_SPEC, WIDE, "incomparable", 3, ""),
    "another spec, by ratios": ({}, OTHER_SPEC, Terms(relative_to=(Plan("fa3:fp8"),)), "incomparable", 3, ""),
    "a fifth more memory": (*memory(100 * MIB, 120 * MIB), STEADY, "larger", 1,
                            "its call takes 120 MiB of memory, it was 100 MiB"),
    "a result that holds more": (*memory(100 * MIB, 120 * MIB, "retained_bytes"), STEADY, "larger", 1,
                                 "its result holds 120 MiB of memory, it was 100 MiB"),
    "less memory": (*memory(120 * MIB, 100 * MIB), STEADY, "same", 0, ""),
    "a little more memory": (*memory(100 * MIB, 109 * MIB), STEADY, "same", 0, ""),
    "less than an allocator's block": (*memory(1000, MIB), STEADY, "same", 0, ""),
    "none at all": (*memory(0, 0), STEADY, "same", 0, ""),
    "a base that did not say": (*memory(None, 9 * MIB), STEADY, "same", 0, ""),
    "a row that no longer says": (*memory(9 * MIB, None), STEADY, "same", 0, ""),
    "memory that a threshold allows": (*memory(100 * MIB, 140 * MIB), threshold(memory=0.5), "same", 0, ""),
    "more memory than it allows": (*memory(100 * MIB, 160 * MIB), threshold(memory=0.5), "larger", 1, ""),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after", "terms", "verdict", "code", "reason"), VERDICTS.values(), ids=VERDICTS)
def test_a_row_has_its_verdict_exit_code_and_reason(before, after, terms, verdict, code, reason):
    outcome, exit_code = verdict_of(row(**before), row(seed=1, **after), terms)
    assert (outcome.verdict, exit_code) == (verdict, code)
    assert any(each.startswith(reason) for each in outcome.reasons) == (verdict != "same")


def test_the_error_that_rose_most_is_reported_with_the_number_of_the_others():
    """Five times as large is more than what was FP32 rounding and is a little more."""
    (reason,) = verdict_of(row(), row(seed=1, **error(out=0.25, lse=3e-6, outlier=0.12)))[0].reasons
    assert reason == "out on normal: its error was 0.05, is 0.25, and 2 more"


def test_a_clock_that_hardly_changed_is_not_reported():
    outcome, _ = verdict_of(row(**on(1980)), row(**on(1975), time_ms=times(1, ratio=1.2)))
    assert outcome.verdict == "slower"
    assert "clock" not in "".join(outcome.reasons)


@given(st.integers(1, 9998))
def test_what_is_visible_is_rounded_up_to_a_tenth_of_a_percent(tenths):
    """So that a slow-down of the reported size would have been found."""
    assert share(percentage(f"{tenths / 10:g}%")) == f"{tenths / 10:g}%"
    assert share((tenths + 0.3) / 1000) == f"{(tenths + 1) / 10:g}%"


def test_where_nothing_could_have_been_seen_no_limit_is_offered():
    found = compare_results(results(row()), results(row(replayed=["kernel"])), Terms(costs=("kernel",)))
    assert conclusion(found) == (
        "not certain: 1 of 1 rows could not have shown a slow-down of 3% (over 1000% would have been found); "
        + found.advice
    )


@pytest.mark.parametrize("status", ["crashed", "oom"])
@pytest.mark.parametrize("terms", [WIDE, Terms(allowed=("a",))])
def test_what_ran_and_fails_now_failed_whatever_is_allowed(status, terms):
    outcome, code = verdict_of(row(), passed_over(status), terms)
    assert (outcome.verdict, outcome.allowed, code) == ("failed", False, 1)


@pytest.mark.parametrize("visits", [[3], [1, 1, 1], [40]])
def test_a_cost_of_one_visit_or_three_samples_needs_another_that_agrees(visits):
    def few(kernel, call):
        taken = {"kernel": [kernel] * sum(visits), "call": [call] * 40}
        return row(time_ms=taken, visits={"kernel": visits, "call": [5] * 8})

    assert verdict_of(few(1.0, 1.3), few(2.0, 2.6))[0].costs["kernel"].verdict == "slower"
    assert verdict_of(few(1.0, 1.3), few(1.0, 2.6))[0].costs["call"].verdict == "slower"
    outcome, code = verdict_of(few(1.0, 1.3), few(2.0, 1.3))
    assert (outcome.verdict, outcome.suspect, code) == ("uncertain", True, 4)
    faster, _ = verdict_of(few(2.0, 1.3), few(1.0, 1.3))
    assert (faster.verdict, faster.suspect) == ("uncertain", False)
    many = row(time_ms={"kernel": [1.0] * 40, "call": [1.3] * 40})
    assert {verdict_of(many, few(2.0, 1.3))[0].verdict, verdict_of(few(0.5, 1.3), many)[0].verdict} == {"uncertain"}
    alone = verdict_of(few(1.0, 1.3), few(2.0, 2.6), Terms(WIDE.limits, costs=("kernel",)))[0]
    single = len(visits) == 1
    assert (alone.verdict, np.isinf(alone.visible)) == (("uncertain", True) if single else ("slower", False))


def test_a_cost_of_one_visit_is_the_same_only_where_another_could_have_shown_its_limit():
    for spread, verdict in ((0.003, "same"), (0.3, "uncertain")):
        taken = {"kernel": [1.0] * 40, "call": times(0, spread=spread)["call"]}
        single = row(time_ms=taken, visits={"kernel": [40], "call": [5] * 8})
        assert verdict_of(single, single)[0].costs["kernel"].verdict == verdict


@pytest.mark.parametrize(
    ("costs", "limit", "verdict"),
    [
        (("call", "kernel"), 0.03, "slower"),
        (("call",), 0.03, "uncertain"),
        (("call", "kernel"), 0.8, "uncertain"),  # they lie apart by less than half of it
        (("call", "kernel"), 2.0, "same"),
    ],
)
def test_two_costs_that_lie_wholly_apart_by_far_are_slower_though_visits_found_two_clocks(costs, limit, verdict):
    """One row of `inference` is like that."""
    before = row(time_ms={cost: [1.0] * 5 + [1.12] * 5 for cost in ("kernel", "call")})
    others = [row(f"other {number}", seed=number) for number in range(300)]
    base, new = results(before, *others), results(slowed(before, 1.5, costs), *others)
    terms = Terms(Limits(time=limit))
    assert compare_results(base, new, terms).outcomes[0].verdict == verdict
    assert compare_results(new, base, terms).outcomes[0].verdict == ("faster" if verdict == "slower" else verdict)


def test_two_costs_of_which_half_the_visits_are_as_they_were_are_not_slower():
    one, two = ({cost: [1.0] * 5 + [longer] * 5 for cost in ("kernel", "call")} for longer in (1.02, 2.0))
    outcome, _ = verdict_of(row(time_ms=one), row(time_ms=two))
    assert outcome.verdict == "uncertain"
    assert all(", visible " in each for each in outcome.reasons)


@pytest.mark.parametrize(("ratio", "rows"), [(1.1, 30), (3.0, 1)])
def test_slower_and_faster_mirror_one_another(ratio, rows):
    others = [row(f"other {number}", seed=number) for number in range(rows - 1)]
    base, new = results(row(), *others), results(row(time_ms=times(7, ratio=ratio)), *others)
    slow, fast = compare_results(base, new, WIDE), compare_results(new, base, WIDE)
    assert (slow.outcomes[0].verdict, slow.exit_code) == ("slower", 1)
    assert (fast.outcomes[0].verdict, fast.exit_code) == ("faster", 0)
    assert slow.outcomes[0].costs["kernel"].ratio == pytest.approx(ratio, rel=0.01)


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
    for before, after in ((waits, ahead), (ahead, waits)):
        assert verdict_of(row(host_ms=before), row(host_ms=after))[0].costs["call"].host, "on one side is enough"
    longer = slowed(row(seed=1, host_ms=[2 * each for each in waits]), 2.0, ["call"])
    assert verdict_of(row(host_ms=waits), longer, Terms(costs=("call", "host")))[0].verdict == "uncertain"
    wide = Terms(Limits(time=0.1, host=10.0))
    assert verdict_of(row(host_ms=waits), row(seed=1, host_ms=waits), wide)[1] == 0


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


def test_other_software_is_compared_and_reported():
    now = replace(HERE, torch="2.10.0", attnbench="0.2.0", backends={"fa3": "3.1"}, uuid_hash="0123456789ab")
    found = compare_results(results(row()), results(slowed(row(seed=1, environment=now), 1.2)), Terms())
    assert found.exit_code == 1
    differences = "; ".join(found.differences)
    assert all(
        each in differences for each in ("torch was 2.9.0, is 2.10.0", "the backend fa3 was 3.0, is 3.1", "uuid_hash")
    )


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
    assert not any(" ms" in each for each in found.outcomes[0].reasons)
    assert found.exit_code == 1


@pytest.mark.parametrize("plan", ["fa3:fp8", str(FLASH)])
@pytest.mark.parametrize("side", [0, 1])
def test_samples_that_scatter_or_were_replayed_as_a_graph_make_a_ratio_less_certain(plan, side):
    """On any side and of either plan, though the medians of visits are the same."""

    def visible(**changes):
        sides = [[row(plan="fa3:fp8"), row(plan=str(FLASH))] for _ in range(2)]
        sides[side] = [with_facts(each, **changes) if str(each.plan) == plan else each for each in sides[side]]
        found = compare_results(*(results(*each) for each in sides), Terms(WIDE.limits, relative_to=(FLASH,)))
        return found.outcomes[0].costs["kernel"].visible

    scattered = {cost: [median * each for median in samples[2::5] for each in (0.6, 0.8, 1.0, 1.2, 1.4)]
                 for cost, samples in row().time_ms.items()}  # fmt: skip
    assert visible() < 0.1 < visible(time_ms=scattered) < visible(replayed=["kernel"]) == np.inf


def test_a_cost_that_one_side_lacks_is_not_compared():
    both = {cost: times(0)[cost] for cost in ("kernel", "call")}
    for before, after in ((times(1), both), (both, times(1))):
        assert list(verdict_of(row(time_ms=before), row(time_ms=after))[0].costs) == ["kernel", "call"]
    call = row(time_ms={"call": both["call"]})
    outcome, code = verdict_of(row(time_ms=both), call, Terms(costs=("kernel",)))
    assert (outcome.verdict, outcome.reasons, code) == ("uncertain", ("they have no times that can be compared",), 4)


TRAINED = {"spec": AttentionSpec.make(batch=1, heads=2, seqlen_q=64, head_dim=16, direction="training")}
# The rows, their baselines, what becomes of the rows, and the exit code.
BASELINES = {
    "the first of two that was measured": (
        [row(), row(plan="fa4:bf16"), row(plan=str(FLASH))], (Plan("fa3:fp8"), Plan("fa4:bf16")),
        ["baseline", "same", "same"], 0),
    "none in one of the cases": (
        [row(), row("b"), row("b", str(FLASH))], (FLASH,), ["incomparable", "same", "baseline"], 3),
    "with its own backward in training": (
        [row("t", plan, **TRAINED) for plan in ("fa3:fp8>fa3:bf16", f"{FLASH}>{FLASH}")], (FLASH,),
        ["same", "baseline"], 0),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "baselines", "verdicts", "code"), BASELINES.values(), ids=BASELINES)
def test_each_case_is_compared_by_its_baseline(rows, baselines, verdicts, code):
    found = compare_results(results(*rows), results(*rows), Terms(WIDE.limits, relative_to=baselines))
    assert ([each.verdict for each in found.outcomes], found.exit_code) == (verdicts, code)


def test_a_case_whose_sequences_have_other_lengths_is_not_compared():
    outcome, code = verdict_of(row(), with_facts(row(), lengths=(1, 2)))
    assert (outcome.reasons, code) == (("the sequences of the case have other lengths",), 3)


def test_the_last_threshold_that_matches_counts():
    terms = Terms(
        thresholds=(Threshold("*", time=0.5, error=1.0), Threshold("a: fa3:fp8", time=0.1), Threshold("b", time=0.2))
    )
    assert (terms.limits_of(row().key).time, terms.limits_of(row().key).error) == (0.1, 1.0)


def test_a_name_with_the_characters_of_a_pattern_is_itself():
    named = row("a[0]*")
    assert compare_results(results(named), results(row("b")), Terms(allowed=("a[0]*", "b"))).outcomes[0].allowed


def test_a_percentage_may_hold_blanks_and_go_up_to_the_largest_limit():
    assert (percentage(" 1000 % "), percentage("0.5%")) == (LARGEST_LIMIT, 0.005)


@pytest.mark.parametrize(
    "text", ["3", "0.03", "", "%", "-3%", "0%", "3%%", "1001%", "1e3%", "three%", "nan%", "inf%", "\u0663%"]
)
def test_what_is_no_percentage_is_refused(text):
    with pytest.raises(MisuseError, match="percentage"):
        percentage(text)


def test_rows_twice_are_misuse(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{row().to_line()}\n" * 2)
    with pytest.raises(MisuseError, match="twice"):
        rows_of(file)
