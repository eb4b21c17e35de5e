"""cuDNN's graphs on a Hopper GPU: dense FP64, evidence, the assumptions of the FP8 scales, refusals lifted, costs."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

import dense
import pytest
import torch
from gpu_times import in_turns
from sweep import Sweep, Truth, visible
from torch.profiler import ProfilerActivity, profile

from attnbench import AttentionSpec, Mask
from attnbench.backends.cudnn import backend as cudnn
from attnbench.backends.cudnn import graphs as cudnn_graphs
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs, Saved
from attnbench.kernels.devices import describe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
    pytest.mark.skipif(not cudnn.BACKEND.availability().ok, reason=str(cudnn.BACKEND.availability().reason)),
]
FORWARDS = {k.name: k for k in cudnn.BACKEND.kernels if isinstance(k, ForwardKernel)}
BACKWARDS = {k.name: k for k in cudnn.BACKEND.kernels if isinstance(k, BackwardKernel)}
END = "bottom-right"
HEADS = [
    (64, 64, 1),
    (80, 80, 1),
    (96, 96, 4),
    (128, 128, 1),
    (128, 128, 8),
    (192, 128, 1),
    (256, 256, 2),
    (256, 128, 1),
]
LENGTHS = [(256, 256), (257, 257), (144, 333), (333, 130), (336, 130), (1, 200), (77, 1)]
MASKS = [Mask(), Mask(right=0), Mask(right=0, alignment=END), Mask(left=37, right=11), Mask(left=150, alignment=END),
         Mask(left=0, right=0), Mask(right=260, alignment=END)]  # fmt: skip


def specs() -> list[AttentionSpec]:
    rows = itertools.product(HEADS, LENGTHS, MASKS)
    made = [
        AttentionSpec.make(batch=2, heads=8, kv_heads=8 // group, seqlen_q=sq, seqlen_kv=skv, head_dim=d, head_dim_v=dv,
                           mask=mask, direction="training", scale=d**-0.5 * (1.0, 0.7, 1.3)[i % 3])
        for i, ((d, dv, group), (sq, skv), mask) in enumerate(rows)
    ]  # fmt: skip
    return list(dict.fromkeys(made))


@pytest.fixture(autouse=True)
def fast_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "visible", visible)


@pytest.mark.parametrize("name", ["cudnn:bf16", "cudnn:fp8"])
def test_it_refuses_or_agrees_with_dense_fp64(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The 16-bit backward is fed by its own forward's result and by an exact one's, in turns."""
    sweep = Sweep(torch.device("cuda", 0))
    for index, spec in enumerate(specs()):
        truth = Truth.of(spec, index, sweep.device)
        ran = sweep.forward(FORWARDS[name], truth)
        if ran is not None:
            own = index % 3 or BACKWARDS[name].follows is not None
            sweep.backward(BACKWARDS[name], truth, Saved(ran[0], *ran[1]) if own else sweep.exact(truth))
    with capsys.disabled():
        print(f"\n{sweep.report()}")
    assert not any(sweep.faults.values())
    assert all(sweep.served[f"{name} {way}"] > 10 for way in ("fwd", "bwd"))


@pytest.mark.parametrize("name", ["cudnn:bf16", "cudnn:fp8"])
def test_the_profiler_shows_cudnns_kernel(name: str) -> None:
    spec = AttentionSpec.make(batch=1, heads=8, seqlen_q=512, head_dim=128, direction="training")
    q, k, v, grad = Truth.of(spec, 0, torch.device("cuda", 0)).inputs
    forward, backward = FORWARDS[name], BACKWARDS[name]
    operands = forward.prepare(Inputs(q, k, v), spec)
    result = forward.run(operands)
    for kernel, call in ((forward, lambda: forward.run(operands)),
                         (backward, lambda: backward.run(Saved(operands, *result), grad))):  # fmt: skip
        call()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        names = {event.key for event in seen.key_averages()}
        assert any(re.search(kernel.evidence["cuda"], name) for name in names), sorted(names)


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


CANNOT = [
    ("fp8", {"seqlen_q": 128, "mask": Mask(right=0, alignment=END)}),
    ("fp8", {"head_dim": 72, "head_dim_v": 72}),
    ("bf16", {"seqlen_q": 300, "mask": Mask(left=280, right=11)}),
    ("bf16", {"seqlen_q": 333, "seqlen_kv": 130, "mask": Mask(right=260, alignment=END)}),
    ("bf16", {"mask": Mask(right=0), "scale": -0.1}),
    ("fp8", {"mask": Mask(right=0), "scale": -0.1}),
    ("fp8", {"seqlen_q": 1}),
    ("fp8", {"head_dim": 272, "head_dim_v": 272}),
]


@pytest.mark.parametrize(("precision", "changes"), CANNOT)
def test_what_is_refused_really_fails_or_is_wrong(precision: str, changes: dict[str, object]) -> None:
    device = torch.device("cuda", 0)
    spec = AttentionSpec.make(batch=2, heads=8, seqlen_q=256, head_dim=64, direction="training").replace(**changes)
    forward = FORWARDS[f"cudnn:{precision}"]
    assert forward.refusals(spec, describe(device))
    truth = Truth.of(spec, 1, device)  # as (B, S, H, D), in which most of the refusals hold
    out, failure = None, ""
    try:
        out = forward.run(forward.prepare(Inputs(*truth.inputs[:3]), spec)).out
    except Exception as error:  # cuDNN's own, which exists only where its front end does
        failure = f"{type(error).__name__} {error}"
    assert "upport" in failure or (
        out is not None and dense.relative_l2(out, truth.out) > 2 * forward.declared_error
    ), failure


@pytest.mark.parametrize("size", [192, 256])
def test_the_fp8_backward_has_no_other_head_dimension_than_128(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller ones are padded to it; what is larger would have to be a kernel of its own."""
    spec = AttentionSpec.make(batch=1, heads=4, seqlen_q=256, head_dim=size, direction="training")
    assert BACKWARDS["cudnn:fp8"].refusals(spec, describe(torch.device("cuda", 0)))
    monkeypatch.setattr(cudnn, "_BACKWARD_SIZE", size)
    truth = Truth.of(spec, 0, torch.device("cuda", 0))
    operands = FORWARDS["cudnn:fp8"].prepare(Inputs(*truth.inputs[:3]), spec)
    saved = Saved(operands, *FORWARDS["cudnn:fp8"].run(operands))
    with pytest.raises(Exception, match="hidden_dim"):
        BACKWARDS["cudnn:fp8"].run(saved, truth.inputs[3])


WIDER_V = """
import torch
from attnbench import AttentionSpec
from attnbench.kernels.contract import Inputs
from attnbench.kernels.registry import registry
spec = AttentionSpec.make(batch=2, heads=1, seqlen_q=118, head_dim=16, head_dim_v=192)
q, k, v = (torch.randn(2, 1, 118, size, device="cuda", dtype=torch.bfloat16) for size in (16, 16, 192))
kernel = registry().forward("KERNEL:fp8")
for _ in range(20):
    out = kernel.run(kernel.prepare(Inputs(q, k, v), spec)).out
torch.cuda.synchronize()
exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
print(float((out.double() - exact).norm() / exact.norm()))
"""


def test_a_v_wider_than_q_is_refused_because_the_gpu_is_lost_or_the_answer_wrong() -> None:
    """In a process of its own, which an illegal memory access ends."""
    program = WIDER_V.replace("KERNEL", "cudnn")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 or not float(done.stdout) < 0.16, done.stdout


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
