"""What the tests of backends share: an interpreter of Triton that is quicker than its own."""

from collections.abc import Iterator

import pytest
from quick_interpreter import quick_interpreter


@pytest.fixture(scope="session", autouse=True)
def _quick() -> Iterator[None]:
    with quick_interpreter():
        yield
