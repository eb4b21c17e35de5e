"""The fake kernels that choices are frozen among, and the file."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from frozen_fakes import planted

from attnbench.kernels.registry import Registry


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Registry]]:
    with planted(monkeypatch) as use:
        yield use


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.choices.json"
