"""The kernels that autotune chooses among, and measurements that are not made."""

from collections.abc import Iterator

import pytest
import torch
from autotune_setup import delayed_kernels_installed, record_work

from attnbench.harness.autotune.deadline import Work


@pytest.fixture
def planted() -> Iterator[None]:
    """Kernels of which the first in the declared order is the slowest."""
    with delayed_kernels_installed():
        yield


@pytest.fixture
def unmeasured(planted: None, monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """Nothing is measured; the answer lists what would have been, in order."""
    return record_work(monkeypatch)


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
