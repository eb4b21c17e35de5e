"""Samples through pytest-benchmark's own fixture: all of them to the last bit, or an error."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_benchmark.fixture import BenchmarkFixture
from pytest_benchmark.utils import NameWrapper

from attnbench.errors import AttnbenchError, MisuseError
from attnbench.harness.compare.pytest_plugin.fixture import AttentionBenchmark, SessionDevices
from attnbench.harness.compare.pytest_plugin.samples import Replay, hand_over


def real(kind: type[BenchmarkFixture], clock: Replay, **options: Any) -> BenchmarkFixture:
    """pytest-benchmark's own fixture, of the version that is installed, with the options of a session."""
    return kind(
        SimpleNamespace(name="test", nodeid="test"),
        timer=NameWrapper(clock),
        add_stats=lambda stats: None,
        logger=None,
        warner=None,
        cprofile_dump=None,
        cprofile_loops=1,
        **{
            **dict.fromkeys(("disable_gc", "warmup", "disabled", "cprofile"), False),
            **dict.fromkeys(("min_rounds", "warmup_iterations", "calibration_precision"), 5),
            **dict.fromkeys(("min_time", "max_time"), 1.0),
            **dict.fromkeys(("precision", "confidence")),
            **options,
        },
    )


SECONDS = st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=50)


@given(seconds=SECONDS, warmup=st.booleans(), disable_gc=st.booleans(), precision=st.none() | st.just(0.1))
def test_every_sample_arrives_to_the_last_bit(seconds: list[float], **options: Any) -> None:
    clock = Replay()
    fixture = real(BenchmarkFixture, clock, confidence=0.9, **options)
    hand_over(fixture, clock, seconds, "a timer")
    written = fixture.stats.as_dict()
    assert written["stats"]["data"] == seconds
    assert (written["stats"]["min"], written["stats"]["max"]) == (min(seconds), max(seconds))
    assert written["options"] == {"timer": "a timer"}
    assert not fixture.has_error


class Calibrated(BenchmarkFixture):
    """One that runs each round several times, as benchmark() does."""

    def pedantic(self, target: Any, rounds: int = 1, iterations: int = 1) -> object:
        return super().pedantic(target, rounds=rounds, iterations=iterations + 1)


class Trimmed(BenchmarkFixture):
    """One that leaves out its slowest round."""

    def pedantic(self, target: Any, rounds: int = 1, iterations: int = 1) -> object:
        result = super().pedantic(target, rounds=rounds, iterations=iterations)
        self.stats.stats.data.remove(max(self.stats.stats.data))
        return result


@pytest.mark.parametrize("kind", [Calibrated, Trimmed])
@given(seconds=SECONDS)
def test_a_fixture_that_would_change_a_sample_is_an_error(kind: type[BenchmarkFixture], seconds: list[float]) -> None:
    clock = Replay()
    fixture = real(kind, clock)
    with pytest.raises(AttnbenchError, match=r"pytest-benchmark \d.* kept other times"):
        hand_over(fixture, clock, seconds, "a timer")
    assert fixture.has_error


def test_a_fixture_without_its_clock_is_a_misuse() -> None:
    """As where it was asked for by request.getfixturevalue, too late for pytest-benchmark to be told."""
    with pytest.raises(MisuseError, match="as an argument"):
        AttentionBenchmark(real(BenchmarkFixture, Replay()), None, SessionDevices(1.0))
