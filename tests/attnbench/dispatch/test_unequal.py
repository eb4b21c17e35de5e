"""attention of packed, padded and nested batches: each sequence as if computed alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from dense import dense_attention, dense_gradients, relative_l2
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import Documents, documents, starts
from problems import masks
from torch import Tensor

from attnbench import AttentionSpec, attention, explain, guard, state
from attnbench.dispatch.memory import executions
from attnbench.errors import BreachWarning, InputError
from attnbench.kernels.capabilities import Device
from attnbench.kernels.registry import registry
from attnbench.problem.lengths_kind import LengthsKind
from examples import examples

INT = torch.int32


def exact(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of one sequence alone, (1, H, S, D)."""
    if not (q.shape[2] and k.shape[2]):
        zeros = (torch.zeros_like(x) for x in (q, k, v))
        return torch.zeros_like(do), do.new_full(do.shape[:3], -torch.inf), *zeros
    return *dense_attention(q, k, v, spec), *dense_gradients(q, k, v, do, spec)


BATCHES = documents(9, masks(), heads=(4, 2), head_dim=8, head_dim_v=6, softcap=st.sampled_from([0.0, 2.0]),
                    padding=st.sampled_from([None, "left", "right"]))  # fmt: skip


@settings(max_examples=examples(50, 300), deadline=None)
@given(BATCHES, st.sampled_from(["bhsd", "bshd"]))
def test_each_sequence_has_the_result_that_it_has_alone(batch: Documents, layout: str) -> None:
    """Padding holds NaN, which nothing reads."""
    layout = "thd" if batch.padding is None else layout

    def arguments_of(x: Tensor) -> Tensor:
        return x[0].transpose(0, 1) if layout == "thd" else x.transpose(1, 2) if layout == "bshd" else x

    def to_sequences(x: Tensor) -> Tensor:
        return x.transpose(0, 1)[None] if layout == "thd" else x.transpose(1, 2) if layout == "bshd" else x

    parts = [[x.double() for x in each] for each in batch.parts()]
    (*inputs, do), lengths, _ = batch.batched(parts)
    q, k, v = (arguments_of(x).requires_grad_() for x in inputs)
    if layout == "thd":
        named: dict[str, Any] = {"cu_seqlens_q": lengths.q, "cu_seqlens_kv": lengths.kv}
    else:
        named = {"q_lengths": lengths.q, "kv_lengths": lengths.kv, "padding_side": batch.padding}
    named |= {"window": (batch.mask.left, batch.mask.right), "causal_alignment": batch.mask.alignment}
    out, lse = attention(q, k, v, layout=layout, softcap=batch.softcap, return_lse=True, **named)
    gradients = torch.autograd.grad(out, (q, k, v), arguments_of(do))
    whole = to_sequences(out), lse[None] if layout == "thd" else lse, *map(to_sequences, gradients)
    for (queries, keys), given_, found in zip(batch.lengths, parts, batch.split(whole), strict=True):
        for one, other in zip(found, exact(batch.make(queries, keys), *given_), strict=True):
            hidden = other == -torch.inf
            assert torch.equal(one == -torch.inf, hidden)
            size = other.masked_fill(hidden, 0).norm()
            assert (one - other).masked_fill(hidden, 0).norm() <= 1e-11 * max(1.0, size)


LENGTHS = [5, 0, 1, 130, 17]


def document_batch(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(1)
    return tuple(torch.randn(sum(LENGTHS), heads, 16, generator=random).to(dtype) for heads in (4, 2, 2, 4))


RECIPES = ("fp8", "fp8-tensor", "fp8-block", "fp8-token-hadamard", "fp8-e5m2", "fp8-smooth")


@pytest.mark.parametrize("precision", RECIPES)
def test_fp8_scales_are_not_shared_between_sequences(precision: str) -> None:
    q, k, v, do = document_batch()
    cu, plan = starts(LENGTHS), f"emulated:{precision}>emulated:{precision}"

    def answers(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **lengths: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, is_causal=True, backend=plan, **lengths)
        assert isinstance(out, Tensor)
        return [out.detach(), *torch.autograd.grad(out, leaves, do)]

    packed = answers(q, k, v, do, layout="thd", cu_seqlens_q=cu)
    for first, last in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        if first < last:
            alone = answers(*(x[None, first:last] for x in (q, k, v, do)), layout="bshd")
            for one, other in zip(packed, alone, strict=True):
                assert relative_l2(one[first:last], other[0]) < 1e-6 or torch.equal(one[first:last], other[0])
    for x in (q, k, v, do):
        x[5] = torch.nan  # the sequence of one token
    for before, after in zip(packed, answers(q, k, v, do, layout="thd", cu_seqlens_q=cu), strict=True):
        assert torch.equal(before[:5], after[:5])
        assert torch.equal(before[6:], after[6:])
        assert after[5].isnan().any()


def test_a_new_batch_of_similar_lengths_reuses_the_choice() -> None:
    state.forget()
    for total in (250, 251, 255):
        x = torch.randn(total, 2, 8)
        attention(x, x, x, layout="thd", cu_seqlens_q=starts([100, total - 100]), max_seqlen_q=200)
    assert len(executions.entries) == 1
    attention(x, x, x, layout="thd", cu_seqlens_q=starts([1] * total), max_seqlen_q=1)
    assert len(executions.entries) == 2
    for count, kv_lengths in ((3, ONE), (3, ONE), (4, ONE.clone())):  # the last may differ from the queries'
        attention(ROWS, ROWS, ROWS, q_lengths=ONE, kv_lengths=kv_lengths)
        assert len(executions.entries) == count


def test_a_choice_states_the_lengths_and_refuses_kernels_without_support_for_them() -> None:
    x = torch.randn(12, 2, 8)
    named = {"layout": "thd", "cu_seqlens_q": starts([5, 7])}
    choice = explain(x, x, x, **named)
    assert str(choice.spec) == "b2 h2 s8 d8 fp32 packed12 forward"
    spec = AttentionSpec.make(batch=2, heads=2, seqlen_q=5, head_dim=64, lengths=LengthsKind(batch="left-padded"))
    reasons = registry().forward("fa3-vllm:bf16").refusals(spec, Device("cuda", "NVIDIA H200", (9, 0)))
    assert reasons == ["takes sequences of one length, not a left-padded batch"]


@pytest.mark.parametrize("layout", ["packed", "left", "right"])
def test_a_guard_checks_both_passes_and_reads_no_padding(layout: str) -> None:
    named: dict[str, Any] = {"layout": "thd", "cu_seqlens_q": starts([4, 0, 5])}
    x = torch.randn(9, 2, 16)
    if layout != "packed":
        named = {"kv_lengths": torch.tensor([3, 5], dtype=INT), "padding_side": layout}
        named["q_lengths"] = named["kv_lengths"]
        x = torch.randn(2, 2, 5, 16)
        x[0, :, slice(0, 2) if layout == "left" else slice(3, 5)] = torch.nan
    for bound, breaches in ((0.3, set()), (1e-9, {"out", "dq", "dk", "dv"})):
        with warnings.catch_warnings(), guard(every=1, max_error=bound) as watch:
            warnings.simplefilter("ignore", BreachWarning)
            for _ in range(8):
                q, k, v = (x.clone().requires_grad_() for _ in "qkv")
                out = attention(q, k, v, is_causal=True, backend="emulated:fp8>emulated:fp8", **named)
                torch.autograd.grad(out, (q, k, v), 1.0 + 0.0 * x)  # NaN in padding
        assert (watch.checks, watch.skipped) == (16, {})
        assert {each.tensor for each in watch.breaches} == breaches


X, ROWS = torch.randn(9, 2, 8), torch.randn(1, 2, 9, 8)
ONE = torch.tensor([9], dtype=INT)


@pytest.mark.parametrize(
    ("x", "named", "message"),
    [
        (X, {"layout": "thd"}, "needs cu_seqlens_q"),
        (X, {"layout": "thd", "cu_seqlens_q": starts([9]), "kv_lengths": ONE}, "go with padded rows"),
        (ROWS, {"cu_seqlens_q": starts([9])}, 'layout="thd"'),
        (ROWS, {"max_seqlen_kv": 3}, 'layout="thd"'),
        (ROWS, {"padding_side": "left"}, "neither is given"),
        (ROWS, {"layout": "thd", "cu_seqlens_q": starts([9])}, "3 dimensions"),
        (X, {"kv_lengths": ONE}, "4 dimensions"),
        (X[:0], {"layout": "thd", "cu_seqlens_q": starts([0])}, "at least one token"),
        (X, {"layout": "thd", "cu_seqlens_q": starts([9]), "q_descale": ONE}, "before quantising"),
        (X.to_sparse(), {"layout": "thd", "cu_seqlens_q": starts([9])}, "to_dense"),
    ],
)
def test_inconsistent_lengths_are_errors_that_name_them(x: Tensor, named: dict[str, Any], message: str) -> None:
    for ask in (attention, explain):
        with pytest.raises(InputError, match=message):
            ask(x, x, x, **named)


def test_k_and_v_of_different_lengths_are_refused_after_a_choice_is_remembered() -> None:
    named: dict[str, Any] = {"layout": "thd", "cu_seqlens_q": starts([4, 5])}
    attention(X, X, X, **named)
    for k, v in ((X, X[:8]), (X[:8], X[:8])):
        with pytest.raises(InputError, match=r"agree in length|has 8 tokens"):
            attention(X, k, v, **named)


def test_lengths_changed_before_the_backward_are_noticed() -> None:
    cu, q = starts([4, 5]), X.clone().requires_grad_()
    out = attention(q, X, X, layout="thd", cu_seqlens_q=cu)
    cu[1] = 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()  # type: ignore[union-attr]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_nested_tensors_give_nested_ones(layout: str) -> None:
    q, k, v, do = document_batch(torch.float64)
    cu = starts(LENGTHS)
    leaf = q.clone().requires_grad_()
    exact, exact_lse = attention(leaf, k, v, layout="thd", cu_seqlens_q=cu, is_causal=True, return_lse=True)
    gradient = torch.autograd.grad(exact, leaf, do)[0]
    leaf = q.clone().requires_grad_()
    nested_q = torch.nested.nested_tensor_from_jagged(leaf, cu.long())
    nested = [nested_q, *(torch.nested.nested_tensor_from_jagged(x, nested_q.offsets()) for x in (k, v))]
    if layout == "bhsd":
        nested = [x.transpose(1, 2) for x in nested]
    out, lse = attention(*nested, layout=layout, is_causal=True, return_lse=True)
    assert out.is_nested
    assert explain(*nested, layout=layout, is_causal=True).spec.lengths is not None
    back = out.transpose(1, 2) if layout == "bhsd" else out
    back_lse = lse.transpose(1, 2) if layout == "bhsd" else lse
    assert torch.equal(back.values(), exact)
    assert torch.equal(back_lse.values(), exact_lse.mT)
    assert torch.equal(torch.autograd.grad(back.values(), leaf, do)[0], gradient)
    with pytest.raises(InputError, match="all be nested"):
        attention(nested[0], ROWS, ROWS, layout=layout)


def test_autocast_casts_packed_tensors() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(X, X, X, layout="thd", cu_seqlens_q=starts([4, 5])).dtype == torch.bfloat16
