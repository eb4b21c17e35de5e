"""Compiled, captured and exported attention on a GPU equals eager attention, plan by plan."""

import pytest
import torch
from torch import Tensor

from attnbench import attention, explain, use_backend
from attnbench.errors import RefusedError

FORWARDS = [
    "auto",
    "sdpa-flash",
    "sdpa-cudnn",
    "flex",
    "cudnn:bf16",
    "cudnn:fp8",
    "fa3:fp8",
    "fa4",
    "te:fp8",
    "triton:fp8",
]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(length=512, grad=False) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(length)
    return tuple(
        torch.randn(2, 8, length, 128, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_(grad)
        for _ in range(3)
    )


def able(x, plan: str) -> None:
    try:
        explain(*x, is_causal=True, backend=plan)
    except RefusedError as error:
        pytest.skip(str(error))


def test_a_context_is_noticed_and_a_backward_keeps_its_plan():
    x = tensors(grad=True)
    function = torch.compile(lambda *x: attention(*x), fullgraph=True)
    with use_backend("emulated:fp8>sdpa-flash:bf16"):
        out, eager = function(*x), attention(*x)
    grads = [torch.autograd.grad(each.sum(), x) for each in (out, eager)]  # in autograd's thread, out of the context
    assert torch.equal(out, eager)
    assert all(((a - b).norm() <= 0.01 * b.norm()) for a, b in zip(*grads, strict=True))
    assert not torch.equal(function(*x), out)


@pytest.mark.parametrize("plan", FORWARDS)
def test_a_captured_graph_replays_the_eager_answer(plan):
    x = tensors()
    able(x, plan)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                attention(*x, is_causal=True, backend=plan)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(*x, is_causal=True, backend=plan)
        others = tensors(length=512)
        for mine, new in zip(x, others, strict=True):
            mine.copy_(new.flip(2))
        graph.replay()
        assert torch.equal(out, attention(*x, is_causal=True, backend=plan))
