"""The selector: fastest within the budget, nothing quietly, and reasons for everyone who lost."""

import math

import pytest
import torch
from fakes import FakeBackward, FakeForward, an_environment, fake_backend, fake_registry
from hypothesis import given
from hypothesis import strategies as st

from attnbench import AttentionSpec, Mask, Plan
from attnbench.errors import BudgetError, NoPlanError, RefusedError
from attnbench.selector import choose
from attnbench.table import Entry, Table

CPU = torch.device("cpu")
KNOWN = fake_registry(
    fake_backend("slow", FakeForward("slow:bf16", preference=10), FakeBackward("slow:bf16")),
    fake_backend("fast", FakeForward("fast:bf16", preference=20), FakeBackward("fast:bf16"), FakeForward("fast:fp8")),
    fake_backend("study", FakeForward("study:bf16", preference=None)),
    fake_backend("gone", FakeForward("gone:bf16", preference=1), reason="not installed"),
)


def spec(**more) -> AttentionSpec:
    return AttentionSpec.make(**{"batch": 1, "heads": 4, "seqlen_q": 1024, "head_dim": 64, **more})


def table(*entries: Entry) -> Table:
    return Table.from_entries(an_environment(), entries)


def entry(plan: str, time: float, at: AttentionSpec | None = None, status: str = "ok", **errors: float) -> Entry:
    return Entry(at or spec(), Plan.parse(plan), status, time, 0.0, errors or {"normal": 0.002})


MEASURED = table(
    entry("slow:bf16", 3.0),
    entry("fast:bf16", 2.0),
    entry("fast:fp8", 1.0, normal=0.05, outlier=0.09),
)


def pick(asked: AttentionSpec | None = None, **more):
    return choose(asked or spec(), CPU, known=KNOWN, **{"table": MEASURED, **more})


def verdicts(choice) -> dict[str, str]:
    return {str(each.plan): each.verdict for each in choice.candidates}


def test_measured_times_decide_and_fp8_waits_to_be_asked():
    choice = pick()
    assert (str(choice.plan), choice.basis) == ("fast:bf16", "measured")
    assert verdicts(choice) == {
        "slow:bf16": "eligible", "fast:bf16": "chosen", "fast:fp8": "not asked for",
        "study:bf16": "unmeasured", "gone:bf16": "unavailable",
    }  # fmt: skip
    slow = next(each for each in choice.candidates if str(each.plan) == "slow:bf16")
    assert "1.50 times" in slow.reasons[0]


@pytest.mark.parametrize(
    ("budget", "plan"), [(None, "fast:fp8"), (0.1, "fast:fp8"), (0.089, "fast:bf16"), (0.06, "fast:bf16")]
)
def test_the_budget_holds_over_every_input_family(budget, plan):
    choice = pick(fp8=True, max_error=budget)
    assert str(choice.plan) == plan
    if plan != "fast:fp8":
        lost = next(each for each in choice.candidates if each.plan.fp8)
        assert lost.verdict == "inaccurate"
        assert "outlier" in lost.reasons[0]


def test_unmeasured_machines_follow_the_declared_order_and_get_one_hint():
    choice = pick(table=table())
    assert (str(choice.plan), choice.basis) == ("slow:bf16", "rule")
    assert "attnbench sweep" in choice.hint
    assert verdicts(pick(table=table(), fp8=True))["fast:fp8"] == "unmeasured"


@pytest.mark.parametrize("status", ["crashed", "timeout", "oom", "error"])
def test_what_failed_when_it_was_measured_is_not_chosen(status):
    failed = Entry(spec(), Plan("slow:bf16"), status, reason="it broke")
    assert verdicts(pick(table=table(failed)))["slow:bf16"] == "unmeasured"
    assert str(pick(table=table(failed)).plan) == "fast:bf16"


def test_a_non_finite_error_is_never_within_a_budget():
    wild = table(entry("fast:bf16", 0.1, normal=math.inf), entry("slow:bf16", 3.0))
    assert str(pick(table=wild, max_error=1e9).plan) == "slow:bf16"


def test_the_nearest_spec_of_the_same_class_answers_for_an_unmeasured_one():
    near, far = spec(), spec(seqlen_q=16384)
    both = table(
        entry("slow:bf16", 1.0, near), entry("fast:bf16", 2.0, near),
        entry("slow:bf16", 9.0, far), entry("fast:bf16", 5.0, far),
    )  # fmt: skip
    assert str(pick(spec(seqlen_q=1500), table=both).plan) == "slow:bf16"
    choice = pick(spec(seqlen_q=12000), table=both)
    assert (str(choice.plan), choice.basis) == ("fast:bf16", "nearest")
    assert choice.chosen.measured_at == far
    for other in ({"head_dim": 128}, {"mask": Mask(None, 0)}, {"dtype": "fp16"}, {"scale": 0.5}, {"softcap": 3.0}):
        assert pick(spec(seqlen_q=12000, **other), table=both).basis == "rule"


def test_fp8_is_not_trusted_with_more_keys_than_it_was_measured_with():
    assert str(pick(spec(seqlen_kv=1000), fp8=True).plan) == "fast:fp8"
    longer = pick(spec(seqlen_kv=1100), fp8=True)
    assert str(longer.plan) == "fast:bf16"
    assert verdicts(longer)["fast:fp8"] == "unmeasured"


def test_returning_the_lse_asks_the_same_entries():
    assert pick(spec(return_lse=True)).basis == "measured"


def test_training_needs_a_backward_and_the_plan_names_it():
    choice = pick(spec(direction="training"), table=table())
    assert str(choice.plan) == "slow:bf16>slow:bf16"
    assert verdicts(choice)["study:bf16>slow:bf16"] == "unmeasured"


def test_a_name_goes_before_measurement_and_errors_are_errors():
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
    with pytest.raises(NoPlanError, match="gone: not installed"):
        pick(max_error=1e-9)


plans = st.sampled_from(["slow:bf16", "fast:bf16", "fast:fp8"])
errors = st.dictionaries(st.sampled_from(["normal", "outlier"]), st.floats(1e-4, 1.0), min_size=1)
measured = st.builds(
    lambda plan, time, at, found: Entry(spec(seqlen_q=at), Plan.parse(plan), "ok", time, 0.0, found),
    plans, st.floats(0.01, 100), st.sampled_from([256, 1024, 4096]), errors,
)  # fmt: skip


@given(st.lists(measured, max_size=12), st.sampled_from([256, 700, 1024, 5000]), st.floats(1e-3, 1.0), st.booleans())
def test_whatever_the_table_says_the_choice_keeps_its_promises(entries, length, budget, fp8):
    written = table(*entries)
    try:
        choice = pick(spec(seqlen_q=length), table=written, max_error=budget, fp8=fp8)
    except NoPlanError:
        return
    assert fp8 or not choice.plan.fp8
    here = written.at(spec(seqlen_q=length))
    if choice.plan in here:
        assert here[choice.plan].worst[0] <= budget
        rivals = [each for plan, each in here.items() if each.worst[0] <= budget and (fp8 or not plan.fp8)]
        assert here[choice.plan].time_ms == min(each.time_ms for each in rivals)
    if choice.plan.fp8:
        assert choice.chosen.error <= budget
        assert choice.chosen.measured_at.seqlen_kv >= length
    assert sum(each.verdict == "chosen" for each in choice.candidates) == 1
