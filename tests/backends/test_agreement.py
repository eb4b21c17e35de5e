"""Every kernel that does not refuse a spec agrees with FP64 attention on it."""

import torch
from dense import dense_attention, dense_gradients, distance, gradient_sizes
from hypothesis import given, settings
from needs import needs_avx2
from problems import Problem, problems, same_program_problems, tensors_of
from torch import Tensor

from attnbench import AttentionSpec, Plan, attention
from attnbench.kernels.devices import describe
from attnbench.kernels.plan import backend_of
from attnbench.kernels.registry import registry
from attnbench.problem.dtypes import TO_TORCH
from examples import examples

CPU = torch.device("cpu")
EXAMPLES, COMPILED = examples(30, 440), examples(16, 440)
INTERPRETED = "triton"  # its own tests hold it to the truth, on fewer problems


def usable(spec: AttentionSpec) -> list[Plan]:
    plans = [plan for plan in registry().plans(spec) if INTERPRETED not in map(backend_of, plan.kernels)]
    return [plan for plan in plans if registry().reasons(plan, spec, describe(CPU))[0] == "ok"]


def run(problem: Problem, plan: Plan, **more: object) -> tuple[Tensor, ...]:
    """out (and lse where the kernel has one), dq, dk, dv in bhsd, through the public API."""
    spec = problem.spec
    q, k, v, grad_out = problem.tensors()
    leaves = [x.detach().requires_grad_(plan.backward is not None) for x in (q, k, v)]
    out = attention(
        *leaves,
        window=(spec.mask.left, spec.mask.right),
        causal_alignment=spec.mask.alignment,
        scale=spec.scale,
        softcap=spec.softcap,
        layout=problem.layout,
        backend=str(plan),
        **more,
    )
    return out, leaves, grad_out


def bhsd(problem: Problem, x: Tensor) -> Tensor:
    return x if problem.layout == "bhsd" else x.transpose(1, 2)


def declared_error_of(plan: Plan, spec: AttentionSpec) -> float:
    """A plan's declared error plus one unavoidable rounding to the tensors' dtype.

    Errors are declared for scores of the usual size; what 8 bits do to a score grows with its scale.
    """
    kernels = [registry().forward(plan.forward)] + ([registry().backward(plan.backward)] if plan.backward else [])
    larger = max(1.0, spec.scale * spec.head_dim**0.5) if plan.fp8 else 1.0
    return larger * max(kernel.declared_error for kernel in kernels) + torch.finfo(TO_TORCH[spec.dtype]).eps / 2


def check(problem: Problem, plan: Plan) -> None:
    spec = problem.spec
    has_lse = registry().forward(plan.forward).rows["cpu"].lse
    q, k, v, grad_out = tensors_of(problem)
    truth, truth_lse = dense_attention(q, k, v, spec)
    bound = declared_error_of(plan, spec)
    result, leaves, gradient = run(problem, plan, return_lse=has_lse)
    out, lse = result if has_lse else (result, None)
    assert bhsd(problem, out).shape == truth.shape
    assert distance(bhsd(problem, out), truth, v.double().norm().item() * 0.1) <= bound, f"{plan}: out"
    if lse is not None:
        seen = truth_lse > -torch.inf
        assert torch.equal(lse == -torch.inf, ~seen), f"{plan}: rows without a key"
        scores = dense_attention(q.double().abs(), k.double().abs(), v, spec.replace(mask=spec.mask))[1]
        size = (scores[seen].abs() + 1).norm().item()
        rounded = 0.0 if spec.dtype == "fp64" else 1e-7  # attention() returns the LSE in fp32, of fp64 in fp64
        assert (lse[seen].double() - truth_lse[seen]).norm().item() <= (bound + rounded) * size, f"{plan}: lse"
    if plan.backward is not None:
        found = torch.autograd.grad(out, leaves, gradient)
        wanted = dense_gradients(q, k, v, grad_out, spec)
        sizes = gradient_sizes(q, k, v, grad_out, spec)
        for name, each, correct, size in zip(("dq", "dk", "dv"), found, wanted, sizes, strict=True):
            assert distance(bhsd(problem, each), correct, size) <= 2 * bound, f"{plan}: {name}"


seen: dict[str, int] = {}


def check_all(problem: Problem, compiled: bool) -> None:
    """Checks every usable plan, and every forward without a usable backward."""
    plans = usable(problem.spec)
    trained = {plan.forward for plan in plans}
    forward = [plan for plan in usable(problem.spec.replace(direction="forward")) if plan.forward not in trained]
    for plan in [*plans, *forward]:
        if plan.forward.startswith("flex:") == compiled:
            check(problem, plan)
            seen[str(plan)] = seen.get(str(plan), 0) + 1


def runnable_forwards() -> set[str]:
    """The forward kernels that this machine can run at all, without an interpreter."""
    known = registry()
    here = [name for name, kernel in known.forwards.items() if "cpu" in kernel.rows and backend_of(name) != INTERPRETED]
    return {name for name in here if known.availability(backend_of(name)).ok}


def assert_some_were_served(compiled: bool) -> None:
    """Asserts that every runnable kernel served enough examples."""
    tried: dict[str, int] = {}
    for plan, count in seen.items():
        tried[Plan.parse(plan).forward] = tried.get(Plan.parse(plan).forward, 0) + count
    expected = {name for name in runnable_forwards() if name.startswith("flex:") == compiled}
    least = (COMPILED if compiled else EXAMPLES) // 25
    assert {name for name, count in tried.items() if count >= max(1, least)} >= expected, tried


def test_every_kernel_agrees_with_fp64_or_refuses() -> None:
    @settings(max_examples=EXAMPLES)
    @given(problems())
    def agree(problem: Problem) -> None:
        assert Plan("reference:fp64", "reference:fp64") in usable(problem.spec)
        check_all(problem, compiled=False)

    agree()
    assert_some_were_served(compiled=False)


@needs_avx2
def test_compiled_kernels_agree_with_fp64_or_refuse() -> None:
    """test_flex.py varies what would here compile another program with every example."""

    @settings(max_examples=COMPILED)
    @given(same_program_problems())
    def agree(problem: Problem) -> None:
        check_all(problem, compiled=True)

    agree()
    assert_some_were_served(compiled=True)
