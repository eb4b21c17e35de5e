"""Calls by one operator in place of ``prepare`` and ``run``: only where it computes what the plan says."""

from __future__ import annotations

import pytest
import torch

from attnbench import AttentionSpec, Mask
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


@pytest.mark.parametrize("queries", [5, 16, 30])
@pytest.mark.parametrize(
    "mask",
    [Mask(), Mask(right=0), Mask(right=0, alignment="bottom-right"), Mask(left=3, right=0), Mask(left=2, right=1)],
)
@pytest.mark.parametrize("scale", [0.25, -0.25])
def test_torchs_flash_operator_answers_only_for_masks_that_are_its_own(queries: int, mask: Mask, scale: float) -> None:
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=queries, seqlen_kv=16, head_dim=16, mask=mask, scale=scale)
    generator, kernel = torch.Generator().manual_seed(0), registry().forward("sdpa-flash:bf16")
    q, k, v = (torch.randn(1, 2, size, 16, generator=generator).bfloat16() for size in (queries, 16, 16))
    whole = kernel.whole(spec, "cpu")
    assert (whole is None) <= (mask != Mask())
    if whole is not None:
        result = kernel.run(kernel.prepare(Inputs(q, k, v), spec))
        assert all(map(torch.equal, whole(q, k, v), (result.out, result.lse)))
