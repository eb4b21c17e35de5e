"""Samples are raw, in milliseconds, and bounded in number and time."""

import statistics
import time
from itertools import chain, product, repeat

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from simulated_gpu import L2_BYTES, simulated

from attnbench.harness.measure.timing import Timer

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ON_GPU = Timer(GPU, visit=0.01, limit=0.3, patience=0.015)


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


def test_samples_are_raw_and_in_order(clocked):
    taken = timer().take(clocked(0.005, 0.001, 0.003, 0.002, 0.004))
    assert taken.device_ms == pytest.approx([1, 3, 2, 4])  # the first warms up; it says that four fit


@pytest.mark.parametrize(("each", "count"), [(0.001, 20), (0.003, 6), (0.015, 1), (0.5, 1), (1e-6, 50)])
def test_a_visit_takes_its_time_and_one_sample_at_least(clocked, each, count):
    clock = clocked(each)
    taken = timer().take(clock)
    assert len(taken.device_ms) == count
    assert clock.calls == count + 1


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


@given(st.floats(1e-5, 8e-3), st.floats(1e-5, 8e-3), st.floats(0, 1), st.sampled_from([1.0, 2.0]))
@example(host=5e-5, device=6e-5, before=1.0, slow=2.0)  # what is started to know the host leaves it ahead
def test_a_device_is_timed_without_the_host_that_starts_it(host, device, before, slow):
    """Whoever is slower, wherever in the call the host works: as in a stream of calls, whose host is ahead."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu = simulated(monkeypatch, slow)

        def call():
            gpu.host(host * before)
            gpu.launch(device / 2)
            gpu.host(host * (1 - before))
            gpu.launch(device / 2)

        taken = ON_GPU.take(call)
    assert not taken.host_bound
    assert taken.device_ms == pytest.approx([device * 1e3] * len(taken.device_ms), abs=0.02)
    assert taken.host_ms == pytest.approx([host * 1e3] * len(taken.host_ms), abs=0.02 * slow + 1e-9)


@given(st.floats(0.3, 3))
def test_the_start_of_a_small_kernel_shows_how_fast_the_host_is(slow):
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu = simulated(monkeypatch, slow)
        taken = ON_GPU.take(lambda: gpu.host(1e-4))
        assert taken.launch_ms == pytest.approx(slow * 0.005)
    assert timer().take(lambda: None).launch_ms is None


@given(st.floats(1e-5, 8e-3), st.floats(1e-5, 0.05))
def test_what_holds_the_device_is_not_in_the_time_of_a_call_that_waits_for_it(host, device):
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu = simulated(monkeypatch)

        def call():
            gpu.host(host)
            gpu.launch(device)
            gpu.wait()

        taken = ON_GPU.take(call)
    assert taken.host_bound
    assert taken.device_ms == pytest.approx([(host + device) * 1e3] * len(taken.device_ms), abs=0.2)
    assert taken.host_ms == pytest.approx([(host + device) * 1e3] * len(taken.host_ms), abs=0.2)


@pytest.mark.parametrize(
    ("device", "held_up", "seconds"),
    [*product([0.001, 0.0101, 0.02, 0.1], range(4), [0.012]), (0.001, 0, 4.0)],  # the last as by what a call imports
)
def test_a_host_that_is_held_up_once_spoils_no_more_than_one_sample(monkeypatch, device, held_up, seconds):
    gpu, calls = simulated(monkeypatch), []

    def call():
        gpu.host(seconds if len(calls) == held_up else 0.0005)
        calls.append(1)
        gpu.launch(device)

    taken = ON_GPU.take(call)
    assert not taken.host_bound
    assert statistics.median(taken.device_ms) == pytest.approx(device * 1e3, abs=0.02)
    if seconds > 1:
        assert gpu.now < seconds + 0.1
        assert taken.device_ms == pytest.approx([device * 1e3] * len(taken.device_ms), abs=0.02)
        assert len(taken.device_ms) > 3


def test_no_sample_finds_what_the_one_before_left_in_the_l2(monkeypatch):
    gpu = simulated(monkeypatch)
    taken = ON_GPU.take(lambda: gpu.launch(0.001))
    assert len(gpu.written) > len(taken.device_ms) > 1
    (size,) = set(gpu.written)
    assert size >= 2 * L2_BYTES
    assert f"{size} bytes written before each sample" in ON_GPU.conditions


@pytest.mark.parametrize("device", [0.001, 0.1])
@pytest.mark.parametrize(("first", "others", "late"), [(0.0, 0.0, 0), (0.003, 0.003, 3), (0.003, 0.0, 0)])
def test_work_that_goes_on_behind_a_call_is_late_unless_only_the_host_once_was(
    monkeypatch, device, first, others, late
):
    gpu, left = simulated(monkeypatch), chain([first], repeat(others))

    def synchronize(_):
        gpu.wait()
        gpu.host(next(left))

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    taken = ON_GPU.take(lambda: gpu.launch(device))
    assert taken.late_ms == pytest.approx(late, abs=0.01)
    assert taken.device_ms == pytest.approx([device * 1e3] * len(taken.device_ms))
