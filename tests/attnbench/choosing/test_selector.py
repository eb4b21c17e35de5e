"""The selector: the fastest plan within the budget for any table, and a reason for every plan that lost."""

import math
import random

import pytest
from choices import entry, pick, spec, table, verdicts
from fakes import FakeBackward, FakeForward, fake_backend, fake_registry
from hypothesis import given
from hypothesis import strategies as st

from attnbench import Mask, Plan
from attnbench.choosing.candidate import Candidate
from attnbench.choosing.ranking import Ranking
from attnbench.errors import BudgetError, NoPlanError, RefusedError
from attnbench.tables.table import Entry, Table


def test_measured_times_decide_and_fp8_needs_opting_in():
    choice = pick()
    assert (str(choice.plan), choice.basis) == ("fast:bf16", "measured")
    assert verdicts(choice) == {
        "slow:bf16": "eligible", "fast:bf16": "chosen", "fast:fp8": "not asked for",
        "study:bf16": "unmeasured", "gone:bf16": "unavailable",
    }  # fmt: skip
    slow = next(each for each in choice.candidates if str(each.plan) == "slow:bf16")
    assert "1.5 times" in slow.reasons[0]


def table_by_length(**times: dict[int, float]) -> Table:
    """Plans by name (``slow`` is slow:bf16, ``fp8`` fast:fp8), times by length."""
    names = {"slow": "slow:bf16", "fast": "fast:bf16", "fp8": "fast:fp8"}
    errors = {"fp8": {"normal": 0.05, "outlier": 0.09}}
    return table(
        *(
            entry(names[name], time, spec(seqlen_q=length), **errors.get(name, {}))
            for name, each in times.items()
            for length, time in each.items()
        )
    )


def fp8_candidate(choice):
    return next(each for each in choice.candidates if str(each.plan) == "fast:fp8")


@given(error=st.floats(0.02, 0.15))
def test_the_predicted_fp8_error_grows_with_the_difference_between_classes(error):
    measured = table(entry("fast:bf16", 2.0), entry("fast:fp8", 1.0, normal=0.02, outlier=error))
    for mask in (Mask(), Mask(None, 0)):
        found = [
            fp8_candidate(pick(spec(head_dim=each, mask=mask), table=measured, fp8=True)) for each in (64, 128, 256)
        ]
        needs = [each.needs for each in found]
        assert needs == sorted(set(needs))
        assert needs[0] >= error
        assert all((each.verdict == "inaccurate") == (each.needs > 0.12) for each in found)
    assert 1.3 * error < needs[0] < needs[2] < 5 * error


POWERS = [2**each for each in range(9, 17)]


def outliers(*errors: float, **more) -> Table:
    """A table of a fast FP8 plan with these outlier errors at growing lengths, and of a 16-bit plan."""
    return table(
        *(entry("fast:fp8", n / 1e4, spec(seqlen_q=n, **more), normal=0.05, outlier=error)
          for n, error in zip(POWERS, errors, strict=False)),
        *(entry("slow:bf16", n / 1e3, spec(seqlen_q=n, **more)) for n in POWERS),
    )  # fmt: skip


def test_a_large_error_at_one_head_dimension_is_not_averaged_away():
    good = [each for dim in (32, 64, 96, 256) for each in outliers(*[0.08] * 8, head_dim=dim).entries.values()]
    bad = outliers(0.3, head_dim=128).entries.values()
    for head_dim, allowed in ((64, True), (128, False)):
        asked = spec(seqlen_q=700, head_dim=head_dim)
        assert pick(asked, table=table(*good, *bad), fp8=True, max_error=0.2).plan.fp8 == allowed


def test_a_farther_class_is_evidence_for_lengths_that_the_nearest_class_lacks():
    near = [entry("fast:bf16", 2.0), entry("fast:fp8", 1.0, normal=0.02, outlier=0.02)]
    far = entry("fast:fp8", 100.0, spec(seqlen_q=16384, head_dim=128), normal=0.02, outlier=0.02)
    asked = spec(seqlen_q=8192, softcap=3.0)
    for entries, proven in ((near, False), ([*near, far], True)):
        assert (verdicts(pick(asked, table=table(*entries), fp8=True))["fast:fp8"] != "unmeasured") == proven


def test_a_failure_in_the_same_class_outweighs_a_success_in_another():
    failed = entry("fast:bf16", None, status="crashed")
    other = entry("fast:bf16", 0.5, spec(head_dim=128))
    assert verdicts(pick(spec(seqlen_q=2048), table=table(entry("slow:bf16", 3.0), failed, other)))["fast:bf16"] == (
        "unmeasured"
    )


def measured_in(name: str, time: float, spread: float) -> Candidate:
    return Candidate(Plan(name), "eligible", time_ms=time, spread_ms=spread, basis="measured")


def predicted_in(name: str, time: float, error: float) -> Candidate:
    return Candidate(Plan(name), "eligible", time_ms=time, basis="predicted", time_error=error)


RANKING = Ranking(spec(), lambda plan: 0.0, None)


def test_the_more_certain_of_two_close_predictions_wins():
    def winner(wide: float) -> str:
        candidates = [predicted_in("fast:bf16", wide, 0.3), predicted_in("slow:bf16", 1.0, 0.05)]
        return str(RANKING.winner(candidates).plan)

    assert (winner(0.98), winner(0.8)) == ("slow:bf16", "fast:bf16")


@pytest.mark.parametrize(
    ("time", "error", "wins", "counts"),
    [(0.9, 0.08, True, 0.08), (0.9, 0.15, False, 0.15), (0.995, 0.001, False, 0.01)],
)
def test_a_prediction_must_lead_what_was_measured_by_its_error_and_by_one_per_cent(time, error, wins, counts):
    known, guess = measured_in("slow:bf16", 1.0, 0.05), predicted_in("fast:bf16", time, error)
    found = RANKING.winner([known, guess])
    assert (found is guess) is wins
    margin, other = RANKING.margin(found, [known, guess]), known if wins else guess
    assert (margin.runner_up, margin.noise) == (other.plan, counts)
    assert margin.gap == pytest.approx(other.time_ms / found.time_ms - 1)


def test_the_lead_over_a_measured_plan_is_beside_the_noise_of_both():
    one, other = measured_in("slow:bf16", 1.0, 0.04), measured_in("fast:bf16", 2.0, 0.08)
    assert RANKING.margin(one, [one, other]).noise == pytest.approx(0.02 * math.sqrt(2))


def test_a_plan_measured_at_other_specs_competes_with_plans_measured_at_this_one():
    """A prediction beats a measurement only if its lead is larger than its error."""
    for time, plan in ((0.5, "fast:bf16"), (0.99, "slow:bf16")):
        some = table_by_length(slow={512: 0.25, 1024: 1.0, 2048: 4.0}, fast={512: time / 4, 2048: time * 4})
        assert str(pick(table=some).plan) == plan


def test_ties_are_resolved_by_accuracy_and_then_by_declared_order():
    def winner_of(slow: float, fast: float, fp8: float) -> str:
        return str(pick(table=table_by_length(slow={1024: slow}, fast={1024: fast}, fp8={1024: fp8}), fp8=True).plan)

    assert winner_of(1.005, 1.02, 1.0) == "slow:bf16"  # both are within noise of what they tie with
    assert winner_of(1.02, 1.005, 1.0) == "fast:bf16"  # slow is not
    assert winner_of(1.009, 1.0, 2.0) == "slow:bf16"  # declared before fast
    assert winner_of(1.02, 1.02, 1.0) == "fast:fp8"
    assert winner_of(1.0, 1.009, 1.009) == "slow:bf16"


def test_the_noise_threshold_is_half_of_both_spreads_clamped_to_its_bounds():
    def winner(ratio: float, spread: float) -> str:
        rows = [Entry(spec(), Plan(name), "ok", time, time * spread, {"normal": 0.002})
                for name, time in (("slow:bf16", ratio), ("fast:bf16", 1.0))]  # fmt: skip
        return str(pick(table=table(*rows)).plan)

    assert [winner(1.009, 0.0), winner(1.011, 0.0)] == ["slow:bf16", "fast:bf16"]
    assert [winner(1.019, 0.028), winner(1.021, 0.028)] == ["slow:bf16", "fast:bf16"]
    assert [winner(1.029, 1.4), winner(1.031, 1.4)] == ["slow:bf16", "fast:bf16"]


@pytest.mark.parametrize(("growth", "longest"), [(1.0, 2**20), (1.2, 2048), (2.0, 1024)])
def test_an_fp8_error_grows_with_the_keys_as_its_kernel_declares(growth, longest):
    """Of a budget of 0.16, one measurement of 0.09 leaves a factor of 1.28."""
    fp8 = FakeForward("fast:fp8", error_growth=growth)
    known = fake_registry(fake_backend("slow", FakeForward("slow:bf16")), fake_backend("fast", fp8))
    for keys in (1024, 2048, 4096, 2**20):
        found = pick(spec(seqlen_kv=keys), fp8=True, max_error=0.16, known=known)
        assert found.plan.fp8 is (keys <= longest), keys
        assert verdicts(found)["fast:fp8"] == ("chosen" if found.plan.fp8 else "inaccurate")


@pytest.mark.parametrize(("growth", "verdict"), [(None, "unmeasured"), (1.0, "chosen"), (1.3, "inaccurate")])
def test_unmeasured_query_counts_count_like_unmeasured_key_counts_in_training(growth, verdict):
    """dK and dV are sums over queries.  The reason states the largest measured number."""
    forward, backward = FakeForward("fast:fp8", error_growth=1.0), FakeBackward("fast:fp8")
    backward.error_growth = growth
    known = fake_registry(
        fake_backend("slow", FakeForward("slow:bf16"), FakeBackward("slow:bf16")),
        fake_backend("fast", forward, backward),
    )
    asked = {"direction": "training", "seqlen_kv": 1024}
    measured = table(
        entry("fast:fp8>fast:fp8", 1.0, spec(**asked), normal=0.05, outlier=0.09),
        entry("slow:bf16>slow:bf16", 2.0, spec(**asked)),
    )

    def candidate_of(queries: int):
        choice = pick(spec(**asked, seqlen_q=queries), table=measured, known=known, fp8=True, max_error=0.16)
        return choice, next(each for each in choice.candidates if str(each.plan) == "fast:fp8>fast:fp8")

    assert candidate_of(1024)[1].verdict == "chosen"
    choice, fp8 = candidate_of(4096)
    assert fp8.verdict == verdict
    assert fp8.declared_beyond == (None if growth is None else 1024)
    assert ("declared beyond 1024 keys" in str(choice)) is (growth is not None)


@pytest.mark.parametrize("status", ["crashed", "timeout", "oom", "error"])
def test_a_plan_that_failed_on_a_smaller_shape_is_not_chosen_by_prediction(status):
    times = table_by_length(slow={512: 1.0, 4096: 70.0}, fast={512: 0.5, 4096: 35.0})

    def with_failure(length):
        failed = Entry(spec(seqlen_q=length), Plan("fast:bf16"), status, reason="it broke")
        return Table(times.environment, {**times.entries, (failed.spec, failed.plan): failed})

    assert str(pick(spec(seqlen_q=2500), table=times).plan) == "fast:bf16"
    for length in (1024, 2400):
        assert verdicts(pick(spec(seqlen_q=2500), table=with_failure(length)))["fast:bf16"] == "unmeasured"
    assert str(pick(spec(seqlen_q=2500), table=with_failure(65536)).plan) == "fast:bf16"


def test_a_named_plan_overrides_measurements_and_must_meet_the_budget():
    assert str(pick(backend="slow").plan) == "slow:bf16"
    assert str(pick(backend="study:bf16").plan) == "study:bf16"
    assert str(pick(backend="fast:fp8").plan) == "fast:fp8"
    assert str(pick(spec(direction="training"), backend="fast:fp8>slow:bf16").plan) == "fast:fp8>slow:bf16"
    assert str(pick(spec(direction="training"), backend="study:bf16").plan).startswith("study:bf16>")
    with pytest.raises(RefusedError, match="not installed") as caught:
        pick(backend="gone")
    assert set(caught.value.alternatives) == {"slow:bf16", "fast:bf16", "study:bf16"}
    with pytest.raises(BudgetError, match="outlier"):
        pick(backend="fast:fp8", max_error=0.08)
    assert str(pick(backend="fast:fp8", max_error=0.1).plan) == "fast:fp8"
    with pytest.raises(NoPlanError) as none:
        pick(max_error=1e-9)
    assert none.value.reasons["gone:bf16"] == ("gone: not installed",)


LENGTHS = (256, 1024, 4096)
plans = st.sampled_from(["slow:bf16", "fast:bf16", "fast:fp8"])
errors = st.dictionaries(st.sampled_from(["normal", "outlier"]), st.floats(1e-3, 1.0), min_size=1)
measured = st.builds(
    lambda plan, time, spread, at, found: Entry(spec(seqlen_q=at), Plan.parse(plan), "ok", time, spread * time, found),
    plans, st.floats(0.01, 100) | st.sampled_from([1.0, 1.01, 1.02]), st.floats(0, 2), st.sampled_from(LENGTHS), errors,
)  # fmt: skip
entries = st.lists(measured, max_size=12)
lengths = st.sampled_from([256, 700, 1024, 5000])
budgets = st.floats(1e-3, 1.0)


def choice_or_none(*rows: Entry, length: int, **more):
    """The choice, or None if no plan may run."""
    try:
        return pick(spec(seqlen_q=length), table=table(*rows), **more)
    except NoPlanError:
        return None


@given(entries, lengths, budgets, st.booleans())
def test_no_choice_exceeds_the_budget_or_uses_fp8_without_opting_in(rows, length, budget, fp8):
    choice = choice_or_none(*rows, length=length, max_error=budget, fp8=fp8)
    if choice is None:
        return
    assert sum(each.verdict == "chosen" for each in choice.candidates) == 1
    assert fp8 or not choice.plan.fp8
    own = {at.seqlen_kv: found for (at, plan), found in table(*rows).entries.items() if plan == choice.plan}
    if length in own:
        assert all(error <= budget for error in own[length].errors.values())
    elif own:
        up = min((keys for keys in own if keys >= length), default=None)
        assert up is not None or not choice.plan.fp8
        apart = {keys: abs(math.log2(keys / length)) for keys in own}
        nearest = [found for keys, found in own.items() if apart[keys] == min(apart.values())]
        assert any(max(found.errors.values()) <= budget for found in nearest)
        assert choice.chosen.needs <= budget


@given(entries, st.sampled_from(LENGTHS), budgets, st.booleans())
def test_no_choice_at_a_measured_spec_is_slower_than_another_by_more_than_noise(rows, length, budget, fp8):
    """The default plan, the first in the declared order, is one of those others."""
    choice = choice_or_none(*rows, length=length, max_error=budget, fp8=fp8)
    here = table(*rows).at(spec(seqlen_q=length))
    able = [each for each in here.values() if each.usable]
    rivals = [each for each in able if each.worst[0] <= budget and (fp8 or not each.plan.fp8)]
    if rivals:
        fastest = min(each.time_ms for each in rivals)
        assert choice.chosen.time_ms <= 1.03 * fastest
        if choice.plan in here and choice.plan.fp8:
            assert not any(
                each.time_ms <= fastest and each.worst[0] * 1.25 < here[choice.plan].worst[0] for each in rivals
            )


@given(entries, lengths, budgets, st.booleans(), st.randoms(use_true_random=False))
def test_the_order_of_entries_does_not_matter(rows, length, budget, fp8, chance: random.Random):
    last = list(table(*rows).entries.values())
    once = choice_or_none(*last, length=length, max_error=budget, fp8=fp8)
    chance.shuffle(last)
    assert choice_or_none(*last, length=length, max_error=budget, fp8=fp8) == once


@given(entries, lengths, budgets, st.booleans(), st.sampled_from(["slower", "inaccurate", "broken"]))
def test_a_plan_that_cannot_win_changes_nothing(rows, length, budget, fp8, why):
    before = choice_or_none(*rows, length=length, max_error=budget, fp8=fp8)
    slowest = max((each.time_ms for each in rows), default=1.0)
    facts = {
        "slower": ("ok", slowest * 50, 0.0, {"normal": 0.0001}),
        "inaccurate": ("ok", 1e-3, 0.0, {"normal": 2.0}),
        "broken": ("crashed",),
    }[why]
    newcomer = [Entry(spec(seqlen_q=at), Plan("study:bf16"), *facts) for at in LENGTHS]
    after = choice_or_none(*rows, *newcomer, length=length, max_error=budget, fp8=fp8)
    if before is None or before.basis == "rule":
        assert after is None or before is not None or after.plan == Plan("study:bf16")
    else:
        assert (after.plan, after.basis) == (before.plan, before.basis)
