"""Fixtures for frozen choices: fake kernels and the file's path."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from frozen_fakes import fake_choices

from attnbench.kernels.registry import Registry


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Registry]]:
    with fake_choices(monkeypatch) as use:
        yield use


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.choices.json"
