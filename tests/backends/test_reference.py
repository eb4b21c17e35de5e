"""The reference's own promises: FP64 exactness in FP64, and 128k keys within 2 GB."""

import subprocess
import sys

import torch
from dense import dense_attention, dense_gradients, relative_l2
from hypothesis import example, given, settings
from problems import Problem, problems, tensors_of

from attnbench import AttentionSpec, Mask
from attnbench.kernels.contract import Inputs
from attnbench.kernels.execution import Execution
from attnbench.kernels.registry import registry
from examples import examples

# All that draws may leave out at once: a softcap, a window, rows without keys and heads that share their keys.
HARD = AttentionSpec.make(
    batch=2, heads=4, kv_heads=2, seqlen_q=37, seqlen_kv=29, head_dim=24, dtype="fp64", mask=Mask(5, 0, "bottom-right"),
    softcap=3.0, scale=-0.2, direction="training",
)  # fmt: skip


@settings(max_examples=examples(30, 200))
@given(problems(dtypes=("fp64",)))
@example(Problem(HARD, "bshd", False, 5))
def test_fp64_results_agree_with_the_definition_up_to_rounding(problem: Problem) -> None:
    spec = problem.spec
    q, k, v, grad_out = tensors_of(problem)
    forward, backward = registry().forward("reference:fp64"), registry().backward("reference:fp64")
    out, lse = Execution(spec, forward)(Inputs(q, k, v))
    truth, truth_lse = dense_attention(q, k, v, spec)
    assert relative_l2(out, truth) < 1e-12 or truth.norm() == 0
    seen = truth_lse > -torch.inf
    assert torch.allclose(lse[seen], truth_lse[seen], atol=1e-12)
    assert torch.equal(lse == -torch.inf, ~seen)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(Execution(spec, forward, backward)(Inputs.of(leaves))[0], leaves, grad_out)
    for each, correct in zip(found, dense_gradients(q, k, v, grad_out, spec), strict=True):
        assert (each - correct).norm() <= 1e-11 * max(1.0, correct.norm().item())


LONG = """
import resource, torch
from attnbench import attention
torch.set_num_threads(2)
def step(length):
    q, k, v = (torch.randn(1, 1, length, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    attention(q, k, v, is_causal=True, backend="reference:fp64").sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(-step(64) + step(8192))
"""


def test_long_contexts_compute_the_scores_in_slices_in_both_passes() -> None:
    """Beyond what a short context takes: 0.3 GB was seen in slices, 1.6 with all scores at once."""
    done = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.8
