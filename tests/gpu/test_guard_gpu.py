"""The guard on a GPU: it finds errors, does not block the host, is not captured in graphs, and costs little."""

import statistics
import time
from random import Random

import pytest
import torch
from guard_faults import NAME, plant
from torch import Tensor

from attnbench import AttentionSpec, Mask, attention, explain, guard
from attnbench.api import forget_choices
from attnbench.choosing.demotion import demotions
from attnbench.errors import BreachError, RefusedError
from attnbench.guarding.check import gradient_sums, out_sums, part, pick_groups, pick_rows
from attnbench.kernels.guard_hook import watching

pytestmark = pytest.mark.filterwarnings("ignore::attnbench.errors.BreachWarning")
EVERY = 1000
LONG = ["fa3:fp8", "fa3:bf16", "triton:fp8", "cudnn:bf16"]
COSTS = {
    "forward": ["sdpa-cudnn", "fa3:bf16", "fa3:fp8", "cudnn:fp8", "triton:fp8"],
    "training": ["sdpa-flash", "cudnn:bf16>cudnn:bf16", "fa3:fp8>fa4:bf16", "triton:fp8>triton:fp8"],
}


@pytest.fixture(autouse=True)
def no_guard_is_left():
    yield
    for each in list(watching.opened):
        watching.close(each)


@pytest.fixture
def planted_kernels(monkeypatch):
    with monkeypatch.context() as patch:
        yield plant(patch)
    demotions.forget()
    forget_choices()


def tensors(length=512, keys=None, batch=2, heads=8, kv_heads=None, d=128, grad=False, seed=0) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = [(heads, length), *[(kv_heads or heads, keys or length)] * 2]
    return [
        torch.randn(batch, h, s, d, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_(grad)
        for h, s in sizes
    ]


def skip_if_refused(x, plan: str) -> None:
    try:
        explain(*x, backend=plan)
    except RefusedError as error:
        pytest.skip(str(error))


def step(x, plan=NAME, function=attention) -> list[Tensor]:
    out = function(*x, is_causal=True, backend=plan)
    return [out, *torch.autograd.grad(out, x, out.detach())] if x[0].requires_grad else [out]


@pytest.mark.parametrize(
    ("name", "factor", "least"),
    # Rows of dq and dk that cancel count as half as long as if they did not: a drift of theirs counts for less.
    [("out", 1.02, 0.9), ("dv", 1.02, 0.9), ("dq", 1.05, 0.3), ("dk", 1.05, 0.3)],
)
def test_a_planted_drift_is_found(planted_kernels, name, factor, least):
    forward, backward = planted_kernels
    x = tensors(grad=True)
    with guard(every=1) as watch:
        for _ in range(20):
            step(x)
        torch.cuda.synchronize()
        assert not watch.breaches
        if name == "out":
            forward.change = lambda out: out * factor
        else:
            backward.changes[name] = lambda gradient: gradient * factor
        for _ in range(40):
            step(x)
    assert watch.breaches[0].tensor == name
    assert least < watch.breaches[0].error / (factor - 1) < 1.1
    assert watch.breaches[0].error > watch.breaches[0].bound
    assert not watch.skipped


@pytest.mark.parametrize("mask", [Mask(), Mask(right=0), Mask(300, 5, "bottom-right")], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_checked_sums_agree_with_the_cpu(mask, dtype):
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    spec = AttentionSpec.make(
        batch=2, heads=8, kv_heads=2, seqlen_q=700, seqlen_kv=900, head_dim=64, mask=mask, softcap=20.0, dtype=name,
        direction="training",
    )  # fmt: skip
    q, k, v = (x.to(dtype) for x in tensors(700, 900, kv_heads=2, d=64))
    out, do = torch.randn_like(q), torch.randn_like(q)
    groups, picks = pick_groups(spec, Random(0)), pick_rows(spec, Random(0))
    found = []
    for x in ([q, k, v, out, do], [each.cpu() for each in (q, k, v, out, do)]):
        q, k, v, out, do = x
        own = part(groups, q, k, v)
        found.append(out_sums(q, k, v, out, spec, picks).packed.cpu())
        found.append(gradient_sums(own, groups, do, (q, k, v), spec).packed.cpu())
    for device, host in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(device, host, rtol=1e-9 if dtype == torch.float32 else 1e-3, atol=1e-9)


def test_checks_do_not_block_the_host(planted_kernels):
    forward, _ = planted_kernels
    x = tensors(grad=True)
    with guard(every=1, on_breach="raise") as watch:
        step(x)  # pinned memory, kernels
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                step(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        forward.change = lambda out: out * 1.5
        with pytest.raises(BreachError, match="out is off by"):  # at a later call, where it is read
            seconds(lambda: [step(x), torch.cuda.synchronize()], 3)
    assert watch.breaches


def test_stop_waits_for_pending_checks(planted_kernels):
    forward, _ = planted_kernels
    with guard(every=1):
        attention(*tensors(), backend=NAME)  # the first check takes pinned memory, which waits for the GPU
    torch.cuda.synchronize()
    forward.change = lambda out: out * 1.5
    watch = guard(every=1, on_breach="raise").start()
    torch.cuda._sleep(10**9)  # so that nothing is done when the call returns
    attention(*tensors(), backend=NAME)
    assert watch.checks == 0
    with pytest.raises(BreachError):
        watch.stop()
    assert watch.checks == 1


def test_checks_are_not_recorded_in_a_graph():
    x = tensors()
    with guard(every=1) as watch:
        for _ in range(3):
            expected = attention(*x, backend="sdpa-flash")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(*x, backend="sdpa-flash")
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        attention(*x, backend="sdpa-flash")
    assert watch.checks == 4  # of the calls before and after; when each is read is the GPU's affair
    assert not watch.skipped


@pytest.mark.parametrize("grad", [False, True])
def test_a_guard_works_with_compiled_cuda_graphs(grad):
    torch._dynamo.reset()
    x = tensors(grad=grad)
    function = torch.compile(attention, fullgraph=True, mode="reduce-overhead")
    expected = [each.clone() for each in step(x, "sdpa-flash")]
    with guard(every=1) as watch:
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            found = [each.clone() for each in step(x, "sdpa-flash", function)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.01, atol=0.01)
    assert not watch.breaches
    torch._dynamo.reset()


@pytest.mark.parametrize("keys", [2**16, 2**17])
@pytest.mark.parametrize("plan", LONG)
def test_a_short_accumulator_is_found_at_long_contexts(plan, keys):
    """FP8 is accurate on values around zero and wrong on biased ones from 64k keys; promoted sums are accurate."""
    q, k, v = tensors(1024, keys, batch=1)
    skip_if_refused((q, k, v), plan)
    for shift in (0.0, 0.5):
        with guard(every=1) as watch:
            for _ in range(4):
                attention(q, k, v + shift, backend=plan)
        errors = [f"{each.error:.3f}" for each in watch.breaches]
        print(f"{plan}, {keys} keys, V {shift:+.1f}: {len(errors)} of {watch.checks} checks alarmed {errors}")
        assert bool(watch.breaches) == (plan == "fa3:fp8" and shift != 0.0)
        assert not watch.skipped


def seconds(run, rounds: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / rounds


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("direction", "plan"), [(name, plan) for name, plans in COSTS.items() for plan in plans])
def test_the_overhead_at_8k_is_below_one_percent(direction, plan, batch):
    """Less than one per cent of the time of the calls between two checks."""
    x = tensors(8192, batch=batch, heads=16, grad=direction == "training")
    skip_if_refused(x, plan)

    def call() -> None:
        step(x, plan)

    def median_seconds() -> float:
        return statistics.median(seconds(call, 6) for _ in range(5))

    seconds(call, 5)
    plain = median_seconds()
    with guard(every=1) as watch:
        seconds(call, 5)
        checked = median_seconds()
    with guard(every=10**9):
        call()
        between = median_seconds()
    share = (checked - plain) / (EVERY * plain)
    print(
        f"\n{plan}, {direction}, batch {batch}: call {1e3 * plain:.3f} ms, {1e3 * between:.3f} ms between checks, "
        f"{1e3 * (checked - plain):.3f} ms a check, {share:.3%} with every={EVERY}"
    )
    assert watch.checks == 35 * (2 if direction == "training" else 1)
    assert share < 0.01
