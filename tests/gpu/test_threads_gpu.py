"""``attention()`` as the first GPU call of a thread, which has no CUDA context yet."""

import subprocess
import sys

import pytest
import torch

from attnbench import AttentionSpec, Mask
from attnbench.kernels.devices import describe
from attnbench.kernels.registry import registry

SPEC = AttentionSpec.make(batch=1, heads=4, seqlen_q=256, head_dim=128, mask=Mask(right=0), direction="training")
PROGRAM = """
import sys, threading, torch
from attnbench import attention
leaves = [torch.randn(1, 4, 256, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
grad_out = torch.randn_like(leaves[0])
def step(found):
    out = attention(*leaves, is_causal=True, backend=sys.argv[1])
    found += [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
first, second = [], []
step(first)  # memory and kernels are there then, so that nothing of torch's binds the thread
torch.cuda.synchronize()
thread = threading.Thread(target=step, args=(second,))
thread.start()
thread.join()
torch.cuda.synchronize()
assert len(second) == 4
assert all((x.float() - y.float()).norm() <= 0.02 * x.float().norm() for x, y in zip(first, second))
"""


def plans() -> list[str]:
    if not torch.cuda.is_available():
        return ["none"]
    facts = describe(torch.device("cuda", 0))
    served = [plan for plan in registry().plans(SPEC) if registry().reasons(plan, SPEC, facts)[0] == "ok"]
    by_kernel = {kernel: plan for plan in served for kernel in plan.kernels}
    return sorted({str(plan) for plan in by_kernel.values() if not plan.forward.startswith("emulated")})


@pytest.mark.parametrize("plan", plans())
def test_a_threads_first_gpu_call_works(plan: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, plan], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
