"""What the other layouts of the same sequences cost is reported beside packed and padded ones."""

from datetime import datetime, timezone

import pytest
import yaml
from fakes import an_environment
from row_facts import measurement

from attnbench.harness.cases.file import read_cases
from attnbench.harness.report.alternatives import alternatives, key_of
from attnbench.harness.report.page.commands import sweep_command
from attnbench.harness.report.text import report
from attnbench.harness.sequence_lengths import Draw, SequenceLengths
from attnbench.kernels.plan import Plan
from attnbench.problem.mask import Mask
from attnbench.problem.spec import AttentionSpec

HERE = an_environment()
DRAWN = Draw(distribution="zipf", total=40, longest=30, seed=2)


def row(layout, call, plan="b:bf16", q=(30, 9, 1), **facts):
    own = SequenceLengths(layout=layout, q=q, drawn=DRAWN)
    spec = AttentionSpec.make(heads=2, head_dim=16, mask=Mask(right=0), **own.sizes())
    known = {"status": "ok", "error": {"normal": {"out": 0.01}}, "bound": 0.1, "declared_error": 0.1, **facts}
    return measurement(
        case=layout, spec=spec, lengths=own, plan=Plan(plan), time_ms={"call": [call] * 20}, truth="all",
        timer="a clock", drawn_on="cpu", started=datetime(2026, 11, 20, tzinfo=timezone.utc), environment=HERE, **known,
    )  # fmt: skip


def test_each_layout_stands_beside_the_others_by_its_fastest_plan_within_its_bound():
    wrong = {"status": "inaccurate", "reason": "wrong", "check": "error"}
    rows = [row("packed", 2.0), row("packed", 2.5, "slow:bf16"), row("padded", 3.0), row("equal", 1.0)]
    rows += [row("dense", 1.0, "wrong:fp8", **wrong), row("dense", 8.0), row("packed", 9.0, q=(20, 20))]
    texts = alternatives(rows)
    assert texts[key_of(rows[0])] == (
        "Beside it, in times its call: in padded rows with lengths 1.5 (3 ms, b:bf16), in rows whose padding is "
        "computed like tokens 4 (8 ms, b:bf16), as many tokens in sequences of one length 0.5 (1 ms, b:bf16)."
    )
    assert {lengths.layout for _, lengths in texts} == {"packed", "padded"}
    assert key_of(rows[-1]) not in texts
    assert "computed like tokens 4 (8 ms, b:bf16)" in " ".join(report(rows, "text").split())


@pytest.mark.parametrize("layout", ["packed", "left-padded", "equal"])
def test_the_command_of_a_case_draws_its_lengths_again(tmp_path, layout):
    found = row(layout, 1.0)
    command, note = sweep_command([found])
    assert note is None
    entry = command.partition("'- ")[2].partition("' >")[0]
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump([yaml.safe_load(entry)]))
    (case,) = read_cases(path, "fp8")
    assert case.spec.replace(batch=1, seqlen_q=1, seqlen_kv=1, lengths=None) == found.spec.replace(
        batch=1, seqlen_q=1, seqlen_kv=1, lengths=None
    )
    assert layout == "equal" or (case.lengths.layout, case.lengths.drawn) == (layout, DRAWN)
    of_program = found.model_copy(update={"lengths": found.lengths.model_copy(update={"drawn": None})})
    assert (sweep_command([of_program])[0] == "") == (layout != "equal")
