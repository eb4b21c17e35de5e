"""A thread's first use of a GPU makes a context, once, before each pass; there is no GPU here to make it on."""

import threading
from types import SimpleNamespace

import pytest
import torch

from attnbench import AttentionSpec
from attnbench.kernels import devices, execution
from attnbench.kernels.contract import Inputs

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
    """The backward's is autograd's own."""
    happened: list[object] = []

    def noted(what: str) -> SimpleNamespace:
        return SimpleNamespace(
            prepare=lambda *given: happened.append(f"{what} prepares"),
            run=lambda *given: happened.append(f"{what} runs"),
        )

    monkeypatch.setattr(execution, "bind", happened.append)
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=8, head_dim=16, direction="training")
    plan = execution.Execution(spec, noted("forward"), noted("backward"))  # type: ignore[arg-type]
    on_gpu = SimpleNamespace(is_cuda=True, device=FIRST)
    plan.answer(Inputs(on_gpu, on_gpu, on_gpu))  # type: ignore[arg-type]
    plan.gradients(SimpleNamespace(), on_gpu)  # type: ignore[arg-type]
    assert happened == [FIRST, "forward prepares", "forward runs", FIRST, "backward runs"]
