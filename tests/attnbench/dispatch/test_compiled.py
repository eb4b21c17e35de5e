"""attention under torch.compile and torch.export, also of packed and padded batches: one operator, eager results."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo.testing
from packed import starts
from problems import tensors
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnbench import api, attention, guard, state, use_backend
from attnbench.dispatch import memory
from attnbench.errors import AttnbenchError, InputError
from examples import every_pair

PLANS = ["auto", "reference:fp32", "reference:fp64", "sdpa-math", "sdpa-flash", "emulated:fp8"]
SPECS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "causal_alignment": "bottom-right", "scale": 0.3},
    "window": {"window": (4, 2)},
}


@pytest.fixture(autouse=True)
def fresh():
    """Clears compiled code of other tests, and raises the recompilation limit."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


def step(function, x, *given, **named) -> list[Tensor]:
    """Out, the log-sum-exp if it is returned, and the gradients of random numbers times out."""
    answer = function(*x, *given, **named)
    out, *more = answer if isinstance(answer, tuple) else (answer,)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *more, *torch.autograd.grad(out, x, grad_out)]


def same(one, two) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(("plan", "spec"), every_pair(PLANS, tuple(SPECS)))
def test_compiled_is_eager_to_the_bit(plan, spec):
    arguments = {"backend": plan, **SPECS[spec]}
    function = compiled(attention)
    x = tensors()
    assert torch.equal(function(*x, **arguments), attention(*x, **arguments))
    if plan != "sdpa-math":  # which returns no log-sum-exp
        assert same(*(each(*x, return_lse=True, **arguments) for each in (function, attention)))
    x = tensors(grad=True)
    assert same(step(function, x, **arguments), step(attention, x, **arguments))


@pytest.mark.parametrize(
    ("dtype", "layout", "backend"),
    [(torch.float32, "bshd", "inductor"), (torch.float64, "bshd", "aot_eager"), (torch.float16, "bhsd", "aot_eager")],
)
def test_layouts_and_dtypes(dtype, layout, backend):
    """Between operations that inductor fuses, in one test only, because its compiler takes seconds."""
    x = tensors(dtype=dtype, grad=True)
    if layout == "bshd":
        x = tuple(each.detach().transpose(1, 2).contiguous().requires_grad_() for each in x)

    def block(q, k, v):
        out, lse = attention(q * 2, k, v, layout=layout, return_lse=True)
        return (out + 1, lse) if out.dtype == q.dtype else None

    outs = [function(*x) for function in (compiled(block, backend=backend), block)]
    assert same(*outs)
    assert not any(lse.requires_grad for _, lse in outs)
    grads = [torch.autograd.grad(out.sum(), x) for out, _ in outs]
    assert same(*grads)


def test_lengths_that_vary_need_one_graph():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = compiled(lambda q, k, v: attention(q, k, v, is_causal=True), backend=counter)
    for sq in (7, 12, 30):
        x = tensors(sq=sq, skv=2 * sq, grad=True)
        for each in x:
            torch._dynamo.mark_dynamic(each, 2)
        assert same(step(function, x), step(attention, x, is_causal=True))
    assert counter.frame_count == 1
    (graph,) = counter.graphs
    assert [n.target for n in graph.graph.nodes if n.op == "call_function" and "attnbench" in str(n.target)] == [
        torch.ops.attnbench.attention
    ]


def test_changes_of_context_and_environment_are_noticed(monkeypatch):
    x = tensors()
    function = compiled(lambda *x: attention(*x))
    answers = {}

    def agree(name: str) -> None:
        answers[name] = function(*x)
        assert torch.equal(answers[name], attention(*x)), name

    agree("nothing asked")
    with use_backend("emulated:fp8"):
        agree("context")
        with use_backend("emulated:fp8-tensor"):
            agree("inner context")
    agree("nothing any more")
    monkeypatch.setenv("ATTNBENCH_BACKEND", "emulated:fp8-token")
    agree("variable")
    monkeypatch.setenv("ATTNBENCH_BACKEND", "emulated:fp8-e5m2")
    agree("another variable")
    monkeypatch.delenv("ATTNBENCH_BACKEND")
    agree("no variable")
    kinds = ("nothing asked", "context", "inner context", "variable", "another variable")
    assert len({answers[kind].float().sum().item() for kind in kinds}) == len(kinds)
    seen = []

    def in_another_thread() -> None:
        with use_backend("emulated:fp8-token"):
            seen.append(function(*x))

    thread = threading.Thread(target=in_another_thread)
    with use_backend("emulated:fp8"):
        thread.start()
        thread.join()
    assert torch.equal(seen[0], answers["variable"])


def test_tasks_with_their_own_contexts_are_refused():
    x = tensors()
    function = compiled(lambda *x: attention(*x))

    async def wisher(go: asyncio.Event, done: asyncio.Event) -> None:
        with use_backend("emulated:fp8"):
            go.set()
            await done.wait()

    async def caller() -> None:
        go, done = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(wisher(go, done))
        await go.wait()
        with pytest.raises(AttnbenchError, match="name backend"):
            function(*x)
        done.set()
        await task

    asyncio.run(caller())
    assert torch.equal(function(*x), attention(*x))


def test_a_backward_uses_its_forwards_plan_after_the_context_changed(monkeypatch):
    x = tensors(grad=True)
    function = compiled(lambda *x: attention(*x))
    with use_backend("emulated:fp8"):
        out, expected = function(*x), step(attention, x)
    api.forget_choices()
    with use_backend("reference:fp64"):
        function(*x)
        grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        monkeypatch.setattr(memory, "decide", lambda *asks: pytest.fail("tables may have changed since"))
        found = torch.autograd.grad(out, x, grad_out)
    assert same([out, *found], expected)


def test_second_derivatives_are_refused_and_error_messages_are_kept():
    q, k, v = tensors(dtype=torch.float32, grad=True)
    out = torch.ops.attnbench.attention(*arguments(q, k, v, training=True))[0]
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()
    with pytest.raises(InputError, match="training=False"):
        torch.ops.attnbench.attention(*arguments(q, k, v, training=False))[0].sum().backward()
    function = compiled(attention)
    with pytest.raises(InputError, match="scale must be a finite number"):
        function(q, k, v, scale=float("nan"))
    for words, bad in {"4 dimensions": (q[0], k, v), "multiple of kv_heads": (q[:, :3], k, v)}.items():
        with pytest.raises(Exception, match=words):
            compiled(attention)(*bad)
    with pytest.raises(Exception, match="window must be a pair"):
        function(q, k, v, window=(3, 4, 5))


def arguments(q, k, v, *, training, lse=False, backend="sdpa-flash", descales=(None, None, None)):
    shape = (True, 3, None, "bottom-right", 0.2, None, True)
    even = (False, "right", False, None, None)
    return (q, k, v, None, None, *descales, training, *shape, lse, None, backend, None, "argument", "0", *even)


@pytest.mark.parametrize(("backend", "grad"), [("sdpa-flash", False), ("emulated:fp8", True)])
def test_operators_pass_torchs_opcheck(backend, grad):
    q, k, v = tensors(grad=grad)
    forward = arguments(q, k, v, training=grad, lse=not grad, backend=backend)
    torch.library.opcheck(torch.ops.attnbench.attention.default, forward)
    if grad:
        out, lse = (x.detach() for x in torch.ops.attnbench.attention(*forward))
        saved = (torch.randn_like(out), q.detach(), k.detach(), v.detach(), out, lse, None, None)
        torch.library.opcheck(torch.ops.attnbench.attention_backward.default, (*saved, *forward[8:]))


def test_eight_threads_run_one_compiled_function():
    function = compiled(lambda *x: attention(*x, is_causal=True, backend="emulated:fp8"))
    problems = [tensors(seed=seed, grad=True) for seed in range(8)]
    expected = [step(attention, x, is_causal=True, backend="emulated:fp8") for x in problems]
    step(function, problems[0])
    with ThreadPoolExecutor(8) as pool:
        right = pool.map(lambda x, y: all(same(step(function, x), y) for _ in range(5)), problems, expected)
        assert list(right) == [True] * 8


class Module(torch.nn.Module):
    def forward(self, q, k, v):
        return attention(q, k, v, is_causal=True)


def call_targets(program) -> list[object]:
    (node,) = (n for n in program.graph.nodes if n.target is torch.ops.attnbench.attention.default)
    return list(node.args)


def test_an_export_of_fixed_shapes_contains_the_chosen_plan(tmp_path):
    x = tensors()
    with use_backend("emulated:fp8"):
        program = torch.export.export(Module(), x)
    assert "emulated:fp8" in call_targets(program)
    expected = attention(*x, is_causal=True, backend="emulated:fp8")
    assert torch.equal(program.module()(*x), expected)
    torch.export.save(program, tmp_path / "program.pt2")
    assert torch.equal(torch.export.load(tmp_path / "program.pt2").module()(*x), expected)


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_of_dynamic_shapes_chooses_at_run_time(strict):
    q, k, v = tensors()
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = ({2: length}, None, None)
    program = torch.export.export(Module(), (q, k, v), dynamic_shapes=shapes, strict=strict)
    assert "auto" in call_targets(program)
    for sq in (5, 40):
        longer = tensors(sq=sq)[0]
        assert torch.equal(program.module()(longer, k, v), attention(longer, k, v, is_causal=True))


# --- packed and padded batches ---


def packed_tensors(tokens: int, grad: bool = True):
    random = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, heads, 16, generator=random).requires_grad_(grad) for heads in (4, 2, 2)]


def packed(q, k, v, cu, longest: int, **named):
    named = {"is_causal": True, "return_lse": True, **named}
    return attention(q * 2, k, v, layout="thd", cu_seqlens_q=cu, max_seqlen_q=longest, **named)


@pytest.mark.parametrize("plan", ["auto", pytest.param("emulated:fp8>emulated:fp8", marks=pytest.mark.exhaustive)])
def test_totals_that_vary_need_one_graph_and_few_choices(plan: str):
    """Other tokens, other lengths and another number of sequences at each step; a bound that varies is one more."""
    state.forget()
    memory.programs.forget()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = compiled(packed, backend=counter)
    for lengths in ([30, 33], [20, 0, 43], [5, 58, 1], [1, 2, 60]):
        x, cu = packed_tensors(sum(lengths)), starts(lengths)
        for each in (*x, cu):
            torch._dynamo.mark_dynamic(each, 0)
        assert same(step(function, x, cu, 64, backend=plan), step(packed, x, cu, 64, backend=plan))
    assert counter.frame_count == 1
    assert len(memory.programs.entries) == 2  # of two and of three sequences
    for longest in (60, 61, 62):
        function(*x, cu, longest, backend=plan)
    assert counter.frame_count == 2


def test_padded_rows_and_separate_key_lengths_compile():
    random = torch.Generator().manual_seed(3)
    x = [torch.randn(3, size, heads, 8, generator=random).requires_grad_() for size, heads in ((6, 4), (7, 2), (7, 2))]
    lengths = torch.tensor([3, 0, 6], dtype=torch.int32)

    def padded(q, k, v, side: str, of_q, of_k):
        named = {"padding_side": side, "layout": "bshd", "return_lse": True}
        return attention(q, k, v, q_lengths=of_q, kv_lengths=of_k, **named)

    function = compiled(padded)
    for own in (("left", lengths, lengths), ("left", None, lengths), ("right", lengths, lengths + 1)):
        assert same(step(function, x, *own), step(padded, x, *own))
    apart = packed_tensors(9)
    more = {"cu_seqlens_kv": starts([2, 7]), "max_seqlen_kv": 9}
    function = compiled(packed)
    assert same(step(function, apart, starts([4, 5]), 9, **more), step(packed, apart, starts([4, 5]), 9, **more))


def test_checkpointing_works_within_and_around_compiled_code():
    x, cu = packed_tensors(9), starts([4, 5])

    def kept(*given):
        return checkpoint(packed, *given, use_reentrant=False)

    exact = step(packed, x, cu, 9)
    assert same(step(compiled(kept), x, cu, 9), exact)
    function = compiled(packed)
    assert same(step(lambda *given: checkpoint(function, *given, use_reentrant=False), x, cu, 9), exact)


def test_a_guard_checks_a_compiled_step_of_a_packed_batch():
    x = packed_tensors(9)
    with guard(every=1, max_error=0.2, on_breach="raise") as watch:
        step(compiled(packed), x, starts([4, 5]), 9)
    assert watch.checks == 2


def test_unsupported_compilation_or_vmap_raises_an_error_with_advice():
    x, cu = packed_tensors(9), starts([4, 5])

    def refused(words: str, **named):
        function = compiled(attention)
        with pytest.raises(Exception, match=words):
            function(*x, layout="thd", **named)

    refused("pass max_seqlen_q", cu_seqlens_q=cu)
    refused("max_seqlen_kv where", cu_seqlens_q=cu, cu_seqlens_kv=starts([2, 7]), max_seqlen_q=9)
    refused("needs cu_seqlens_q")
    refused("sinks are not served", cu_seqlens_q=cu, max_seqlen_q=9, sinks=torch.zeros(4))
    refused("must ascend from 0 to 9", cu_seqlens_q=starts([4, 6]), max_seqlen_q=9)
    x[2] = x[2][:8]
    refused("agree in length", cu_seqlens_q=cu, max_seqlen_q=9)
    nested = torch.nested.nested_tensor_from_jagged(x[0], cu.long())
    with pytest.raises(Exception, match="nested tensors are not served within"):
        compiled(lambda x: attention(x, x, x, layout="bshd"))(nested)
    q, k, v = packed_tensors(9)
    with pytest.raises(InputError, match="has no vmap"):
        torch.func.vmap(lambda q: packed(q, k, v, cu, 9))(torch.stack([q, q]))


def test_torch_func_gradients_and_exported_programs_work():
    q, k, v = packed_tensors(9)
    cu = starts([4, 5])

    def loss(x) -> Tensor:
        return packed(x, k.detach(), v.detach(), cu, 9)[0].square().sum()

    assert torch.equal(torch.func.grad(loss)(q.detach()), torch.autograd.grad(loss(q), q)[0])

    class Module(torch.nn.Module):
        def forward(self, q, k, v, cu):
            return packed(q, k, v, cu, 9)

    x = packed_tensors(9, grad=False)
    tokens = {0: torch.export.Dim("tokens", min=2, max=4096)}
    for shapes in (None, (tokens, tokens, tokens, None)):
        program = torch.export.export(Module(), (*x, cu), dynamic_shapes=shapes)
        assert same(list(program.module()(*x, cu)), list(packed(*x, cu, 9)))
