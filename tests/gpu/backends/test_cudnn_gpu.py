"""cuDNN's graphs on a Hopper GPU: dense FP64, evidence, the assumptions of the FP8 scales, refusals lifted, costs."""

from __future__ import annotations

import pytest
import torch
from gpu_times import in_turns
from sweep import Truth

from attnbench import AttentionSpec, Mask
from attnbench.backends.cudnn import backend as cudnn
from attnbench.backends.cudnn import graphs as cudnn_graphs
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.kernels.devices import describe

pytestmark = pytest.mark.skipif(not cudnn.BACKEND.availability().ok, reason=str(cudnn.BACKEND.availability().reason))
FORWARDS = {k.name: k for k in cudnn.BACKEND.kernels if isinstance(k, ForwardKernel)}
BACKWARDS = {k.name: k for k in cudnn.BACKEND.kernels if isinstance(k, BackwardKernel)}
END = "bottom-right"


def test_the_maxima_that_cudnn_reports_are_below_what_the_scales_assume(capsys: pytest.CaptureFixture[str]) -> None:
    spec = AttentionSpec.make(batch=1, heads=8, seqlen_q=4096, head_dim=128, mask=Mask(right=0))
    q, k, v, _ = Truth.of(spec.replace(seqlen_q=512, seqlen_kv=512), 0, torch.device("cuda", 0)).inputs
    q, k, v = (x.repeat(1, 1, 8, 1) for x in (q, k, v))
    operands = FORWARDS["cudnn:fp8"].prepare(Inputs(q, k, v), spec)
    graph, inputs = operands.native
    found = graph.run(inputs)
    with capsys.disabled():
        print(f"\namax of P {found['amax_s'].item()}, of O {found['amax_o'].item()}, of V {v.abs().max().item()}")
    assert found["amax_s"].item() <= 1.01
    assert found["amax_o"].item() <= 1.07 * v.abs().max().item()


@pytest.mark.parametrize("size", [192, 256])
def test_the_fp8_backward_has_no_other_head_dimension_than_128(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller ones are padded to it; what is larger would have to be a kernel of its own."""
    spec = AttentionSpec.make(batch=1, heads=4, seqlen_q=256, head_dim=size, direction="training")
    assert BACKWARDS["cudnn:fp8"].refusals(spec, describe(torch.device("cuda", 0)))
    monkeypatch.setattr(cudnn, "BACKWARD_SIZE", size)
    truth = Truth.of(spec, 0, torch.device("cuda", 0))
    operands = FORWARDS["cudnn:fp8"].prepare(Inputs.of(truth.inputs[:3]), spec)
    saved = Saved(operands, *FORWARDS["cudnn:fp8"].run(operands))
    with pytest.raises(Exception, match="hidden_dim"):
        BACKWARDS["cudnn:fp8"].run(saved, truth.inputs[3])


@pytest.mark.parametrize("name", ["cudnn:bf16", "cudnn:fp8"])
@pytest.mark.parametrize("seqlen", [4096, 16384])
def test_our_layer_costs_nothing(name: str, seqlen: int, capsys: pytest.CaptureFixture[str]) -> None:
    """FP8: the graph writes e4m3; what turning it into bf16 adds is printed, and not counted as ours."""
    spec = AttentionSpec.make(batch=16384 // seqlen, heads=16, seqlen_q=seqlen, head_dim=128, direction="training",
                              mask=Mask(right=0))  # fmt: skip
    shape = (spec.batch, seqlen, 16, 128)
    q, k, v, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    forward, backward = FORWARDS[name], BACKWARDS[name]
    operands = forward.prepare(Inputs(q, k, v), spec)
    saved = Saved(operands, *forward.run(operands))
    graph, inputs = operands.native
    library, handle = graph._graph, cudnn_graphs._handle(q.device)
    buffers = {graph._uids[port]: x for port, x in {**inputs, **graph.run(inputs)}.items()}
    workspace = torch.empty(max(graph._workspace, 1), dtype=torch.uint8, device="cuda")
    ours, with_graph, direct, prepare, gradients = in_turns([
        lambda: forward.run(operands),
        lambda: graph.run(inputs),
        lambda: library.execute(buffers, workspace, handle=handle),
        lambda: forward.prepare(Inputs(q, k, v), spec),
        lambda: backward.run(saved, grad),
    ])  # fmt: skip
    with capsys.disabled():
        print(f"\n{name} {seqlen}: run {ours:.3f}, graph {with_graph:.3f}, direct {direct:.3f}, "
              f"prepare {prepare:.3f}, backward {gradients:.3f} ms")  # fmt: skip
    assert with_graph <= 1.03 * direct
    if name != "cudnn:fp8":
        assert ours <= 1.03 * direct
