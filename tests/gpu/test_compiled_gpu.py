"""``torch.compile`` with CUDA graphs on a GPU: training steps of several shapes, nothing called eagerly before."""

import subprocess
import sys

import pytest
import torch

from attnbench import attention, explain, use_backend
from attnbench.errors import RefusedError

TRAINED = [
    "auto", "sdpa-flash", "sdpa-efficient", "sdpa-math", "sdpa-cudnn", "flex:bf16>flex:bf16", "reference:fp32",
    "triton:fp8>triton:fp8", "triton:fp8-token-hadamard>triton:fp8-all", "triton:fp8-head>triton:fp8-all",
    "emulated:fp8-hadamard>emulated:fp8-hadamard", "emulated:fp8>sdpa-flash:bf16", "cudnn:bf16>cudnn:bf16",
    "cudnn:fp8>cudnn:fp8", "te:bf16>te:bf16", "te:fp8>te:fp8", "fa2", "fa3:bf16>fa3:bf16", "fa4:bf16>fa4:bf16",
    "fa3:fp8>fa4:bf16",
]  # fmt: skip
# Without sage:int8-fp8, which launches on the default stream: no graph records that.
FORWARDS = [
    "triton:fp8", "triton:fp8-onepass", "triton:fp8-pv", "flex:fp8", "te:fp8", "cudnn:fp8", "fa3:fp8", "fa3-vllm:fp8",
    "flashinfer:fp8", "sage:int8", "torch-fp8:fp8",
]  # fmt: skip
# Scales of FP8 that follow what was seen in earlier steps: a rounding that differs once changes every later step.
FOLLOWING = {"te:fp8>te:fp8": 0.1}
MASKS = {"causal": {"is_causal": True}, "window": {"window": (64, 0)}}

# In a process of its own: what is kept between calls must be made for the first time while torch warms up.
PROGRAM = """
import sys, torch
from attnbench import attention, explain, use_backend
from attnbench.errors import RefusedError
plan, mode, trained, arguments = sys.argv[1], sys.argv[2], sys.argv[3] == "True", eval(sys.argv[4])
bound = float(sys.argv[5])

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(4 * 128, 3 * 4 * 128, device="cuda", dtype=torch.bfloat16)

    def forward(self, x):
        q, k, v = self.mix(x).unflatten(-1, (3, 4, 128)).permute(2, 0, 3, 1, 4)
        return attention(q, k, v, backend=plan, **arguments).transpose(1, 2).flatten(2) + x

def run(compiled):
    torch.manual_seed(0)
    layer = Layer()
    step = torch.compile(layer, fullgraph=True, mode=mode) if compiled else layer
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    found = []
    for turn in range(12):
        length = (128, 192, 320)[turn % 3]
        # Of its own, so that a kernel that moves torch's generator on changes no later input.
        generator = torch.Generator("cuda").manual_seed(turn)
        x = torch.randn(1, length, 512, device="cuda", dtype=torch.bfloat16, generator=generator)
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(trained):
            out = step(x)
        found.append(out.detach().clone())
        if trained:
            out.float().square().mean().backward()
            found += [each.grad.clone() for each in layer.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return found

x = [torch.empty(1, 4, 128, 128, device="cuda", dtype=torch.bfloat16, requires_grad=trained) for _ in range(3)]
try:
    explain(*x, backend=plan, **arguments)  # computes nothing
except RefusedError as error:
    print("refused", error)
    sys.exit()
assert torch.cuda.memory_allocated() <= 3 * 2**18, "something was made before"
for one, two in zip(run(True), run(False), strict=True):
    error = ((one - two).float().norm() / two.float().norm()).item()
    assert error <= bound, error
print("the same")
"""


@pytest.mark.parametrize("mode", ["reduce-overhead", pytest.param("max-autotune", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("plan", "trained"), [*((x, True) for x in TRAINED), *((x, False) for x in FORWARDS)])
def test_compiled_steps_equal_eager_ones(plan: str, trained: bool, mask: str, mode: str) -> None:
    command = [sys.executable, "-c", PROGRAM, plan, mode, str(trained), repr(MASKS[mask])]
    command.append(str(FOLLOWING.get(plan, 0.02)))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    output = done.stdout.strip()
    if output.startswith("refused"):
        pytest.skip(output)
    assert output.endswith("the same"), done.stderr[-3000:]


@pytest.mark.parametrize("plan", ["sdpa-math", "flex:bf16", "triton:fp8"])
def test_a_recorded_graph_is_valid_after_caches_are_evicted(plan: str) -> None:
    """What a graph reads is not dropped, and its memory not used again, when many other shapes come after it."""

    def inputs(length: int) -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(length)
        shape = 1, 2, length, 64
        return [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    x = inputs(256)
    try:
        explain(*x, window=(30, 0), backend=plan)
    except RefusedError as error:
        pytest.skip(str(error))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attention(*x, window=(30, 0), backend=plan)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*x, window=(30, 0), backend=plan)
    graph.replay()
    before = out.clone()
    for length in range(200, 240):
        attention(*inputs(length), window=(length // 2, 0), backend=plan)
    noise = [torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(64)]
    graph.replay()
    assert torch.equal(out, before)
    assert torch.equal(out, attention(*x, window=(30, 0), backend=plan))
    del noise


def test_a_changed_context_is_noticed_and_a_backward_keeps_its_plan():
    torch._dynamo.reset()
    x = [torch.randn(2, 8, 512, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    function = torch.compile(lambda *x: attention(*x), fullgraph=True)
    with use_backend("emulated:fp8>sdpa-flash:bf16"):
        out, eager = function(*x), attention(*x)
    grads = [torch.autograd.grad(each.sum(), x) for each in (out, eager)]  # in autograd's thread, out of the context
    assert torch.equal(out, eager)
    assert all(((a - b).norm() <= 0.01 * b.norm()) for a, b in zip(*grads, strict=True))
    assert not torch.equal(function(*x), out)
