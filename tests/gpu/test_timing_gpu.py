"""Timing on a GPU: the queue, the L2, other streams, and calls that are replayed as CUDA graphs."""

import gc
import statistics
import subprocess
import sys
from functools import partial

import pytest
import torch

from attnbench.harness.measure.replay import replay_of
from attnbench.harness.measure.timing import Timer
from attnbench.kernels.contract import Result

DEVICE = torch.device("cuda", 0)
CYCLES = 2_000_000  # about a millisecond
SIZE = 512


def timer(**limits):
    return Timer(DEVICE, **{"visit": 0.05, "limit": 1.0, "patience": 10.0, **limits})


def normal(*shape, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE)


def product(x, y):
    """A call that allocates its result, as every kernel does; exact, because values are small integers."""
    return Result(x @ y, (x + 1.0).sum(-1))


def whole(*shape, seed=0):
    return normal(*shape, seed=seed).mul_(2).round_()


@pytest.fixture
def device_stays_usable():
    """Asserts that the device still runs work afterwards, on the same stream and outside graph capture."""
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream(DEVICE)
    yield
    assert torch.cuda.current_stream(DEVICE) == stream
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert not torch.cuda.is_current_stream_capturing()
    x = torch.ones(SIZE, SIZE, device=DEVICE)
    assert bool((x @ x == SIZE).all())


@pytest.mark.usefixtures("device_stays_usable")
def test_samples_agree_with_a_known_duration():
    """In turns, because clocks may go up between one and the other."""
    one, two = (partial(torch.cuda._sleep, count * CYCLES) for count in (1, 2))
    ratios = []
    for _ in range(3):
        first, second = timer().take(one), timer().take(two)
        assert len(first.device_ms) > len(second.device_ms) > 1
        assert not first.host_bound  # queued, not waited for
        ratios.append(statistics.median(second.device_ms) / statistics.median(first.device_ms))
    assert statistics.median(ratios) == pytest.approx(2, rel=0.1)


@pytest.mark.usefixtures("device_stays_usable")
def test_a_call_that_is_faster_on_the_device_than_on_the_host_is_host_bound():
    def synchronising_call():
        torch.cuda._sleep(CYCLES // 100)
        torch.cuda.synchronize()

    assert timer().take(synchronising_call).host_bound
    assert not timer().take(partial(torch.cuda._sleep, 5 * CYCLES)).host_bound


@pytest.mark.usefixtures("device_stays_usable")
def test_the_l2_is_evicted_before_each_sample():
    """Four reads of four eighths of the L2 are slower than four of one: all of them are cold, not the first alone.

    Were nothing evicted, all would be warm in both, and both take the same time.
    """
    count = torch.cuda.get_device_properties(DEVICE).L2_cache_size // 8 // 4
    parts = [torch.ones(count, device=DEVICE) for _ in range(4)]
    out = torch.empty((), device=DEVICE)

    def read_parts(chosen):
        for x in chosen:
            torch.sum(x, dim=0, out=out)
        return (out,)

    cold, warm = (replay_of(partial(read_parts, chosen), DEVICE) for chosen in (parts, parts[:1] * 4))
    assert cold is not None
    assert warm is not None
    ratios = []
    for _ in range(3):
        first, second = (statistics.median(timer().take(replay).device_ms) for replay in (cold, warm))
        ratios.append(first / second)
    assert statistics.median(ratios) > 1.08


@pytest.mark.usefixtures("device_stays_usable")
def test_work_left_on_another_stream_is_reported_as_late():
    side = torch.cuda.Stream(DEVICE)
    x = torch.zeros(8, device=DEVICE)

    def honest():
        x.add_(1)
        torch.cuda._sleep(10 * CYCLES)

    def unjoined_stream_call():
        side.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(side):
            torch.cuda._sleep(10 * CYCLES)
        x.add_(1)

    first = min(timer().take(honest).late_ms for _ in range(3))
    second = min(timer().take(unjoined_stream_call).late_ms for _ in range(3))
    length = statistics.median(timer().take(honest).device_ms)
    assert first < 0.1 * length
    assert second > 0.5 * length


@pytest.mark.usefixtures("device_stays_usable")
def test_a_replay_computes_the_call_on_the_current_values():
    x, y = whole(SIZE, SIZE), whole(SIZE, SIZE, seed=1)
    replay = replay_of(partial(product, x, y), DEVICE)
    assert replay is not None
    x.copy_(whole(SIZE, SIZE, seed=2))
    before = x.clone(), y.clone()
    expected = product(x, y)
    _, recorded = replay()
    torch.cuda.synchronize()
    assert torch.equal(recorded[0], expected.out)
    assert torch.equal(recorded[1], expected.lse)
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


@pytest.mark.usefixtures("device_stays_usable")
def test_a_replay_keeps_its_graphs_inputs_alive():
    """Nothing else references the operands; later allocations must not reuse their memory."""
    inputs = whole(SIZE, SIZE), whole(SIZE, SIZE, seed=1)
    expected = product(*inputs)

    def step():
        operands = [x.clone() for x in inputs]
        return partial(product, *operands)

    replay = replay_of(step(), DEVICE)
    assert replay is not None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    spoilt = [torch.full((SIZE, SIZE), torch.nan, device=DEVICE) for _ in range(64)]
    _, recorded = replay()
    torch.cuda.synchronize()
    assert torch.equal(recorded[0], expected.out)
    assert torch.equal(recorded[1], expected.lse)
    assert all(bool(x.isnan().all()) for x in spoilt)  # nor did it write into memory that is no longer its own


@pytest.mark.usefixtures("device_stays_usable")
def test_a_replay_frees_its_memory():
    x = whole(4 * SIZE, 4 * SIZE)

    def once():
        replay = replay_of(partial(product, x, x), DEVICE)
        assert replay is not None
        replay()
        torch.cuda.synchronize()

    once()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(DEVICE)
    for _ in range(3):
        once()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(DEVICE) <= before + 2**22


RECORDING = """
import sys
import torch
from attnbench.harness.measure.replay import RecordingError, replay_of
from attnbench.kernels.contract import Result

def asks_the_host(x):
    return Result(x * x.sum().item(), None)

def waits_for_the_device(x):
    out = x * 2
    torch.cuda.synchronize()
    return Result(out, None)

def fails_while_recorded(x):
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("not in a graph")
    return Result(x * 2, None)

device, call = torch.device("cuda", 0), globals()[sys.argv[1]]
x = torch.ones(64, 64, device=device)
stream, expected = torch.cuda.current_stream(device), call(x).out.clone()
try:
    replay_of(lambda: call(x), device)
except RecordingError:
    assert torch.cuda.current_stream(device) == stream
    assert torch.equal(call(x).out, expected)
    assert torch.equal(x, torch.ones_like(x))
    print("refused")
"""


@pytest.mark.parametrize("call", ["asks_the_host", "waits_for_the_device", "fails_while_recorded"])
def test_a_call_that_cannot_be_captured_is_reported_and_runs_uncaptured(call):
    """Run in a separate process, because torch cannot capture graphs in it afterwards."""
    done = subprocess.run([sys.executable, "-c", RECORDING, call], capture_output=True, text=True, timeout=300)
    assert done.stdout == "refused\n", done.stderr


@pytest.mark.usefixtures("device_stays_usable")
def test_a_replay_with_a_different_result_is_refused():
    """The kernel branches on the host; a graph would always repeat one branch."""
    x, count = whole(SIZE, SIZE), []

    def alternating_call():
        count.append(1)
        return Result(x * (1 + len(count) % 2), None)

    assert replay_of(alternating_call, DEVICE) is None


@pytest.mark.usefixtures("device_stays_usable")
def test_samples_of_a_replay_measure_the_device():
    """A host-bound call: the replay excludes the host's time."""
    x = normal(64, 64)

    def slow_to_start():
        y = x
        for _ in range(100):
            y = y + 1.0
        return Result(y, None)

    called = timer().take(slow_to_start)
    replay = replay_of(slow_to_start, DEVICE)
    assert replay is not None
    replayed = timer().take(replay)
    assert not replayed.host_bound
    assert statistics.median(replayed.device_ms) <= 1.1 * statistics.median(called.device_ms)
    assert statistics.median(replayed.host_ms) < statistics.median(called.host_ms)
