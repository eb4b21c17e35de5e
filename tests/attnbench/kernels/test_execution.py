"""Running a plan: torch's single operator only if it is equivalent, and a GPU context in each thread."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from attnbench import AttentionSpec, Mask
from attnbench.kernels import devices, execution
from attnbench.kernels.contract import Inputs
from attnbench.kernels.execution import Execution
from attnbench.kernels.registry import registry

SPEC = AttentionSpec.make(batch=1, heads=2, seqlen_q=16, head_dim=16, direction="training")


@pytest.fixture
def plans_with_own_backward(monkeypatch: pytest.MonkeyPatch) -> list[str]:
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


def test_torch_differentiates_only_plans_of_one_operator_without_autocast(plans_with_own_backward: list[str]) -> None:
    step("sdpa-flash:bf16", "sdpa-flash:bf16")
    assert plans_with_own_backward == []
    step("sdpa-flash:bf16", "sdpa-math:bf16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step("sdpa-flash:bf16", "sdpa-flash:bf16")
    assert plans_with_own_backward == ["sdpa-flash:bf16>sdpa-math:bf16", "sdpa-flash:bf16>sdpa-flash:bf16"]


@pytest.mark.parametrize("queries", [5, 16, 30])
@pytest.mark.parametrize(
    "mask",
    [Mask(), Mask(right=0), Mask(right=0, alignment="bottom-right"), Mask(left=3, right=0), Mask(left=2, right=1)],
)
@pytest.mark.parametrize("scale", [0.25, -0.25])
def test_torchs_flash_operator_runs_only_for_masks_that_it_supports(queries: int, mask: Mask, scale: float) -> None:
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=queries, seqlen_kv=16, head_dim=16, mask=mask, scale=scale)
    generator, kernel = torch.Generator().manual_seed(0), registry().forward("sdpa-flash:bf16")
    q, k, v = (torch.randn(1, 2, size, 16, generator=generator).bfloat16() for size in (queries, 16, 16))
    whole = kernel.whole(spec, "cpu")
    assert (whole is None) <= (mask != Mask())
    if whole is not None:
        result = kernel.run(kernel.prepare(Inputs(q, k, v), spec))
        assert all(map(torch.equal, whole(q, k, v), (result.out, result.lse)))


FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


def test_a_context_is_made_once_for_each_thread_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, torch.device]] = []
    event = SimpleNamespace(record=lambda device: made.append((threading.get_ident(), device)))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(devices, "_of_thread", threading.local())

    def bind() -> None:
        for device in (FIRST, SECOND, torch.device("cpu"), FIRST, SECOND):
            devices.bind(device)

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join()
    assert [device for _, device in made] == [FIRST, SECOND]
    bind()
    assert [device for _, device in made] == [FIRST, SECOND] * 2
    assert len({ident for ident, _ in made}) == 2


def test_a_plan_binds_the_thread_before_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward runs in autograd's thread."""
    happened: list[object] = []

    def recording_kernel(what: str) -> SimpleNamespace:
        return SimpleNamespace(
            prepare=lambda *given: happened.append(f"{what} prepares"),
            run=lambda *given: happened.append(f"{what} runs"),
        )

    monkeypatch.setattr(execution, "bind", happened.append)
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=8, head_dim=16, direction="training")
    plan = execution.Execution(spec, recording_kernel("forward"), recording_kernel("backward"))  # type: ignore[arg-type]
    on_gpu = SimpleNamespace(is_cuda=True, device=FIRST)
    plan.answer(Inputs(on_gpu, on_gpu, on_gpu))  # type: ignore[arg-type]
    plan.gradients(SimpleNamespace(), on_gpu)  # type: ignore[arg-type]
    assert happened == [FIRST, "forward prepares", "forward runs", FIRST, "backward runs"]
