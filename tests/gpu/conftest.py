"""Marks of GPU tests, and dense FP64 references whose masks are computed row by row."""

from __future__ import annotations

from pathlib import Path

import dense
import pytest
import torch
from agreement_sweep import visible

_HERE = Path(__file__).parent
_SKIP = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")


@pytest.hookimpl(tryfirst=True)  # before -m selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for each in items:
        if each.path.is_relative_to(_HERE):
            each.add_marker(pytest.mark.gpu)
            each.add_marker(_SKIP)


@pytest.fixture(autouse=True)
def fast_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "visible", visible)
