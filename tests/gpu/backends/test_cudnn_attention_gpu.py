"""cuDNN's attention by both backends that call it: dense FP64, and refusals of specs that fail or are wrong."""

from __future__ import annotations

import subprocess
import sys

import dense
import pytest
import torch
from agreement_sweep import Truth

from attnbench import AttentionSpec, Mask
from attnbench.backends.cudnn.backend import BACKEND as CUDNN
from attnbench.backends.te.backend import BACKEND as TE
from attnbench.kernels.contract import BackwardKernel, ForwardKernel, Inputs
from attnbench.kernels.devices import describe

BACKENDS = {backend.name: backend for backend in (CUDNN, TE)}
KERNELS = [kernel for backend in BACKENDS.values() for kernel in backend.kernels]
FORWARDS = {k.name: k for k in KERNELS if isinstance(k, ForwardKernel)}
BACKWARDS = {k.name: k for k in KERNELS if isinstance(k, BackwardKernel)}
DEVICE = torch.device("cuda", 0)
END, CAUSAL = "bottom-right", Mask(right=0)
by_both = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def available_kernel(backend: str) -> None:
    if reason := BACKENDS[backend].availability().reason:
        pytest.skip(reason)


CANNOT = [
    ("fp8", {"mask": Mask(left=37, right=0)}),
    ("fp8", {"seqlen_q": 128, "mask": Mask(right=0, alignment=END)}),
    ("fp8", {"head_dim": 72, "head_dim_v": 72}),
    ("bf16", {"seqlen_q": 300, "mask": Mask(left=280, right=11)}),
    ("bf16", {"seqlen_q": 333, "seqlen_kv": 130, "mask": Mask(right=260, alignment=END)}),
    ("bf16", {"mask": CAUSAL, "scale": -0.1}),
    ("fp8", {"mask": CAUSAL, "scale": -0.1}),
    ("fp8", {"seqlen_q": 1}),
    ("fp8", {"head_dim": 272, "head_dim_v": 272}),
]


@by_both
@pytest.mark.parametrize(("precision", "changes"), CANNOT)
def test_refused_specs_fail_or_give_wrong_results(backend: str, precision: str, changes: dict[str, object]) -> None:
    if backend == "cudnn" and changes == {"mask": Mask(left=37, right=0)}:
        pytest.skip("only TransformerEngine's FP8 has no window")
    spec = AttentionSpec.make(batch=2, heads=8, seqlen_q=256, head_dim=64, direction="training").replace(**changes)
    forward = FORWARDS[f"{backend}:{precision}"]
    assert forward.refusals(spec, describe(DEVICE))
    truth = Truth.of(spec, 1, DEVICE)  # as (B, S, H, D), in which most of the refusals hold
    out, failure = None, ""
    # cuDNN's own errors exist only where its front end does.
    expected, message = (RuntimeError, "") if backend == "te" else (Exception, "upport")
    try:
        out = forward.run(forward.prepare(Inputs.of(truth.inputs[:3]), spec)).out
    except expected as error:
        failure = f"{type(error).__name__} {error}"
    wrong = out is not None and dense.relative_l2(out, truth.out) > 2 * forward.declared_error
    assert wrong or (failure and message in failure), failure


WIDER_V = """
import sys, torch
from attnbench import AttentionSpec
from attnbench.kernels.contract import Inputs
from attnbench.kernels.registry import registry
spec = AttentionSpec.make(batch=2, heads=1, seqlen_q=118, head_dim=16, head_dim_v=192)
q, k, v = (torch.randn(2, 1, 118, size, device="cuda", dtype=torch.bfloat16) for size in (16, 16, 192))
kernel = registry().forward(sys.argv[1])
for _ in range(20):
    out = kernel.run(kernel.prepare(Inputs(q, k, v), spec)).out
torch.cuda.synchronize()
exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
print(float((out.double() - exact).norm() / exact.norm()))
"""


@by_both
def test_a_refused_v_wider_than_q_crashes_the_gpu_or_is_wrong(backend: str) -> None:
    """Run in a separate process, which an illegal memory access ends."""
    command = [sys.executable, "-c", WIDER_V, f"{backend}:fp8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 or not float(done.stdout) < 0.16, done.stdout
