"""What one call of attention costs, kernel by kernel, on the GPU if there is one, and what choosing adds to it.

Small enough for a CPU in the tests, where a benchmark only has to run; times are for
whoever runs `pytest tests/benchmarks` to look at, and nothing is asserted about them.
"""

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from attnbench import AttentionSpec, Mask, explain
from attnbench.harness.compare.pytest_plugin.fixture import AttentionBenchmark
from attnbench.kernels.registry import registry

ANYWHERE = ("reference:fp32", "sdpa-math:bf16", "sdpa-flash:bf16", "emulated:fp8")
PLANS, SHAPE = ANYWHERE, {"batch": 1, "heads": 2, "seqlen_q": 128, "head_dim": 64}
if torch.cuda.is_available():
    PLANS = (*ANYWHERE, "sdpa-cudnn:bf16", "fa3:fp8", "fa4:fp8", "flashinfer:fp8", "te:fp8", "triton:fp8")
    SHAPE = {"batch": 2, "heads": 16, "seqlen_q": 4096, "head_dim": 128}
PAIRS = tuple(f"{plan}>{plan}" for plan in PLANS if plan in registry().backwards)
SPEC = AttentionSpec.make(**SHAPE, mask=Mask(right=0))


@pytest.mark.parametrize("plan", PLANS)
def test_forward(attention_benchmark: AttentionBenchmark, plan: str) -> None:
    attention_benchmark(plan, SPEC, optional=plan not in ANYWHERE)


@pytest.mark.parametrize("plan", PAIRS)
def test_forward_and_backward(attention_benchmark: AttentionBenchmark, plan: str) -> None:
    attention_benchmark(plan, SPEC.replace(direction="training"), optional=plan.partition(">")[0] not in ANYWHERE)


@pytest.mark.benchmark(group="choice")
def test_choosing_anew(benchmark: BenchmarkFixture) -> None:
    """Judging every plan for a shape, which a call does once and then remembers."""
    q, k, v = (torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16) for _ in range(3))
    choice = benchmark(explain, q, k, v, is_causal=True, dtype="fp8")
    assert len(choice.candidates) == len(registry().plans(choice.spec))
