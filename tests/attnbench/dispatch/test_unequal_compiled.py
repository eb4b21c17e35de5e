"""attention of packed and padded batches under torch.compile, torch.export and torch.func: eager results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from packed import starts
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnbench import attention, guard, state
from attnbench.dispatch.memory import programs
from attnbench.errors import InputError

INT = torch.int32
ROWS = [3, 0, 6]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def packed_tensors(tokens: int, grad: bool = True) -> list[Tensor]:
    random = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, heads, 16, generator=random).requires_grad_(grad) for heads in (4, 2, 2)]


def packed(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, **named: Any) -> Any:
    named = {"is_causal": True, "return_lse": True, **named}
    return attention(q * 2, k, v, layout="thd", cu_seqlens_q=cu, max_seqlen_q=longest, **named)


def answers(function: Any, x: list[Tensor], *given: Any, **named: Any) -> list[Tensor]:
    out, lse = function(*x, *given, **named)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, lse, *torch.autograd.grad(out, x, grad_out)]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("plan", ["auto", pytest.param("emulated:fp8>emulated:fp8", marks=pytest.mark.exhaustive)])
def test_totals_that_vary_need_one_graph_and_few_choices(plan: str) -> None:
    """Other tokens, other lengths and another number of sequences at each step; a bound that varies is one more."""
    state.forget()
    programs.forget()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(packed, fullgraph=True, backend=counter)
    for lengths in ([30, 33], [20, 0, 43], [5, 58, 1], [1, 2, 60]):
        x, cu = packed_tensors(sum(lengths)), starts(lengths)
        for each in (*x, cu):
            torch._dynamo.mark_dynamic(each, 0)
        assert same(answers(function, x, cu, 64, backend=plan), answers(packed, x, cu, 64, backend=plan))
    assert counter.frame_count == 1
    assert len(programs.entries) == 2  # of two and of three sequences
    for longest in (60, 61, 62):
        function(*x, cu, longest, backend=plan)
    assert counter.frame_count == 2


def test_padded_rows_and_separate_key_lengths_compile() -> None:
    random = torch.Generator().manual_seed(3)
    x = [torch.randn(3, size, heads, 8, generator=random).requires_grad_() for size, heads in ((6, 4), (7, 2), (7, 2))]
    lengths = torch.tensor(ROWS, dtype=INT)

    def padded(q: Tensor, k: Tensor, v: Tensor, side: str, of_q: Tensor | None, of_k: Tensor | None) -> Any:
        named: dict[str, Any] = {"padding_side": side, "layout": "bshd", "return_lse": True}
        return attention(q, k, v, q_lengths=of_q, kv_lengths=of_k, **named)

    function = torch.compile(padded, fullgraph=True, backend="aot_eager")
    for own in (("left", lengths, lengths), ("left", None, lengths), ("right", lengths, lengths + 1)):
        assert same(answers(function, x, *own), answers(padded, x, *own))
    apart = packed_tensors(9)
    more = {"cu_seqlens_kv": starts([2, 7]), "max_seqlen_kv": 9}
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    assert same(answers(compiled, apart, starts([4, 5]), 9, **more), answers(packed, apart, starts([4, 5]), 9, **more))


def test_checkpointing_works_within_and_around_compiled_code() -> None:
    x, cu = packed_tensors(9), starts([4, 5])

    def kept(*given: Any) -> Any:
        return checkpoint(packed, *given, use_reentrant=False)

    exact = answers(packed, x, cu, 9)
    assert same(answers(torch.compile(kept, fullgraph=True, backend="aot_eager"), x, cu, 9), exact)
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    assert same(answers(lambda *given: checkpoint(compiled, *given, use_reentrant=False), x, cu, 9), exact)


def test_a_guard_checks_a_compiled_step_of_a_packed_batch() -> None:
    x = packed_tensors(9)
    with guard(every=1, max_error=0.2, on_breach="raise") as watch:
        answers(torch.compile(packed, fullgraph=True, backend="aot_eager"), x, starts([4, 5]), 9)
    assert watch.checks == 2


def test_unsupported_compilation_or_vmap_raises_an_error_with_advice() -> None:
    x, cu = packed_tensors(9), starts([4, 5])

    def refused(words: str, **named: Any) -> None:
        function = torch.compile(attention, fullgraph=True, backend="aot_eager")
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
        torch.compile(lambda x: attention(x, x, x, layout="bshd"), fullgraph=True, backend="aot_eager")(nested)
    q, k, v = packed_tensors(9)
    with pytest.raises(InputError, match="has no vmap"):
        torch.func.vmap(lambda q: packed(q, k, v, cu, 9))(torch.stack([q, q]))


def test_torch_func_gradients_and_exported_programs_work() -> None:
    q, k, v = packed_tensors(9)
    cu = starts([4, 5])

    def loss(x: Tensor) -> Tensor:
        total: Tensor = packed(x, k.detach(), v.detach(), cu, 9)[0].square().sum()
        return total

    assert torch.equal(torch.func.grad(loss)(q.detach()), torch.autograd.grad(loss(q), q)[0])

    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Any:
            return packed(q, k, v, cu, 9)

    x = packed_tensors(9, grad=False)
    tokens = {0: torch.export.Dim("tokens", min=2, max=4096)}
    for shapes in (None, (tokens, tokens, tokens, None)):
        program = torch.export.export(Module(), (*x, cu), dynamic_shapes=shapes)
        assert same(list(program.module()(*x, cu)), list(packed(*x, cu, 9)))
