"""What an open guard costs: beside a call that it does not check, and one check beside the calls between two.

Of attention with 2,048 queries and keys on a CPU, one thread.  The ratios go into the report as extra information;
nothing is asserted about times, except that the answers are those of an unwatched call.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from attnbench import attention, guard

EVERY = 1000


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the benchmark of the dispatch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seconds(run: Callable[[], object], rounds: int) -> float:
    """The median of one call."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.benchmark(group="guard")
def test_a_check_beside_a_thousand_calls(benchmark: BenchmarkFixture, training: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (torch.randn(1, 4, 2048, 64, generator=generator).to(torch.bfloat16) for _ in range(4))
    x = [each.requires_grad_(training) for each in (q, k, v)]

    def call() -> tuple[torch.Tensor, ...]:
        out = attention(*x, is_causal=True, backend="sdpa-flash")
        assert isinstance(out, torch.Tensor)
        return (out, *torch.autograd.grad(out, x, grad_out)) if training else (out,)

    alone = call()
    plain = seconds(call, 5)
    with guard(every=1) as watch:
        watched = benchmark.pedantic(call, rounds=5)
        checked = seconds(call, 5)
    assert all(torch.equal(one, other) for one, other in zip(alone, watched, strict=True))
    assert watch.checks == 10 * (1 + training)
    benchmark.extra_info |= {
        "check over call": round(checked / plain - 1, 3),
        f"of the time with every={EVERY}": f"{(checked / plain - 1) / EVERY:.4%}",
    }


@pytest.mark.benchmark(group="guard")
def test_a_call_between_two_checks(benchmark: BenchmarkFixture) -> None:
    """On tensors so small that little but calling remains."""
    q, k, v = (torch.randn(1, 2, 16, 32).to(torch.bfloat16) for _ in range(3))

    def calls() -> None:
        for _ in range(200):
            attention(q, k, v, is_causal=True)

    plain, watched = [], []
    with torch.no_grad(), guard(every=10**9) as watch:
        benchmark.pedantic(calls, rounds=5)
        for _ in range(20):  # in turns, so that neither has a quieter machine
            watched.append(seconds(calls, 1))
            watch.stop()
            plain.append(seconds(calls, 1))
            watch.start()
    assert watch.checks == 1
    benchmark.extra_info["watched over unwatched call"] = round(
        statistics.median(watched) / statistics.median(plain), 3
    )
