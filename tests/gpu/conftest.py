"""What every test on a GPU has: dense FP64 truths whose masks are made a row at a time."""

from __future__ import annotations

import dense
import pytest
from sweep import visible


@pytest.fixture(autouse=True)
def fast_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "visible", visible)
