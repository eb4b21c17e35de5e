"""The replacement of torch's SDPA: torch's results for every call in the block, also in recomputation."""

import threading
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import error, tensor
from torch import nn
from torch.utils.checkpoint import checkpoint

from attnbench import use_backend
from attnbench.errors import AttnbenchWarning, InputError, NoPlanError, RefusedError, UnknownBackendError
from attnbench.integrations.sdpa import replaced

tensor = partial(tensor, grad=True)
FP8 = {"backend": "emulated", "dtype": "fp8"}  # differs from torch by more than rounding, which shows that it ran


def equals_torch(out, q):
    return torch.equal(out, F.scaled_dot_product_attention(q, q, q))


@st.composite
def sdpa_calls(draw):
    """Shapes of two to five axes, a mask in any form, and whether the call can be served."""
    axes = draw(st.integers(2, 5))
    group, kv_heads = draw(st.sampled_from([(1, 1), (1, 2), (2, 2)])) if axes > 2 else (1, 1)
    lead = tuple(draw(st.lists(st.integers(1, 2), min_size=max(0, axes - 3), max_size=max(0, axes - 3))))
    seqlen_q, seqlen_kv = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    heads = () if axes == 2 else (kv_heads * group,)
    q = (*lead, *heads, seqlen_q, 8)
    k, v = ((*lead, *(heads and (kv_heads,)), seqlen_kv, size) for size in (8, draw(st.sampled_from([8, 4]))))
    named = {"scale": draw(st.sampled_from([None, 0.3])), "enable_gqa": group > 1}
    kind = draw(st.sampled_from(["none", "causal", "all", "tril", "window", "float", "padding", "bias"]))
    seen, servable = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool), True
    if kind == "causal":
        named["is_causal"] = True
    elif kind != "none":
        if kind in ("tril", "float"):
            seen = seen.tril()
        elif kind == "window":
            seen = seen.tril(1).triu(-2)
            servable = bool(seen.any(-1).all())
        elif kind == "padding":
            seen = seen.clone()
            seen[:, draw(st.integers(0, seqlen_kv - 1))] = False
            servable = None  # the only key, or the last of few: a window may say the same
        named["attn_mask"] = seen
        if kind in ("float", "bias"):
            named["attn_mask"] = torch.zeros(seqlen_q, seqlen_kv).masked_fill(~seen, -torch.inf)
        if kind == "bias":
            named["attn_mask"][0, 0] = 0.5
            servable = False
    return (q, k, v), named, servable


@given(sdpa_calls())
def test_outputs_and_gradients_agree_with_torch(call):
    shapes, named, servable = call
    inputs = [tensor(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    with replaced("reference") as calls:
        try:
            out = F.scaled_dot_product_attention(*inputs, **named)
        except InputError:
            assert not servable
            return
        found = torch.autograd.grad(out.square().sum(), inputs)
    assert calls.served == 1
    assert servable is not False
    wanted = F.scaled_dot_product_attention(*inputs, **named)
    gradients = torch.autograd.grad(wanted.square().sum(), inputs)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_fp8_needs_opting_in_and_ends_with_the_block():
    q = tensor(1, 2, 64, 16)
    exact = F.scaled_dot_product_attention(q, q, q)
    with replaced(**FP8) as calls:
        out = torch.nn.functional.scaled_dot_product_attention(query=q, key=q, value=q)
        assert 1e-3 < error(out, exact) < 0.12
        assert calls.served == 1
    assert equals_torch(F.scaled_dot_product_attention(q, q, q), q)
    with replaced():
        assert error(F.scaled_dot_product_attention(q, q, q), exact) < 1e-6
        with use_backend(**FP8):
            assert torch.equal(F.scaled_dot_product_attention(q, q, q), out)
    with pytest.raises(ZeroDivisionError), replaced(**FP8):
        _ = 1 / 0
    assert equals_torch(F.scaled_dot_product_attention(q, q, q), q)


def test_other_threads_are_not_affected():
    q, outs = tensor(1, 2, 16, 16), []
    with replaced(**FP8) as calls:
        other = threading.Thread(target=lambda: outs.append(F.scaled_dot_product_attention(q, q, q)))
        other.start()
        other.join()
    assert calls.served == 0
    assert equals_torch(outs[0], q)


def test_the_innermost_nested_block_is_active():
    q = tensor(1, 2, 16, 16)
    with replaced(**FP8) as outer:
        with replaced("reference") as inner:
            out = F.scaled_dot_product_attention(q, q, q)
        assert (outer.served, inner.served) == (0, 1)
        F.scaled_dot_product_attention(q, q, q)
        assert outer.served == 1
        with pytest.warns(AttnbenchWarning, match="dropout"), replaced(otherwise="torch"):
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)  # torch's, not the outer block's
        assert outer.served == 1
    assert error(out, F.scaled_dot_product_attention(q, q, q)) < 1e-6


@pytest.mark.parametrize("nested", [False, True])
def test_multi_head_attention_modules_are_served(nested):
    heads = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x, causal = tensor(2, 6, 16), nn.Transformer.generate_square_subsequent_mask(6)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()

    def outs():
        return [
            heads(x, x, x, need_weights=False)[0],
            heads(x, x, x, need_weights=False, attn_mask=causal, is_causal=True)[0],
            heads(x, x, x, need_weights=False, attn_mask=causal)[0],
            layer(x, src_mask=causal),
        ]

    wanted = outs()
    with replaced("reference") if nested else replaced(**FP8), replaced(**FP8) as calls:
        found = outs()
        assert calls.served == 4
        padding = {"need_weights": False, "key_padding_mask": torch.arange(6).expand(2, 6) > torch.tensor([[5], [3]])}
        with pytest.raises(InputError, match="biases or blocks"):  # causal and padded
            heads(x, x, x, attn_mask=causal, is_causal=True, **padding)
        found.append(heads(x, x, x, **padding)[0])
    wanted.append(heads(x, x, x, **padding)[0])
    with replaced(**FP8), pytest.raises(InputError, match="dropout"):
        nn.MultiheadAttention(16, 2, dropout=0.1)(x, x, x, need_weights=False)
    for mine, theirs in zip(found, wanted, strict=True):
        assert 1e-4 < error(mine, theirs) < 0.12


def test_unsupported_calls_are_refused_unless_a_fallback_was_requested():
    q = tensor(1, 2, 6, 8)
    hole = torch.ones(6, 6, dtype=torch.bool)
    hole[3, 2] = False
    nested = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged)
    nested = nested.transpose(1, 2)

    class Own(torch.Tensor):
        pass

    for message, (args, named) in {
        "biases or blocks": ((q, q, q, hole), {}),
        "tensors that are broadcast": ((q, q[:, :, None], q[:, :, None]), {}),
        "nested tensors": ((nested, nested, nested), {}),
        "tensors of classes of their own": ((q.detach().as_subclass(Own), q, q), {}),
    }.items():
        with replaced() as calls, pytest.raises(InputError, match=message):
            F.scaled_dot_product_attention(*args, **named)
        assert calls.served == 0
        with pytest.warns(AttnbenchWarning, match=message), replaced(**FP8, otherwise="torch") as calls:
            out = F.scaled_dot_product_attention(*args, **named)
        assert (calls.served, calls.handed_on.total()) == (0, 1)
        wanted = F.scaled_dot_product_attention(*args, **named)
        assert nested is args[0] or torch.equal(out, wanted)
    with replaced(), pytest.raises(InputError, match="dropout"):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    with replaced(), pytest.raises(InputError, match="an attn_mask beside is_causal=True"):
        F.scaled_dot_product_attention(q, q, q, ~hole, is_causal=True)


def test_calls_that_attention_refuses_are_refused_or_fall_back():
    q = tensor(1, 2, 6, 8)
    with replaced("sdpa-cudnn"), pytest.raises(RefusedError, match="Plans that can"):
        F.scaled_dot_product_attention(q, q, q)
    meta = torch.empty(1, 2, 6, 8, device="meta")
    with replaced(), pytest.raises((InputError, NoPlanError), match="meta"):
        F.scaled_dot_product_attention(meta, meta, meta)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with replaced("sdpa-cudnn", otherwise="torch") as calls:
            outs = [F.scaled_dot_product_attention(q, q, q) for _ in range(2)]
    assert all(equals_torch(out, q) for out in outs)
    (warning,) = caught
    assert str(warning.message).startswith("scaled_dot_product_attention: attention raises RefusedError: sdpa-c")
    assert dict(calls.handed_on) == {"attention raises RefusedError": 2}
    assert str(calls) == "0 calls served by attnbench, 2 handed on to torch\n  2 attention raises RefusedError"
    with pytest.raises(UnknownBackendError, match="sdpa-flash"), replaced("sdpa-flesh"):
        pass
    with pytest.raises(InputError, match="otherwise must be 'raise' or 'torch'"), replaced(otherwise="sdpa"):
        pass


def test_a_mask_tensor_in_compiled_code_breaks_the_graph_or_falls_back():
    q, mask = tensor(1, 2, 16, 16), torch.ones(16, 16, dtype=torch.bool).tril()
    hole = mask.clone()
    hole[3, 2] = False

    def program(q, mask):
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    wanted = program(q, mask)
    with replaced(**FP8):
        compiled = torch.compile(program, backend="eager")
        assert 1e-3 < error(compiled(q, mask), wanted) < 0.12
        with pytest.raises(InputError, match="biases or blocks"):
            compiled(q, hole)
    torch._dynamo.reset()
    with pytest.warns(AttnbenchWarning, match="an attn_mask in compiled code"), replaced(otherwise="torch") as calls:
        assert torch.equal(torch.compile(program, backend="eager", fullgraph=True)(q, hole), program(q, hole))
    assert calls.handed_on["an attn_mask in compiled code"] == 1


WEIGHT = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))


def layer(q):
    x = q @ WEIGHT
    return F.scaled_dot_product_attention(x, x, x, is_causal=True).sin()


def two_layers(q):
    return layer(q) + layer(q)


kept = partial(checkpoint, use_reentrant=False)


class CustomCheckpoint(torch.autograd.Function):
    """A custom checkpoint like those of DeepSpeed and Megatron."""

    @staticmethod
    def forward(ctx, function, q):
        ctx.run_function = function
        ctx.save_for_backward(q)
        with torch.no_grad():
            return function(q)

    @staticmethod
    def backward(ctx, grad):
        (q,) = ctx.saved_tensors
        q = q.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run_function(q)
        out.backward(grad)
        return None, q.grad


CHECKPOINTS = {
    "reentrant": lambda q: checkpoint(two_layers, q, use_reentrant=True),
    "not reentrant": lambda q: kept(two_layers, q),
    "nested": lambda q: kept(lambda q: kept(layer, q) + kept(layer, q), q),
    "custom": lambda q: CustomCheckpoint.apply(two_layers, q),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_checkpointing_changes_no_outputs_or_gradients(how, inside):
    q = tensor(1, 2, 32, 16)

    def step(function):
        with replaced(**FP8) as calls:
            out = function(q)
            if inside:
                out.square().sum().backward()
        if not inside:
            out.square().sum().backward()
        gradient, q.grad = q.grad, None
        return out.detach(), gradient, calls.served

    wanted, found = step(two_layers), step(CHECKPOINTS[how])
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert wanted[2] == 2
    assert found[2] >= 4


def test_the_forwards_context_applies_in_the_backward():
    q = tensor(1, 2, 32, 16)
    with replaced(**FP8):
        (wanted,) = torch.autograd.grad(two_layers(q).square().sum(), q)
    with replaced(), use_backend(**FP8):
        out = kept(two_layers, q)
    assert torch.equal(torch.autograd.grad(out.square().sum(), q)[0], wanted)
    assert not torch.equal(torch.autograd.grad(kept(two_layers, q).square().sum(), q)[0], wanted)


def test_an_autograd_function_that_may_recompute_differently_is_refused():
    class Unknown(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            return F.scaled_dot_product_attention(q, q, q)

        @staticmethod
        def backward(ctx, grad):
            return grad

    with replaced(), pytest.raises(InputError, match="an autograd function that may compute attention again"):
        Unknown.apply(tensor(1, 2, 8, 16))


def test_fx_graphs_contain_torchs_sdpa_and_jit_traces_are_refused():
    q = tensor(1, 2, 8, 16).detach()

    def program(q):
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    with replaced(**FP8) as calls:
        graph = torch.fx.symbolic_trace(program)
        assert calls.served == 0
        found = graph(q)
        assert calls.served == 1
        with pytest.raises(InputError, match=r"torch.jit.trace, which records no operator of attnbench"):
            torch.jit.trace(program, (q,))
    assert torch.equal(graph(q), program(q))
    assert not torch.equal(found, program(q))
    with pytest.warns(AttnbenchWarning, match=r"torch\.jit\.trace"), replaced(otherwise="torch"):
        traced = torch.jit.trace(program, (q,))
    assert torch.equal(traced(q), program(q))
