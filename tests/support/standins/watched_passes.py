"""Which plans run: every forward that runs is recorded, also where torch's own operator would serve alone."""

import pytest

from attnbench.kernels.execution import Execution


def watch_passes(patch: pytest.MonkeyPatch) -> list[Execution]:
    """A list that each forward which runs adds its execution to."""
    seen: list[Execution] = []
    original = Execution.answer

    def watched(self: Execution, *given: object) -> object:
        seen.append(self)
        return original(self, *given)

    patch.setattr(Execution, "answer", watched)
    patch.setattr(Execution, "_whole", lambda self, device_type: None)
    return seen
