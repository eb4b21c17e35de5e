"""What ran is named, and held against the evidence."""

import torch
from planted import FakeForward

from attnbench.harness.measure.trace import LONGEST_NAME, MOST_NAMES, shorten_names, trace_call

CPU = torch.device("cpu")


def test_operators_are_named_and_the_result_is_passed_on(capfd):
    x = torch.ones(64, 64)
    result, names = trace_call(lambda: x @ x, CPU)
    assert torch.equal(result, torch.full((64, 64), 64.0))
    assert "aten::mm" in names
    assert capfd.readouterr() == ("", "")


def test_names_are_bounded_and_the_evidence_is_kept():
    flash = FakeForward("x:bf16", evidence={"cpu": "flash"})
    names = [f"{number}" + "x" * 1000 for number in range(100)] + ["flash"]
    kept = shorten_names(flash, names, "cpu")
    assert kept[0] == "flash"
    assert len(kept) == MOST_NAMES
    assert max(map(len, kept)) == LONGEST_NAME
