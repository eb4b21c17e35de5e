"""How samples that were taken already become pytest-benchmark's own, through what it documents and nothing else.

``benchmark.pedantic(target, rounds=N)`` asks a clock before and after each of N rounds, and a
marker names the clock (``@pytest.mark.benchmark(timer=...)``).  Ours replays the samples: it
answers 0 and then the sample, whose difference is the sample to the last bit, while the rounds
themselves do nothing.  A pytest-benchmark that does otherwise is noticed, because what it
kept is compared with what it was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, Protocol

from attnbench.errors import AttnbenchError

__all__ = ["Benchmark", "Replay", "hand_over"]


class Benchmark(Protocol):
    """What is used of pytest-benchmark's fixture.

    ``stats`` is None before it has been used, and always where it is ``disabled``; its own ``stats.data`` are the
    seconds that it kept, its ``options`` what it says of how they were taken.
    """

    disabled: bool
    group: str | None
    has_error: bool
    extra_info: dict[str, Any]
    stats: Any

    def pedantic(self, target: Callable[[], object], *, rounds: int, iterations: int) -> object:
        """Call the target ``rounds`` times, the clock asked before and after each."""
        ...


class Replay:
    """A clock that was somewhere else: every second answer is a sample, those between are 0."""

    def __init__(self) -> None:
        self._answers: Iterator[float] = iter(())

    def load(self, seconds: Sequence[float]) -> None:
        """Replay these from now on."""
        self._answers = iter([answer for sample in seconds for answer in (0.0, sample)])

    def __call__(self) -> float:
        """Seconds; not a number once there are no more."""
        return next(self._answers, math.nan)


def hand_over(benchmark: Benchmark, clock: Replay, seconds: Sequence[float], timer: str) -> None:
    """Make the seconds (one at least) the benchmark's, taken with ``timer``; nothing where it is disabled.

    Raises AttnbenchError, and has pytest-benchmark save nothing, where it kept others.
    """
    clock.load(seconds)
    benchmark.pedantic(_nothing, rounds=len(seconds), iterations=1)
    if benchmark.disabled:
        return
    if list(benchmark.stats.stats.data) != list(seconds):
        benchmark.has_error = True
        raise AttnbenchError(
            f"pytest-benchmark {version('pytest-benchmark')} kept other times than those that were measured; "
            "this attnbench cannot be used with it"
        )
    # Rounds, calibration and warm-up are the session's, and none of them has taken part in this.
    benchmark.stats.options = {"timer": timer}


def _nothing() -> None:
    pass
