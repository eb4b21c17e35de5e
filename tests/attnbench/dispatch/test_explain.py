"""Explanations of a choice: every plan with its reason, the lead and its noise, and trades for other budgets."""

import pytest
import torch
from fakes import FakeBackward, FakeForward, an_environment, fake_backend, fake_registry
from hypothesis import given
from hypothesis import strategies as st

from attnbench import AttentionSpec, Plan
from attnbench.choosing.selector import choose
from attnbench.errors import NoPlanError
from attnbench.kernels.capabilities import Capabilities
from attnbench.problem.spec import DTYPES
from attnbench.tables.table import Entry, Table

CPU = torch.device("cpu")
SHORT = Capabilities(dtypes=DTYPES, head_dims=(8, 32, 8))
KNOWN = fake_registry(
    fake_backend("slow", FakeForward("slow:bf16", preference=10), FakeBackward("slow:bf16")),
    fake_backend(
        "fast", FakeForward("fast:bf16", preference=20), FakeForward("fast:fp8"), FakeForward("fast:fp8-token")
    ),
    fake_backend("gone", FakeForward("gone:bf16"), reason="it is not installed: pip install gone"),
)
SPEC = AttentionSpec.make(batch=1, heads=4, seqlen_q=1024, head_dim=64)


def entry(plan: str, time: float, error: float, spread: float = 0.0, family: str = "normal", at=SPEC) -> Entry:
    return Entry(at, Plan.parse(plan), "ok", time, spread * time, {family: error})


def pick(*entries: Entry, spec: AttentionSpec = SPEC, known=KNOWN, **more):
    return choose(spec, CPU, known=known, table=Table.from_entries(an_environment(), entries), **more)


FOUR = (
    entry("slow:bf16", 1.25, 0.002),
    entry("fast:bf16", 1.0, 0.003, 0.02),
    entry("fast:fp8", 0.86, 0.078, 0.04, "outlier"),
    entry("fast:fp8-token", 0.5, 0.11, 0.04, "outlier"),
)


def test_trades_state_the_plan_and_time_of_other_budgets():
    choice = pick(*FOUR, fp8=True, max_error=0.05)
    assert [(each.max_error, str(each.plan), round(each.change, 2)) for each in choice.trades] == [
        (0.002, "slow:bf16", 0.25), (0.078, "fast:fp8", -0.14), (0.11, "fast:fp8-token", -0.5),
    ]  # fmt: skip
    text = str(choice)
    assert "max_error=0.078 instead of 0.05 would allow fast:fp8 and save 14%" in text
    assert "max_error=0.002 instead of 0.05 would choose slow:bf16 and cost 25%" in text
    assert "14%" not in str(pick(*FOUR[:2], fp8=True, max_error=0.05))


def test_every_candidate_has_a_verdict_and_reasons():
    refusing = fake_registry(*KNOWN.backends.values(), fake_backend("short", FakeForward("short:bf16", row=SHORT)))
    broken = Entry(SPEC, Plan("fast:fp8-token"), "crashed", reason="illegal memory access")
    data = pick(*FOUR[:3], broken, known=refusing, fp8=True, max_error=0.05).to_dict()
    found = {each["plan"]: each for each in data["candidates"]}
    assert {plan: each["verdict"] for plan, each in found.items()} == {
        "fast:bf16": "chosen", "slow:bf16": "eligible", "fast:fp8": "inaccurate", "fast:fp8-token": "unmeasured",
        "short:bf16": "refused", "gone:bf16": "unavailable",
    }  # fmt: skip
    assert "pip install gone" in found["gone:bf16"]["reasons"][0]
    assert "illegal memory access" in found["fast:fp8-token"]["reasons"][0]
    assert "0.078" in found["fast:fp8"]["reasons"][0]
    assert "outlier" in found["fast:fp8"]["reasons"][0]
    assert found["fast:bf16"] == {
        **found["fast:bf16"], "basis": "measured", "time_ms": 1.0, "spread_ms": 0.02, "error": 0.003, "reasons": [],
    }  # fmt: skip
    assert data["margin"] == {"runner_up": "slow:bf16", "gap": 0.25, "noise": 0.01, "inside_noise": False}


HOSTILE = "\x1b[2Jbroke\r\n| it <b>\u202eall"


@pytest.mark.parametrize("render", ["to_text", "to_markdown"])
def test_control_characters_from_tables_and_plug_ins_are_escaped(render):
    evil = fake_registry(*KNOWN.backends.values(), fake_backend("evil", FakeForward("evil:bf16"), reason=HOSTILE))
    crashed = Entry(SPEC, Plan("fast:fp8"), "crashed", reason=HOSTILE)
    text = getattr(pick(FOUR[0], entry("fast:bf16", 9.0, 0.5, family=HOSTILE), crashed, known=evil), render)()
    assert all(char.isprintable() or char == "\n" for char in text)
    if render == "to_markdown":
        rows = [line for line in text.split("\n") if line.startswith("|")]
        assert {line.replace("\\|", "").count("|") for line in rows} == {7}
        assert "<b>" not in text


errors = st.floats(1e-3, 0.3)
times = st.floats(0.1, 10)


@given(st.tuples(*[st.tuples(times, errors)] * 4), errors, st.booleans())
def test_a_trade_names_the_plan_that_its_budget_chooses(measured, budget, fp8):
    names = ("slow:bf16", "fast:bf16", "fast:fp8", "fast:fp8-token")
    rows = [entry(name, *each) for name, each in zip(names, measured, strict=True)]
    try:
        choice = pick(*rows, fp8=fp8, max_error=budget)
    except NoPlanError:
        return
    for trade in choice.trades:
        other = pick(*rows, fp8=True, max_error=trade.max_error)
        assert other.plan == trade.plan
        assert trade.change == pytest.approx(other.chosen.time_ms / choice.chosen.time_ms - 1)
        assert (trade.max_error >= budget) == (trade.change < 0) or trade.max_error < choice.chosen.error
    saved = [each.change for each in choice.trades if each.max_error >= budget]
    assert saved == sorted(saved, reverse=True)
    best = pick(*rows, fp8=True, max_error=1.0)
    if best.chosen.time_ms < 0.96 * choice.chosen.time_ms:
        assert saved
