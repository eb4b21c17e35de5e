"""The profiler lists every kernel that serves this GPU when it is called."""

import pytest
import torch
from agreement_sweep import Truth

from attnbench import AttentionSpec, Plan
from attnbench.harness.measure.trace import mismatch, trace_call
from attnbench.kernels.contract import Inputs, Saved
from attnbench.kernels.devices import describe
from attnbench.kernels.registry import registry

SPEC = AttentionSpec.make(batch=2, heads=8, seqlen_q=512, head_dim=64)
SPECS = {
    (dtype, direction): SPEC.replace(dtype=dtype, direction=direction)
    for dtype in ("bf16", "fp16", "fp32", "fp64")
    for direction in ("forward", "training")
}


def cases() -> list[tuple[str, str, str]]:
    """(dtype, direction, plan), a plan for each kernel and pass."""
    if not torch.cuda.is_available():
        return [("none", "none", "none")]
    here, known = describe(torch.device("cuda", 0)), registry()
    found: dict[tuple[str, bool], tuple[str, str, str]] = {}
    for (dtype, direction), spec in SPECS.items():
        for plan in known.plans(spec):
            kernel = plan.backward or plan.forward
            key = kernel, plan.backward is not None
            if key not in found and known.reasons(plan, spec, here)[0] == "ok":
                found[key] = dtype, direction, str(plan)
    return list(found.values())


@pytest.mark.parametrize(("dtype", "direction", "plan"), cases())
def test_the_profiler_lists_each_kernel(dtype: str, direction: str, plan: str) -> None:
    device, spec = torch.device("cuda", 0), SPECS[dtype, direction]
    asked = Plan.parse(plan)
    q, k, v, grad = Truth.of(spec, 0, device).inputs
    forward = registry().forward(asked.forward)
    operands = forward.prepare(Inputs(q, k, v), spec)
    result = forward.run(operands)  # the first call compiles
    _, names = trace_call(lambda: forward.run(operands), device)
    assert mismatch(forward, names, "cuda") is None
    if asked.backward is not None:
        backward, saved = registry().backward(asked.backward), Saved(operands, *result)
        backward.run(saved, grad)
        _, names = trace_call(lambda: backward.run(saved, grad), device)
        assert mismatch(backward, names, "cuda") is None
