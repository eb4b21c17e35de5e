"""The harness finds and names every planted fault; test_verdict.py holds that each of its checks is needed."""

import pytest
import torch
from planted import in_haste
from scripted_workers import LocalWorkers

from attnbench.harness.measure.timing import Timer
from attnbench.testing import examination as examining
from attnbench.testing.examination import sweep_faults, why_missed
from attnbench.testing.faults import FAULTS

pytestmark = pytest.mark.examination
CPU = torch.device("cpu")
# What ends its process, or keeps it, needs one of its own.
ALIVE = [fault for fault in FAULTS if fault.status not in ("crashed", "timeout")]


@pytest.fixture(scope="module")
def examination():
    """The row of each fault, with kernels that run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        LocalWorkers(patch)
        patch.setattr(examining, "FAULTS", ALIVE)
        patch.setattr(Timer, "for_device", in_haste)
        return list(sweep_faults(CPU))


@pytest.fixture(scope="module")
def with_processes():
    return list(sweep_faults(CPU))


@pytest.mark.parametrize(
    ("rows", "name"),
    [("examination", fault.name) for fault in ALIVE]
    + [pytest.param("with_processes", fault.name, marks=pytest.mark.exhaustive) for fault in FAULTS],
)
def test_each_planted_fault_is_found_and_named(request, rows, name):
    ((fault, row),) = [each for each in request.getfixturevalue(rows) if each[0].name == name]
    assert why_missed(fault, row) is None


def test_the_kernel_without_the_fault_is_ok(examination):
    honest = [(fault, row) for fault, row in examination if fault.name == "none"]
    assert len(honest) == len({fault.spec for fault in ALIVE})
    for fault, row in honest:
        assert why_missed(fault, row) is None
        assert row.correctness.deterministic is True
        assert not row.correctness.leak
