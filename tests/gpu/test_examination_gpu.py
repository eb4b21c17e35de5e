"""The same examination on a GPU, where faults have more ways to hide: streams, graphs, a device that is lost."""

import pytest
import torch

from attnbench.testing.examination import sweep_faults, why_missed
from attnbench.testing.faults import FAULTS, GPU_FAULTS

pytestmark = pytest.mark.examination


@pytest.fixture(scope="module")
def examination():
    return list(sweep_faults(torch.device("cuda", 0)))


@pytest.mark.parametrize("name", [fault.name for fault in (*FAULTS, *GPU_FAULTS)])
def test_each_planted_fault_is_found_and_named(examination, name):
    ((fault, row),) = [each for each in examination if each[0].name == name]
    assert why_missed(fault, row) is None


def test_the_kernel_without_the_fault_is_ok(examination):
    for fault, row in examination:
        if fault.name == "none":
            assert why_missed(fault, row) is None
            assert row.performance.gpu is None or row.performance.gpu.readings
