"""Samples are raw, in milliseconds, and bounded in number and time."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnbench.harness.timing import Taken, Timer

CPU = torch.device("cpu")


def timer(**limits):
    return Timer(CPU, **{"visit": 0.02, "limit": 1.0, "patience": 10.0, **limits})


class Clock:
    """Stands still but for the calls, each of which takes the seconds that it is given."""

    def __init__(self, *seconds):
        self.seconds, self.now, self.calls = seconds, 0.0, 0

    def __call__(self):
        self.now += self.seconds[min(self.calls, len(self.seconds) - 1)]
        self.calls += 1


@pytest.fixture
def clocked(monkeypatch):
    def clocked(*seconds):
        clock = Clock(*seconds)
        monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
        return clock

    return clocked


def test_samples_are_milliseconds_of_the_call():
    taken = timer(visit=0.4).take(lambda: time.sleep(0.004))
    assert len(taken.device_ms) >= 2
    assert all(sample >= 4 for sample in taken.device_ms)
    assert min(taken.device_ms) < 40
    assert taken.host_ms == taken.device_ms
    assert taken.late_ms == 0


def test_samples_are_raw_and_in_order(clocked):
    taken = timer().take(clocked(0.005, 0.001, 0.003, 0.002, 0.004))
    assert taken.device_ms == pytest.approx([1, 3, 2, 4])  # the first warms up; it says that four fit


@pytest.mark.parametrize(("each", "count"), [(0.001, 20), (0.003, 6), (0.015, 1), (0.5, 1), (1e-6, 50)])
def test_a_visit_takes_its_time_and_one_sample_at_least(clocked, each, count):
    clock = clocked(each)
    taken = timer().take(clock)
    assert len(taken.device_ms) == count
    assert clock.calls == count + 1


def test_a_call_that_takes_no_time_at_all_ends(clocked):
    assert 1 <= len(timer().take(clocked(0.0)).device_ms) < 1000


def test_a_call_beyond_all_patience_runs_once_and_is_its_own_warm_up(clocked):
    clock = clocked(0.2, 100.0)
    assert timer(patience=0.1).take(clock).device_ms == pytest.approx([200])
    assert clock.calls == 1


def test_gradients_are_not_recorded_while_sampling():
    seen = []
    timer().take(lambda: seen.append(torch.is_grad_enabled()))
    assert seen
    assert not any(seen)
    assert torch.is_grad_enabled()


def test_what_the_call_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        timer().take(lambda: 1 / 0)


@given(st.floats(0.001, 100), st.floats(0.1, 10), st.integers(1, 20))
def test_a_host_is_behind_where_it_needs_most_of_the_devices_time(device, share, count):
    taken = Taken([device] * count, [device * share] * count)
    if not 0.5 < share < 0.9:
        assert taken.host_bound == (share > 0.7)
    late = Taken([device] * (2 * count + 1), [device * 0.1] * (count + 1) + [device * 100] * count)
    assert not late.host_bound  # a host that is held up now and then is not behind


def test_the_record_says_what_a_sample_is(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert timer().conditions == "perf_counter, caches warm, OMP_WAIT_POLICY passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "x" * 1000)
    assert len(timer().conditions) <= 200


def test_every_kind_of_device_has_limits_that_can_be_kept():
    for kind in ("cpu", "cuda"):
        chosen = Timer.for_device(torch.device(kind))
        assert 0 < chosen.visit < chosen.limit
        assert chosen.fewest * chosen.visit < chosen.limit
        assert 0 < chosen.narrow < 0.03  # the change that a comparison is to find
