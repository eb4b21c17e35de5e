"""A thread's first use of a GPU makes a context, once, before each pass; there is no GPU here to make it on."""

import threading
from types import SimpleNamespace

import pytest
import torch

from attnbench import attention, devices, execution

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


@pytest.mark.parametrize("training", [False, True])
def test_attention_binds_the_thread_before_each_pass(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[torch.device] = []
    monkeypatch.setattr(execution, "bind", bound.append)
    leaves = [torch.randn(1, 2, 8, 16, requires_grad=training) for _ in range(3)]
    out = attention(*leaves, backend="reference:fp32")
    assert bound == [torch.device("cpu")]
    if training:
        out.sum().backward()
        assert bound == [torch.device("cpu")] * 2
