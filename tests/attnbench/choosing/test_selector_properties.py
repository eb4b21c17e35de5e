"""What holds of every choice, whatever the table."""

import math
import random

from choices import entry, pick, spec, table
from hypothesis import given
from hypothesis import strategies as st

from attnbench import Plan
from attnbench.errors import NoPlanError
from attnbench.tables.table import Entry

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


def tried(*rows: Entry, length: int, **more):
    """The choice, None where nothing may run."""
    try:
        return pick(spec(seqlen_q=length), table=table(*rows), **more)
    except NoPlanError:
        return None


@given(entries, lengths, budgets, st.booleans())
def test_no_choice_is_over_budget_or_in_fp8_unasked(rows, length, budget, fp8):
    choice = tried(*rows, length=length, max_error=budget, fp8=fp8)
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
def test_no_choice_at_a_measured_spec_is_slower_than_another_beyond_noise(rows, length, budget, fp8):
    """The default plan, the first in the declared order, is one of those others."""
    choice = tried(*rows, length=length, max_error=budget, fp8=fp8)
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
    once = tried(*last, length=length, max_error=budget, fp8=fp8)
    chance.shuffle(last)
    assert tried(*last, length=length, max_error=budget, fp8=fp8) == once


@given(entries, lengths, budgets, st.booleans(), st.sampled_from(["slower", "inaccurate", "broken"]))
def test_a_plan_that_cannot_win_changes_nothing(rows, length, budget, fp8, why):
    before = tried(*rows, length=length, max_error=budget, fp8=fp8)
    slowest = max((each.time_ms for each in rows), default=1.0)
    newcomer = [
        Entry(spec(seqlen_q=at), Plan("study:bf16"), "crashed", reason="it broke")
        if why == "broken"
        else entry("study:bf16", *((slowest * 50, spec(seqlen_q=at)) if why == "slower" else (1e-3, spec(seqlen_q=at))),
                   normal=0.0001 if why == "slower" else 2.0)
        for at in LENGTHS
    ]  # fmt: skip
    after = tried(*rows, *newcomer, length=length, max_error=budget, fp8=fp8)
    if before is None or before.basis == "rule":
        assert after is None or before is not None or after.plan == Plan("study:bf16")
    else:
        assert (after.plan, after.basis) == (before.plan, before.basis)
