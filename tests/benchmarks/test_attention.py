"""What one call of ``attention`` costs, kernel by kernel, and what choosing adds to it.

Small enough for a CPU in the tests, where a benchmark only has to run; times are for
whoever runs `pytest tests/benchmarks` to look at, and nothing is asserted about them.
"""

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from attnbench import attention, explain
from attnbench.registry import registry

PLANS = ("reference:fp32", "sdpa-math:bf16", "sdpa-flash:bf16", "emulated:fp8")


def tensors(*, requires_grad: bool = False) -> list[torch.Tensor]:
    """q, k, v (1, 2, 128, 64) in bf16."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, 2, 128, 64, generator=generator).to(torch.bfloat16).requires_grad_(requires_grad)
        for _ in range(3)
    ]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.benchmark(group="forward")
def test_forward(benchmark: BenchmarkFixture, plan: str) -> None:
    q, k, v = tensors()
    out = benchmark(attention, q, k, v, is_causal=True, backend=plan)
    assert out.shape == q.shape
    assert out.isfinite().all()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.benchmark(group="training")
def test_forward_and_backward(benchmark: BenchmarkFixture, plan: str) -> None:
    q, k, v = tensors(requires_grad=True)

    def step() -> tuple[torch.Tensor, ...]:
        out = attention(q, k, v, is_causal=True, backend=f"{plan}>{plan}")
        assert isinstance(out, torch.Tensor)
        return torch.autograd.grad(out.sum(), (q, k, v))

    assert all(grad.isfinite().all() for grad in benchmark(step))


@pytest.mark.benchmark(group="choice")
def test_choosing_anew(benchmark: BenchmarkFixture) -> None:
    """Judging every plan for a shape, which a call does once and then remembers."""
    q, k, v = tensors()
    choice = benchmark(explain, q, k, v, is_causal=True, dtype="fp8")
    assert len(choice.candidates) == len(registry().plans(choice.spec))
