"""Kernels with switchable errors under a guard."""

from collections.abc import Iterator

import pytest
from guard_faults import Planted, PlantedBackward, plant

from attnbench.api import forget_choices
from attnbench.choosing.demotion import demotions


@pytest.fixture
def planted_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Planted, PlantedBackward]]:
    """A forward and a backward that auto runs, unregistered after the test."""
    with monkeypatch.context() as patch:
        yield plant(patch)
    demotions.forget()
    forget_choices()
