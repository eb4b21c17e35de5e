"""Calls by one operator in place of ``prepare`` and ``run``: only where it computes what the plan says."""

from __future__ import annotations

import pytest
import torch

from attnbench import AttentionSpec
from attnbench.kernels.contract import Inputs
from attnbench.kernels.execution import Execution
from attnbench.kernels.registry import registry

SPEC = AttentionSpec.make(batch=1, heads=2, seqlen_q=16, head_dim=16, direction="training")


@pytest.fixture
def differentiated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The plans whose own backward kernel ran."""
    seen: list[str] = []
    original = Execution.gradients
    monkeypatch.setattr(
        Execution, "gradients", lambda self, *saved: seen.append(str(self.plan)) or original(self, *saved)
    )
    return seen


def step(forward: str, backward: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 2, 16, 16, generator=generator).bfloat16().requires_grad_() for _ in "qkv"]
    known = registry()
    out, _ = Execution(SPEC, known.forward(forward), known.backward(backward))(Inputs.of(leaves))
    return torch.autograd.grad(out.float().sum(), leaves)


def test_torch_differentiates_a_plan_of_one_operator_and_no_other(differentiated: list[str]) -> None:
    step("sdpa-flash:bf16", "sdpa-flash:bf16")
    assert differentiated == []
    step("sdpa-flash:bf16", "sdpa-math:bf16")
    assert differentiated == ["sdpa-flash:bf16>sdpa-math:bf16"]


def test_under_autocast_kernels_run_by_themselves(differentiated: list[str]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step("sdpa-flash:bf16", "sdpa-flash:bf16")
    assert differentiated == ["sdpa-flash:bf16>sdpa-flash:bf16"]
