"""The harness finds every planted fault by name, and needs each of its checks to do so."""

import pytest
import torch

from attnbench.harness.measure import verdict
from attnbench.harness.sweep import rows
from attnbench.testing import examination as examining
from attnbench.testing.examination import sweep_faults, why_missed
from attnbench.testing.faults import FAULTS

pytestmark = pytest.mark.examination
CPU = torch.device("cpu")
KINDS = {(fault.status, fault.check, fault.flag, fault.said): fault for fault in reversed(FAULTS)}
# One of each kind, but for the hang, which costs all the time that a worker is given.
FEW = [fault for fault in KINDS.values() if fault.name != "hang"]
OTHERS = [fault for fault in FAULTS if fault not in FEW]


def _examination(faults):
    """Each fault's row, the evidence that its verdict rested on, and the same for honest kernels."""
    evidence = []
    judge = verdict.judge
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examining, "FAULTS", faults)
        patch.setattr(rows, "judge", lambda each: (evidence.append(each), judge(each))[1])
        found = list(sweep_faults(CPU))
    judged = iter(evidence)
    return [(fault, row, next(judged) if row.measured else None) for fault, row in found]


@pytest.fixture(scope="module")
def examination():
    return _examination(FEW)


@pytest.fixture(scope="module")
def others():
    return _examination(OTHERS)


@pytest.mark.parametrize("name", [fault.name for fault in FEW])
def test_a_planted_fault_is_found_by_name(examination, name):
    ((fault, row, _),) = [each for each in examination if each[0].name == name]
    assert why_missed(fault, row) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [fault.name for fault in OTHERS])
def test_another_fault_of_its_kind_is_found_by_name(others, name):
    ((fault, row, _),) = [each for each in others if each[0].name == name]
    assert why_missed(fault, row) is None


def test_the_honest_kernel_under_every_fault_is_ok(examination):
    honest = [(fault, row) for fault, row, _ in examination if fault.name == "none"]
    assert len(honest) == len({fault.spec for fault in FEW})
    for fault, row in honest:
        assert why_missed(fault, row) is None
        assert row.correctness.deterministic is True
        assert not row.correctness.leak


@pytest.mark.parametrize("check", verdict.CHECKS)
def test_without_any_one_check_some_fault_goes_unnoticed(examination, monkeypatch, check):
    monkeypatch.delitem(verdict.CHECKS, check)
    missed = []
    for fault, row, evidence in examination:
        if evidence is not None:
            again = verdict.judge(evidence)
            without = {"status": again.status, "check": again.check, "reason": again.reason}
            missed.append(why_missed(fault, row.model_copy(update=without)))
    assert any(missed)
