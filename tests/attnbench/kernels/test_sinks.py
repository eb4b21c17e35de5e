"""Attention sinks: one more logit per head, compared with an explicit softmax."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import attnbench
from attnbench import AttentionSpec, Mask, attention, explain, guard
from attnbench.errors import InputError, RefusedError
from attnbench.problem.spec_text import short_fields


def exact_attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """(out, lse) in FP64, with the sinks as a column of scores; 0 in a row without keys and without a sink."""
    q, k, v, sinks = (x.double() for x in (q, k, v, sinks))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    rows, keys = torch.arange(q.shape[2]), torch.arange(k.shape[2])
    hidden = mask.hidden(rows, keys, q.shape[2], k.shape[2])
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    lse = scores.logsumexp(-1)
    return (scores - lse.clamp_min(-1e300)[..., None]).exp()[..., :-1] @ v, lse


def close(x: Tensor, y: Tensor, most: float = 1e-5) -> bool:
    both = torch.isinf(x) & (x == y)
    return bool((x.double() - y).masked_fill(both, 0).norm() <= most * (y.masked_fill(both, 0).norm() + 0.01))


numbers = st.sampled_from([-torch.inf, -30.0, -1.0, 0.0, 2.0, 40.0])


@given(
    st.integers(1, 2), st.sampled_from([(1, 1), (4, 2), (3, 3)]), st.integers(1, 9), st.integers(1, 9),
    st.sampled_from([Mask(), Mask(right=0), Mask(2, 0, "bottom-right")]), st.data(),
    st.sampled_from(["reference:fp32>reference:fp32", "sdpa-flash:fp32>sdpa-flash:fp32"]), st.integers(0, 9),
)  # fmt: skip
def test_out_lse_and_gradients_agree_with_an_extra_score_column(batch, heads, queries, keys, mask, data, plan, seed):
    random = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads[0], queries, 4), (batch, heads[1], keys, 4), (batch, heads[1], keys, 4))
    given = [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]
    given.append(torch.tensor([data.draw(numbers) for _ in range(heads[0])]).requires_grad_())
    asked = {"window": (mask.left, mask.right), "causal_alignment": mask.alignment}
    spec = {"batch": batch, "heads": heads[0], "kv_heads": heads[1], "seqlen_q": queries, "seqlen_kv": keys}
    spec = AttentionSpec.make(**spec, head_dim=4, dtype="fp32", mask=mask, direction="training", sinks=True)
    if plan.startswith("sdpa") and spec.has_empty_rows:
        return  # refused
    try:
        out, lse = attention(*given[:3], sinks=given[3], **asked, return_lse=True, backend=plan)
    except RefusedError:
        assert plan.startswith("sdpa")
        return
    exact, exact_lse = exact_attention_with_sinks(*given, mask)
    assert close(out, exact)
    assert close(lse, exact_lse)
    grad = torch.randn(out.shape, generator=random)
    found, expected = (torch.autograd.grad(x, given, grad.to(x.dtype)) for x in (out, exact))
    for x, y in zip(found, expected, strict=True):
        assert close(x, torch.nan_to_num(y.double()))  # autograd's own, of a sink of minus infinity


def random_tensors(heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = ((1, heads, 12, 8), (1, kv_heads, 12, 8), (1, kv_heads, 12, 8), (heads,))
    return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


def test_sinks_alone_may_require_a_gradient_and_inputs_are_unchanged():
    q, k, v, sinks = random_tensors()
    before = [x.clone() for x in (q, k, v, sinks)]
    sinks.requires_grad_()
    out = attention(q, k, v, is_causal=True, sinks=sinks)
    out.sum().backward()
    *_, expected = torch.autograd.grad(exact_attention_with_sinks(q, k, v, sinks, Mask(right=0))[0].sum(), [sinks])
    assert close(sinks.grad, expected)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, sinks), before, strict=True))


def test_sinks_apply_to_each_sequence_of_a_packed_batch():
    q, k, v, sinks = random_tensors()
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = (x[0].transpose(0, 1) for x in (q, k, v))
    out, lse = attention(*packed, layout="thd", cu_seqlens_q=cu, is_causal=True, sinks=sinks, return_lse=True)
    for begin, end in ((0, 5), (5, 12)):
        alone = [x[:, :, begin:end] for x in (q, k, v)]
        own, own_lse = attention(*alone, is_causal=True, sinks=sinks, return_lse=True)
        assert close(out[begin:end].transpose(0, 1)[None], own.double())
        assert close(lse[None, :, begin:end], own_lse.double())


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (torch.zeros(3), "each of 4 query heads"),
        (torch.zeros(1, 4), "each of 4 query heads"),
        (torch.zeros(4, dtype=torch.int32), "must be bf16"),
        (torch.zeros(4, device="meta"), "must be on cpu"),
        (0.5, "must be a torch.Tensor"),
    ],
)
def test_invalid_sinks_are_refused(sinks, message):
    with pytest.raises(InputError, match=message):
        attention(*random_tensors()[:3], sinks=sinks)


def test_padded_rows_and_compiled_code_with_sinks_are_refused():
    q, k, v, sinks = random_tensors()
    with pytest.raises(InputError, match="not padded"):
        attention(q, k, v, sinks=sinks, kv_lengths=torch.tensor([7], dtype=torch.int32))
    with pytest.raises(RefusedError, match="no log-sum-exp, by which sinks are added"):
        attention(q, k, v, sinks=sinks, backend="sdpa-math")
    choice = explain(q, k, v, sinks=sinks)
    assert choice.spec.sinks
    assert "sinks" in str(choice.spec)


def test_a_spec_with_sinks_round_trips_and_one_without_is_unchanged():
    spec = AttentionSpec.make(batch=1, heads=2, seqlen_q=8, head_dim=16)
    assert "sinks" not in spec.to_dict()
    sunk = spec.replace(sinks=True)
    assert AttentionSpec.from_dict(sunk.to_dict()) == sunk == AttentionSpec.from_dict(short_fields(sunk))
    assert str(sunk) != str(spec)


def test_a_guard_finds_no_breach_in_calls_with_sinks():
    q, k, v, sinks = (x.requires_grad_() for x in random_tensors(dtype=torch.bfloat16))
    with guard(every=1) as seen:
        attention(q, k, v, is_causal=True, sinks=sinks, backend="sdpa-flash").sum().backward()
    assert not seen.breaches
    assert attnbench.attention(q, k, v).shape == q.shape
