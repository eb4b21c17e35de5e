"""Runs the tests of backends in a faster interpreter of Triton."""

from collections.abc import Iterator

import pytest
from quick_interpreter import quick_interpreter


@pytest.fixture(scope="session", autouse=True)
def _quick() -> Iterator[None]:
    with quick_interpreter():
        yield
