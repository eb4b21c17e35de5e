"""Tiny problems on one thread: two that share a core with other tests would mostly wait for each other."""

from collections.abc import Iterator

import pytest
import torch
from scripted_workers import LocalWorkers


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture
def local_workers(monkeypatch: pytest.MonkeyPatch) -> LocalWorkers:
    """Workers of a sweep that live in the test."""
    return LocalWorkers(monkeypatch)
