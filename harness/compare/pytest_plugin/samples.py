"""Report samples that exist already as pytest-benchmark's own, using only its documented interface.

``benchmark.pedantic(target, rounds=N)`` reads a clock before and after each of N rounds, and a marker can set the clock
(``@pytest.mark.benchmark(timer=...)``).  Ours replays the samples: it answers 0 and then the sample, so that the
difference is exactly the sample, while the rounds do nothing.  The times that pytest-benchmark kept are compared with
the samples, so that a version that works differently is detected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, Protocol

from attnbench.errors import AttnbenchError

__all__ = ["Benchmark", "Replay", "hand_over"]


class Benchmark(Protocol):
    """The part of pytest-benchmark's fixture that is used.

    ``stats`` is None before use, and always if it is ``disabled``; ``stats.stats.data`` are the seconds that it kept,
    ``stats.options`` its description of how they were taken.
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
    """A clock that replays samples: every second answer is a sample, the others are 0."""

    def __init__(self) -> None:
        self._answers: Iterator[float] = iter(())

    def load(self, seconds: Sequence[float]) -> None:
        """Replay these samples from now on."""
        self._answers = iter([answer for sample in seconds for answer in (0.0, sample)])

    def __call__(self) -> float:
        """Seconds; NaN when no samples are left."""
        return next(self._answers, math.nan)


def hand_over(benchmark: Benchmark, clock: Replay, seconds: Sequence[float], timer: str) -> None:
    """Make the seconds (at least one) the benchmark's, taken with ``timer``; does nothing if it is disabled.

    Raises AttnbenchError, and makes pytest-benchmark save nothing, if it kept other times.
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
    # The session's rounds, calibration and warm-up do not apply to these samples.
    benchmark.stats.options = {"timer": timer}


def _nothing() -> None:
    pass
